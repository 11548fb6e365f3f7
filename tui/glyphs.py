"""The characters a screen is made of: block elements, or ASCII where the locale has no more."""

from __future__ import annotations

import os
import unicodedata
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt


@dataclass(frozen=True)
class Glyphs:
    """``levels`` are the heights of a bar, low to high; ``zero`` stands for a known 0.  An unknown
    value is a blank."""

    levels: str
    zero: str
    rule: str
    marker: str
    alert: str
    to_ascii: bool

    def bars(self, values: npt.NDArray[np.float64], scale: float, height: int = 1) -> list[str]:
        """A bar chart of ``values``, one character each, ``height`` rows from the top down.

        Anything over 0 is at least the lowest level, so it is never taken for 0.
        """
        full = len(self.levels)
        known = np.isfinite(values)
        part = np.where(known, values, 0.0) / (scale if scale > 0 else 1.0)
        level = np.clip(np.ceil(part * full * height - 1e-9), 0, full * height).astype(int)
        level[known & (values > 0) & (level == 0)] = 1
        alphabet = np.array([" ", *self.levels])
        rows = []
        for row in range(height - 1, -1, -1):
            chars = alphabet[np.clip(level - row * full, 0, full)]
            if row == 0:
                chars[known & (level == 0)] = self.zero
            rows.append("".join(chars.tolist()))
        return rows

    def clean(self, text: str) -> str:
        """``text`` with every character exactly one cell wide and none that commands a terminal.

        Names and labels come from files, sockets and the kernel: none is to be trusted.
        """
        if text.isascii() and text.isprintable():
            return text
        return "".join(self._cell(c) for c in unicodedata.normalize("NFC", text))

    def _cell(self, c: str) -> str:
        if c.isascii():
            return c if c.isprintable() else "?"
        if self.to_ascii:
            return _ASCII.get(c, "?")
        wide = unicodedata.east_asian_width(c) in "WF" or unicodedata.combining(c)
        return c if c.isprintable() and not wide else "?"


_ASCII = {"→": ">", "µ": "u", "×": "x", "–": "-", "—": "-", "…": ".", "’": "'", "≥": ">", "≤": "<"}

BLOCKS = Glyphs("▁▂▃▄▅▆▇█", ".", "│", "▼", "▲", to_ascii=False)
ASCII = Glyphs("_:-=+*#@", ".", "|", "v", "!", to_ascii=True)

_POOR = ("linux", "vt100", "vt102", "vt220", "dumb", "ansi")


def choose(environ: Mapping[str, str] | None = None) -> Glyphs:
    """Block elements where the locale is UTF-8 and the terminal is one that has them."""
    env = _at_start() if environ is None else environ
    locale = env.get("LC_ALL") or env.get("LC_CTYPE") or env.get("LANG") or "C"
    utf8 = "utf-8" in locale.lower() or "utf8" in locale.lower()
    return BLOCKS if utf8 and env.get("TERM", "") not in _POOR else ASCII


def _at_start() -> dict[str, str]:
    """The environment this process was started with: Python itself turns the C locale into
    C.UTF-8 (PEP 538), which says nothing about the terminal."""
    try:
        with open("/proc/self/environ", "rb") as f:
            pairs = [os.fsdecode(p).partition("=") for p in f.read().split(b"\0") if b"=" in p]
    except OSError:
        return dict(os.environ)
    return {name: value for name, _, value in pairs}
