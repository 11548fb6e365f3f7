"""Values as people type them on the command line."""

from __future__ import annotations

import re
from argparse import ArgumentTypeError

_NS = {"ns": 1, "us": 10**3, "ms": 10**6, "s": 10**9, "m": 60 * 10**9, "h": 3600 * 10**9}
_NS["d"] = 24 * _NS["h"]
_NUMBER = r"[0-9]{1,18}(?:\.[0-9]{1,9})?"
_PART = re.compile(rf"({_NUMBER})(ns|us|ms|s|m|h|d)")
_WHOLE = re.compile(rf"(?:{_PART.pattern})+")
_SIZE = re.compile(rf"({_NUMBER})\s*([kmgt]?)(?:i?b)?", re.IGNORECASE)
_NAME = re.compile(r"[\w.-]{1,64}")

MAX_DURATION = 366 * _NS["d"]
MAX_SIZE = 1 << 50


def duration(text: str) -> int:
    """Nanoseconds, above 0, of ``250ms``, ``10s``, ``1.5m``, ``1h30m``; bare, it is seconds."""
    typed = text.strip()
    if re.fullmatch(_NUMBER, typed):
        typed += "s"
    if not _WHOLE.fullmatch(typed):
        raise ArgumentTypeError(f"{text!r} is not a duration such as 250ms, 10s, 5m or 1h30m")
    ns = round(sum(float(n) * _NS[unit] for n, unit in _PART.findall(typed)))
    if not 0 < ns <= MAX_DURATION:
        raise ArgumentTypeError(f"{text!r} is not between 1ns and 366d")
    return ns


def size(text: str) -> int:
    """Bytes, above 0, of ``4096``, ``64k``, ``256M``, ``1.5GiB``; units are powers of 1024."""
    m = _SIZE.fullmatch(text.strip())
    if not m:
        raise ArgumentTypeError(f"{text!r} is not a size such as 64k, 256M or 1G")
    n = round(float(m[1]) * (1 << 10 * " kmgt".index(m[2].lower() or " ")))
    if not 0 < n <= MAX_SIZE:
        raise ArgumentTypeError(f"{text!r} is not between 1 byte and 1024T")
    return n


def names(text: str) -> tuple[str, ...]:
    """``a,b`` as ("a", "b"), each once."""
    found = tuple(dict.fromkeys(part.strip() for part in text.split(",")))
    if not all(_NAME.fullmatch(name) for name in found):
        raise ArgumentTypeError(f"{text!r} is not a list of names such as softirq,tcp")
    return found


def pids(text: str) -> tuple[int, ...]:
    """``12,13`` as (12, 13), each once."""
    parts = [part.strip() for part in text.split(",")]
    if not all(p.isascii() and p.isdecimal() and 0 < len(p) <= 10 and int(p) for p in parts):
        raise ArgumentTypeError(f"{text!r} is not a list of process ids such as 1234,1240")
    return tuple(dict.fromkeys(map(int, parts)))


def speed(text: str) -> float:
    """A factor such as ``2``, ``0.25``, ``1/4``, or ``4x``; negative plays backwards."""
    m = re.fullmatch(rf"(-?{_NUMBER})(?:/([1-9][0-9]{{0,3}}))?x?", text.strip())
    factor = float(m[1]) / int(m[2] or 1) if m else 0.0
    if not 1 / 64 <= abs(factor) <= 64:
        raise ArgumentTypeError(f"{text!r} is not a speed from 1/64 to 64")
    return factor


def output(text: str) -> str:
    """The name of a file to write: recordings are written in place, so not to a pipe."""
    if text in ("", "-"):
        raise ArgumentTypeError(f"{text!r} is not supported: name a file, such as run.mcap")
    return text


def columns(text: str) -> int:
    """A width in characters, 1 to 1000."""
    if not (text.isascii() and text.isdecimal()) or not 1 <= int(text) <= 1000:
        raise ArgumentTypeError(f"{text!r} is not a width from 1 to 1000")
    return int(text)


def count(text: str) -> int:
    """How many, 1 to 1000."""
    if not (text.isascii() and text.isdecimal() and len(text) <= 4) or not 1 <= int(text) <= 1000:
        raise ArgumentTypeError(f"{text!r} is not a number from 1 to 1000")
    return int(text)
