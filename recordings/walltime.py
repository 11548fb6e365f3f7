"""Wall-clock text of monotonic moments."""

from __future__ import annotations

from datetime import datetime, timedelta, timezone

from dsprobe.recordings import session

_EPOCH = datetime(1970, 1, 1, tzinfo=timezone.utc)


class WallTime:
    """Wall-clock text of monotonic moments, in the zone of the recorded host."""

    def __init__(self, clock: session.Clock, facts: dict[str, str]) -> None:
        self._clock = clock
        try:
            offset = timedelta(seconds=int(facts.get("utc_offset_s", "0")))
            self._zone = timezone(offset)
        except (ValueError, OverflowError):
            self._zone = timezone.utc

    def iso(self, t: int) -> str | None:
        """ISO 8601 with microseconds and zone; None where the recording has no clock."""
        wall = self._clock.to_wall(t)
        if not wall:
            return None
        try:
            when = _EPOCH + timedelta(microseconds=wall // 1000)
            return when.astimezone(self._zone).isoformat(timespec="microseconds")
        except (OverflowError, ValueError):
            return None
