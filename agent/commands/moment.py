"""``--from`` and ``--to``: a moment of a recording, as a person types it."""

from __future__ import annotations

import re
from argparse import ArgumentTypeError
from datetime import datetime, timedelta, timezone

from dsprobe.agent.commands import values
from dsprobe.agent.commands.errors import USAGE, Failure
from dsprobe.recordings import session
from dsprobe.recordings.session import Session

_TIME_OF_DAY = re.compile(r"(\d{1,2}):(\d\d)(?::(\d\d(?:\.\d{1,6})?))?")


def interval(source: Session, start: str | None, end: str | None) -> tuple[int, int]:
    """``[start, end)`` in CLOCK_MONOTONIC ns; all of the recording where both are absent."""
    begin = 0 if start is None else moment(source, start)
    until = session.FOREVER if end is None else moment(source, end)
    if begin >= until:
        raise Failure(f"--from {start} is not before --to {end}", "swap them", USAGE)
    return begin, until


def moment(source: Session, text: str) -> int:
    """CLOCK_MONOTONIC ns of ``90s`` (from the start), ``-30s`` (from the end), ``14:03:20`` or an
    ISO date and time (wall clock of the recorded host where no zone is given)."""
    typed = text.strip()
    first, last = source.span()
    if not last:
        raise Failure(f"{source.name} holds no rows that --from and --to could select")
    try:
        if typed.startswith("-"):
            return max(last - values.duration(typed[1:]), 0)
        if typed in ("0", "0s"):
            return first
        if ":" not in typed:
            return first + values.duration(typed)
        return _wall(source, typed, first)
    except (ArgumentTypeError, ValueError, OverflowError):
        raise Failure(
            f"{text!r} is not a moment",
            "write 90s (from the start), -30s (from the end), 14:03:20 or 2026-05-01T14:03:20",
            USAGE,
        ) from None


def _wall(source: Session, typed: str, first: int) -> int:
    clock = session.clock(source)
    if not len(clock.mono):
        raise Failure(
            f"{source.name} has no wall clock", "count from its start, such as --from 90s", USAGE
        )
    zone = timezone(timedelta(seconds=int(session.facts(source).get("utc_offset_s", "0"))))
    start = clock.to_wall(first)
    if m := _TIME_OF_DAY.fullmatch(typed):
        day = datetime.fromtimestamp(start / 1e9, zone)
        at = day.replace(hour=int(m[1]), minute=int(m[2]), second=0, microsecond=0)
        at += timedelta(seconds=float(m[3] or 0))
        # The first such time from the start on; a minute of grace for a start that is rounded.
        if at < day - timedelta(minutes=1):
            at += timedelta(days=1)
    else:
        at = datetime.fromisoformat(typed.replace("Z", "+00:00"))
        at = at if at.tzinfo else at.replace(tzinfo=zone)
    since = at - datetime(1970, 1, 1, tzinfo=timezone.utc)
    ns = (since.days * 86400 + since.seconds) * 10**9 + since.microseconds * 1000
    return max(clock.to_mono(ns), 0)
