"""One-second sums of every lane, made while a file is written.

A second is summed up once :data:`LATE_NS` have passed since it ended, by the rows' own times, so
rows that come late still count; those that come later than that are counted in ``late`` and are
only in the rows below.  A lane has a value only where a row of its stream speaks for the second.
Lane :data:`COVERED` has one row for every second that was summed up: where it has none (the last
seconds of a file that was cut off, a damaged chunk), the rows below must be read.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from dsprobe.recordings import streams as st
from dsprobe.recordings.assemble import in_order
from dsprobe.recordings.lane import Edges, Lane, events_per_second
from dsprobe.recordings.lanes import LANES
from dsprobe.recordings.model import Rows
from dsprobe.recordings.samples import spoken

SECOND = 10**9
LATE_NS = 2 * SECOND
BLOCK_SECONDS = 60
COVERED = 0
VERSION = 4
"""Value of the rows of lane COVERED: ``Lane.since`` says from which version on a lane is there."""

_LANES: dict[str, list[Lane]] = {}
_REACH: dict[str, int] = {}
for _lane in LANES:
    _LANES.setdefault(_lane.stream, []).append(_lane)
    _REACH[_lane.stream] = max(_REACH.get(_lane.stream, 0), _lane.reach)


class Rollups:
    """Feed it rows in about the order of time; take the rows of ``rollup.lane`` it has ready."""

    def __init__(self) -> None:
        self._held: dict[str, list[Rows]] = {}
        self._open: int | None = None
        self._latest = 0
        self.late = 0

    def feed(self, stream: str, rows: Rows) -> None:
        """Take rows of any stream; those that no lane needs only move the time."""
        if stream.startswith("meta.") or not len(rows):
            return
        t = rows["t"]
        self._latest = max(self._latest, int(t.max()))
        if stream not in _LANES or not _holds(rows, st.STREAMS[stream].dtype):
            return
        if self._open is not None:
            on_time = t >= self._open * SECOND
            if not on_time.all():
                self.late += int((~on_time).sum())
                rows = rows[on_time]
        if len(rows):
            self._held.setdefault(stream, []).append(rows)

    def take(self, all: bool = False) -> Rows:
        """Rows for the seconds that are over, each second once; with ``all`` the last ones too."""
        until = self._latest + SECOND if all else self._latest - LATE_NS
        return self._sum_up(until // SECOND)

    def _sum_up(self, until: int) -> Rows:
        done = []
        while (begin := self._next_second()) < until:
            end = min(begin + BLOCK_SECONDS, until)
            done.append(self._block(begin, end))
            self._open = end
            edge = end * SECOND
            for name, parts in self._held.items():
                kept = [p[p["t"] >= edge - _REACH[name]] for p in parts]
                self._held[name] = [p for p in kept if len(p)]
        return np.concatenate(done) if done else st.ROLLUP_LANE.empty()

    def _next_second(self) -> int:
        """The second of the earliest row held, or far away: a pause costs nothing."""
        edge = (self._open or 0) * SECOND
        fresh = (p[p["t"] >= edge] for parts in self._held.values() for p in parts)
        firsts = [_first(p) for p in fresh if len(p)]
        return max(min(firsts) // SECOND, self._open or 0) if firsts else 1 << 62

    def _block(self, begin: int, end: int) -> Rows:
        seconds = np.arange(begin, end)
        edges = np.arange(begin, end + 1) * SECOND
        found = [st.ROLLUP_LANE.rows(t=seconds * SECOND, lane=COVERED, value=VERSION)]
        for name, parts in self._held.items():
            if not parts:
                continue
            rows = in_order(parts[0] if len(parts) == 1 else np.concatenate(parts))
            spoken = _spoken(rows, edges)
            for lane in _LANES[name]:
                values = lane.compute(rows, edges)
                has = spoken & ~np.isnan(values)
                if lane.quiet:
                    has |= values > 0
                if has.any():
                    found.append(
                        st.ROLLUP_LANE.rows(
                            t=seconds[has] * SECOND, lane=lane.id, value=values[has]
                        )
                    )
        return in_order(np.concatenate(found))


def _holds(rows: Rows, dtype: np.dtype[Any]) -> bool:
    """Whether ``rows`` have every field that this version's lanes may ask for."""
    names = dtype.names or ()
    return set(names) <= set(rows.dtype.names or ()) and all(
        rows.dtype[name] == dtype[name] for name in names
    )


def _spoken(rows: Rows, edges: Edges) -> np.ndarray[tuple[int], np.dtype[np.bool_]]:
    """Buckets that at least one row speaks for."""
    if "dt" in (rows.dtype.names or ()):
        return spoken(rows, edges)
    return np.asarray(events_per_second(None)(rows, edges) > 0)


def _first(rows: Rows) -> int:
    """The moment from which on ``rows`` (at least one) speak; a sampled row for at most 2 s."""
    t = rows["t"].astype(np.int64)
    if "dt" in (rows.dtype.names or ()):
        t -= np.minimum(rows["dt"], LATE_NS).astype(np.int64)
    return max(int(t.min()), 0)


def covered(rows: Rows) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
    """First ns of each second that rows of ``rollup.lane`` speak for."""
    return np.asarray(rows["t"][rows["lane"] == COVERED].astype(np.int64))
