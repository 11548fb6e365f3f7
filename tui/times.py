"""Moments as text, and text as moments: wall clock with its zone, or time since the start."""

from __future__ import annotations

import re
from dataclasses import dataclass
from datetime import datetime, timedelta, timezone, tzinfo
from zoneinfo import ZoneInfo

from dsprobe.recordings.session import Clock

SECOND = 1_000_000_000
NEAR = 1_000_000
"""A moment this much before a round one (ns) is written as the round one."""
_TICKS = tuple(
    s * SECOND for s in (1, 2, 5, 10, 15, 30, 60, 120, 300, 600, 900, 1800, 3600, 7200, 10800,
                         21600, 43200, 86400, 172800, 604800, 2592000)
)  # fmt: skip
_UNITS = {"ms": 0.001, "s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0}
_PART = re.compile(r"(\d{1,12}(?:\.\d{1,9})?)(ms|s|m|h|d)")


def zone_of(name: str) -> tzinfo | None:
    """The recorded host's zone, by its name in the zone database; None for the viewer's own."""
    if name.upper() in ("UTC", "GMT", "ETC/UTC"):
        return timezone.utc
    try:
        return ZoneInfo(name) if "/" in name else None
    except (KeyError, ValueError, OSError):  # not in the database, or there is none
        return None


@dataclass(frozen=True)
class Scale:
    """How moments (CLOCK_MONOTONIC ns) are written.  ``start`` is the session's first moment."""

    clock: Clock
    start: int
    zone: tzinfo | None = None
    relative: bool = False

    @property
    def is_wall(self) -> bool:
        return not self.relative and len(self.clock.mono) > 0

    def wall(self, t: int) -> datetime:
        """Wall-clock time with its zone; the first or last year where a clock is nonsense."""
        try:
            utc = datetime.fromtimestamp(self.clock.to_wall(t) // 1000 / 1e6, timezone.utc)
            return utc.astimezone(self.zone)
        except (ValueError, OverflowError, OSError):
            return datetime.min.replace(tzinfo=timezone.utc)

    def text(self, t: int) -> str:
        """To a tenth of a second: ``14:03:22.5 UTC`` or ``+1:02:03.5``."""
        if not self.is_wall:
            return elapsed(t + NEAR - self.start, 1)
        # Pairs of clocks are good to some hundred ns: what was typed as .4 must not read .3.
        wall = self.wall(t + NEAR)
        return f"{wall:%H:%M:%S}.{wall.microsecond // 100_000} {wall:%Z}"

    def precise(self, t: int) -> str:
        """To a millisecond, without its zone: ``14:03:22.512``."""
        if not self.is_wall:
            ms = (t - self.start) // 1_000_000
            return f"{elapsed(t - self.start, 0)}.{ms % 1000:03}"
        return f"{self.wall(t):%H:%M:%S.%f}"[:-3]

    def date(self, t: int) -> str:
        """``2026-03-01``, or nothing where no wall clock is shown."""
        return f"{self.wall(t):%Y-%m-%d}" if self.is_wall else ""

    def ticks(self, first: int, last: int, apart: int) -> list[tuple[int, str]]:
        """Round moments of [first, last], at least ``apart`` ns apart, with their text."""
        step = next((s for s in _TICKS if s >= apart), _TICKS[-1])
        if not self.is_wall:
            begin = self.start + -(-(first - self.start) // step) * step
            return [(t, elapsed(t - self.start, 0)) for t in range(begin, last + 1, step)]
        ahead = self.wall(first).utcoffset() or timedelta()
        shift = int(ahead.total_seconds()) * SECOND
        out: list[tuple[int, str]] = []
        wall = -(-(self.clock.to_wall(first) + shift) // step) * step - shift
        while len(out) < 500:
            t = self.clock.to_mono(wall)
            if not first <= t <= last:
                return out
            at = self.wall(t + NEAR)
            out.append((t, f"{at:%m-%d}" if step >= 86400 * SECOND else f"{at:%H:%M:%S}"))
            wall += step
        return out

    def parse(self, text: str, here: int, end: int) -> int | None:
        """The moment ``text`` means; None where it means nothing.

        ``14:03[:22.5]`` (the day it was last in the session), ``2026-03-01 14:03``, ``-30s`` and
        ``+5m`` from ``here``, ``1m30s`` from the start, ``40%`` of the session.
        """
        text = text.strip()
        if text.endswith("%"):
            number = text[:-1]
            ok = re.fullmatch(r"\d{1,3}(\.\d{1,9})?", number)
            return self.start + int((end - self.start) * float(number) / 100) if ok else None
        length = duration(text.lstrip("+-"))
        if length is not None:
            sign = {"-": -1, "+": 1}.get(text[0])
            return self.start + length if sign is None else here + sign * length
        return self._wall_moment(text, here, end) if len(self.clock.mono) else None

    def _wall_moment(self, text: str, here: int, end: int) -> int | None:
        match = re.fullmatch(
            r"(?:(\d{4}-\d\d-\d\d)[ T])?(\d{1,2}):(\d\d)(?::(\d\d)(\.\d{1,9})?)?", text
        )
        if not match:
            return None
        day, hour, minute, second, part = match.groups()
        try:
            date = datetime.fromisoformat(day) if day else self.wall(here)
            at = date.replace(
                hour=int(hour), minute=int(minute), second=int(second or 0), microsecond=0
            )
            if at.tzinfo is None:
                at = at.replace(tzinfo=self.zone) if self.zone else at.astimezone()
            days = (0,) if day else (0, -1, 1)
            moments = [self._mono(at + timedelta(days=n)) for n in days]
        except (ValueError, OverflowError, OSError):
            return None
        fraction = round(float(part or 0) * SECOND)
        held = [t + fraction for t in moments if self.start <= t + fraction <= end]
        return held[0] if held else moments[0] + fraction

    def _mono(self, at: datetime) -> int:
        return self.clock.to_mono(int(at.timestamp()) * SECOND)


def duration(text: str) -> int | None:
    """``90s``, ``1m30s``, ``250ms`` in ns; bare, it is seconds; None for anything else."""
    if re.fullmatch(r"\d{1,9}(\.\d{1,9})?", text, re.ASCII):
        text += "s"
    parts = _PART.findall(text)
    if not parts or "".join(n + u for n, u in parts) != text:
        return None
    return round(sum(float(n) * _UNITS[u] for n, u in parts) * SECOND)


def elapsed(ns: int, decimals: int) -> str:
    """``+0:12``, ``+1:02:03.5``"""
    sign, ns = ("-", -ns) if ns < 0 else ("+", ns)
    seconds = ns // SECOND
    hours, minutes, seconds = seconds // 3600, seconds // 60 % 60, seconds % 60
    head = f"{hours}:{minutes:02}" if hours else f"{minutes}"
    tail = f".{ns % SECOND // 100_000_000}" if decimals else ""
    return f"{sign}{head}:{seconds:02}{tail}"
