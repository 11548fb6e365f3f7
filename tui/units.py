"""Numbers as short text: at most eight characters, the unit included."""

from __future__ import annotations

import math

from dsprobe.recordings.streams import HIST_SLOTS

_SI = ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k"))
_TIME = ((1e9, "s"), (1e6, "ms"), (1e3, "us"), (1.0, "ns"))
_BYTES = ((1 << 40, "T"), (1 << 30, "G"), (1 << 20, "M"), (1 << 10, "k"))


def digits(value: float) -> str:
    """Three significant digits, without an exponent: <0.01, 0.04, 3.14, 41.3, 812."""
    size = abs(value)
    if size >= 99.95:
        return f"{value:.0f}"
    if size >= 9.995:
        return f"{value:.1f}"
    if 0 < size < 0.005:
        return "<0.01" if value > 0 else ">-0.01"
    return "0" if value == 0 else f"{value:.2f}"


def si(value: float) -> str:
    """``12.3k``"""
    for factor, letter in _SI:
        if abs(value) >= factor * 0.99995:
            return digits(value / factor) + letter
    return f"{value:.0f}" if value == int(value) else digits(value)


def whole(n: int) -> str:
    """A count with all its digits where there are few: ``4,510``, ``12.3k``."""
    return f"{n:,}" if abs(n) < 10_000 else si(n)


def nanoseconds(value: float) -> str:
    """``1.05ms``"""
    for factor, letter in _TIME:
        if abs(value) >= factor * 0.9995:
            return digits(value / factor) + letter
    return "0ns" if value == 0 else digits(value) + "ns"


def size(value: float) -> str:
    """``92.1M``, of 1024"""
    for factor, letter in _BYTES:
        if value >= factor:
            return digits(value / factor) + letter
    return f"{value:.0f}"


def change(value: float) -> str:
    """``+92.1M``, of 1024"""
    sign = "-" if value < 0 else "+" if value > 0 else ""
    return sign + size(abs(value))


def bound(value: float) -> str:
    """``≤1.05ms``: the upper edge of a slot of a log2 histogram; the last one has none."""
    if not math.isfinite(value):
        return "-"
    top = 2.0**HIST_SLOTS
    return "≤" + nanoseconds(value) if value < top else "≥" + nanoseconds(top / 2)


def quantity(value: float, unit: str) -> str:
    """A lane's value in the lane's unit; ``-`` where it is not known."""
    if not math.isfinite(value):
        return "-"
    if unit == "ns":
        return nanoseconds(value)
    if unit == "≤ns":
        return bound(value)
    if unit == "%":
        return digits(value) + "%"
    if unit in ("B", "B/s"):
        return size(value) + unit[1:]
    if unit == "CPUs":
        return digits(value) + "CPU"
    if unit == "°C":
        return digits(value) + "C"
    return si(value) + (unit if unit in ("/s", "W") else "")


def span(ns: int) -> str:
    """A length of time as people say it: ``350ms``, ``12s``, ``4m05s``, ``2h30m``, ``3d04h``."""
    sign, ns = ("-", -ns) if ns < 0 else ("", ns)
    seconds = ns // 1_000_000_000
    if ns < 1_000_000_000:
        return f"{sign}{ns // 1_000_000}ms"
    if seconds < 10 and ns % 1_000_000_000:
        return f"{sign}{ns / 1e9:.1f}s"
    for big, small, letters in ((86400, 3600, "dh"), (3600, 60, "hm"), (60, 1, "ms")):
        if seconds >= big:
            rest = seconds % big // small
            return f"{sign}{seconds // big}{letters[0]}" + (
                f"{rest:02}{letters[1]}" if rest else ""
            )
    return f"{sign}{seconds}s"


def count(n: int, what: str) -> str:
    """``1 process``, ``2 processes``, ``3 threads``"""
    return f"{n:,} {what}" + ("" if n == 1 else "es" if what.endswith("s") else "s")


def speed(value: float) -> str:
    """``x4``, ``x1/8``"""
    return f"x{value:g}" if value >= 1 else f"x1/{1 / value:g}"
