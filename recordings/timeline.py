"""Lane values on one absolute grid of time buckets, for any window of any session.

Bucket ``i`` of width ``w`` is the span ``[i * w, (i + 1) * w)`` of CLOCK_MONOTONIC, whatever the
window: what a bucket holds does not change when the window moves.  So a closed bucket is computed
once and kept, and a refresh of a live session reads the newest rows only.

A value is NaN where nobody knows (not attached, not recorded, not yet arrived) and 0 where the
probe was attached, the agent is known to have lived, and nothing happened.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from dsprobe.recordings import streams as st
from dsprobe.recordings.coverage import Coverage
from dsprobe.recordings.heartbeats import Heartbeats
from dsprobe.recordings.lane import FOLDS, Edges, Lane, Values
from dsprobe.recordings.lanes import LANES
from dsprobe.recordings.model import Rows
from dsprobe.recordings.rollups import COVERED, VERSION
from dsprobe.recordings.samples import earliest, is_sampled, spoken
from dsprobe.recordings.session import FOREVER, Session, Status

MS, SECOND = 1_000_000, 1_000_000_000
LADDER = tuple(
    n * MS for n in (50, 100, 250, 500, 1_000, 2_000, 5_000, 10_000, 30_000, 60_000, 300_000,
                     600_000, 1_800_000, 3_600_000, 7_200_000, 21_600_000, 86_400_000)
)  # fmt: skip
"""Bucket widths in ns."""

SETTLE = SECOND
"""Rows of one moment arrive in several frames: a live bucket closes this long after its end."""
LATE = 2 * SECOND
"""A sampled stream without a row for this long has nothing to say of the time before."""
HOUR = 3600 * SECOND
SLAB = 10 * SECOND
"""Rows are read this much at a time: ten seconds of 192 CPUs are some 10 MB."""
KEPT = 4096  # closed buckets kept on either side, per stream and width
BLOCKS = 64  # pairs of stream and width kept


@dataclass(frozen=True)
class Window:
    """``count`` buckets of ``width`` ns, from bucket number ``first`` on."""

    first: int
    count: int
    width: int

    @property
    def start(self) -> int:
        return self.first * self.width

    @property
    def end(self) -> int:
        return self.start + self.count * self.width


@dataclass(frozen=True, eq=False)
class Curve:
    """One lane over a window.  ``status`` is a word of ``streams.STATUSES``, with its ``reason``;
    ``lost`` is the number of rows its stream is known to have lost in the whole session."""

    lane: Lane
    values: Values
    status: str
    reason: str
    lost: int


@dataclass
class _Block:
    """Closed buckets ``first, first + 1 ...`` of all lanes of one stream, (lanes, buckets)."""

    first: int
    values: Values

    @property
    def stop(self) -> int:
        return self.first + int(self.values.shape[1])


class Timeline:
    """Lane values of ``session``; keep one per viewer, its cache is what makes refreshes cheap.

    Buckets up to a second are computed from rows.  Longer ones combine the values of their seconds
    (see ``Lane.fold``), which a file holds as roll-ups: so a live screen and a replay agree.
    """

    def __init__(self, session: Session, lanes: Sequence[Lane] = LANES) -> None:
        self.session = session
        self.lanes = tuple(lanes)
        self._by_stream: dict[str, list[int]] = {}
        for i, lane in enumerate(self.lanes):
            self._by_stream.setdefault(lane.stream, []).append(i)
        self._blocks: OrderedDict[tuple[str, int], _Block] = OrderedDict()
        self._unreadable: dict[int, str] = {}
        self._claimed = frozenset(lane.program for lane in self.lanes if lane.program)
        self._coverage = Coverage(session)
        self._heartbeats = Heartbeats(session)

    def refresh(self) -> None:
        """Take in what the agent has said of itself since."""
        self._coverage.refresh()
        self._heartbeats.refresh()

    def span(self) -> tuple[int, int]:
        """First and last moment there is something to say of; (0, 0) while there is none.

        That of the session's rows, and of the time since in which a live agent was there to see
        that nothing happened.
        """
        begin, end = self.session.span()
        if not self.session.live:
            return begin, end
        return begin or self._heartbeats.oldest, max(end, self._heartbeats.newest)

    def status(self, probe: str, t: int) -> Status | None:
        """State of a probe as a whole at ``t``; None where nobody said."""
        return self._coverage.at(probe, t)

    def watched(self, probe: str, start: int, end: int) -> bool:
        """Whether ``probe`` could see all that happened from ``start`` to ``end``."""
        first, last = self.span()
        within = first <= start and end <= last
        lived = self._heartbeats.lived(np.array([start, end]), first, last)
        return within and bool(lived.all()) and self._coverage.throughout(probe, start, end)

    def curves(self, window: Window, at: int = FOREVER) -> tuple[Curve, ...]:
        """All lanes over ``window``; their status is the one at moment ``at``."""
        self.refresh()
        if window.width > SECOND or (window.width == SECOND and not self.session.live):
            values = self._wide(window)
        else:
            values = self._fine(window)
        lost = self.session.lost()
        return tuple(
            Curve(lane, values[i], *self._status(i, at), lost.get(lane.stream, 0))
            for i, lane in enumerate(self.lanes)
        )

    def _status(self, i: int, at: int) -> tuple[str, str]:
        lane = self.lanes[i]
        if i in self._unreadable:
            return "missing", self._unreadable[i]
        found = self._coverage.of_lane(lane, at, self._claimed)
        if found is None:
            here = lane.stream in self.session.streams
            return ("attached", "") if here else ("missing", "not part of this session")
        return found.status, found.reason

    def _masked(self, lane: Lane, values: Values, window: Window) -> Values:
        return self._coverage.mask(lane.probe, lane.quiet, values, window.first, window.width)

    # -- buckets up to a second: from rows --------------------------------------------------------

    def _fine(self, window: Window) -> Values:
        """(lanes, buckets)"""
        values = np.full((len(self.lanes), window.count), np.nan)
        begin, end = self.span()
        if end > begin:
            edges = (np.arange(window.count) + window.first) * window.width
            inside = (edges >= begin) & (edges + window.width <= end)
            ends = np.append(edges, window.end)
            inside &= self._heartbeats.lived(ends, begin, end)
            for stream, lanes in self._by_stream.items():
                if stream in self.session.streams:
                    values[lanes] = self._stream(stream, lanes, window, begin, end)
                    continue
                # A stream is declared with its first row: a probe that is attached was quiet.
                for i in lanes:
                    if self.lanes[i].quiet:
                        values[i, inside] = 0.0
        for i, lane in enumerate(self.lanes):
            values[i] = self._masked(lane, values[i], window)
        return values

    def _stream(
        self, stream: str, lanes: list[int], window: Window, begin: int, end: int
    ) -> Values:
        """Values of the stream's lanes over ``window``, from the cache where they are closed."""
        w = window.width
        out = np.full((len(lanes), window.count), np.nan)
        lo = max(window.first, begin // w)
        hi = min(window.first + window.count, -(-end // w))
        if lo >= hi:
            return out
        block = self._block(stream, len(lanes), window, lo, hi)
        if lo < block.first:
            older, *_ = self._compute(stream, lanes, Window(lo, block.first - lo, w), begin, end)
            block = _Block(lo, np.hstack([older, block.values]))
        if hi > block.stop:
            stop = block.stop
            values, closed, since = self._compute(
                stream, lanes, Window(stop, hi - stop, w), begin, end
            )
            if since < stop * w:
                # A reading that came very late speaks for buckets that were closed without it.
                stop = max(since // w, block.first)
                block = _Block(block.first, block.values[:, : stop - block.first])
                part = Window(stop, hi - stop, w)
                values, closed, _ = self._compute(stream, lanes, part, begin, end)
            block = _Block(block.first, np.hstack([block.values, values[:, :closed]]))
            _place(out, values[:, closed:], stop + closed - window.first)
        _place(out, block.values, block.first - window.first)
        self._keep(stream, w, block, lo)
        return out

    def _compute(
        self, stream: str, lanes: list[int], part: Window, begin: int, end: int
    ) -> tuple[Values, int, int]:
        """Values of ``part``; how many of its first buckets will not change any more; and from when
        on rows of it speak that cover more than what is read for every bucket."""
        step = max(SLAB // part.width, 1)
        pieces, closed, since = [], 0, part.start
        for first in range(part.first, part.first + part.count, step):
            count = min(step, part.first + part.count - first)
            slab = Window(first, count, part.width)
            values, done, earliest = self._slab(stream, lanes, slab, begin, end)
            pieces.append(values)
            since = min(since, earliest)
            if closed == first - part.first:
                closed += done
        return np.hstack(pieces), closed, since

    def _slab(
        self, stream: str, lanes: list[int], part: Window, begin: int, end: int
    ) -> tuple[Values, int, int]:
        live = self.session.live
        sampled = is_sampled(self.session.streams[stream])
        # A sample speaks for the time before it, and the one after a stall for all of that.
        reach = part.end
        if sampled:
            answered = self._coverage.answered(self.lanes[lanes[0]].probe, part.end)
            reach = max(self._heartbeats.after(part.end), answered) + LATE
        more = max(self.lanes[i].reach for i in lanes)
        rows = self.session.read(stream, max(part.start - more, 0), max(reach, part.end + more))
        edges: Edges = np.arange(part.first, part.first + part.count + 1) * part.width
        # The first and the last bucket count for as much of them as the session holds.
        if edges[0] < begin < edges[1]:
            edges[0] = begin
        if not live and edges[-2] <= end < edges[-1]:
            edges[-1] = end + 1
        known = closed = part.count
        if live:
            # How far the rows can tell.
            horizon = end
            if sampled:
                horizon = max(int(rows["t"][-1]) if len(rows) else 0, end - LATE)
            known = _whole(edges, horizon)
            settled = max(horizon - SETTLE, end - 2 * LATE)
            if self._heartbeats.newest:  # whether it lived is known up to there
                settled = min(settled, self._heartbeats.newest)
            closed = min(known, _whole(edges, settled))
        values = np.full((len(lanes), part.count), np.nan)
        if not known:
            return values, closed, part.start
        edges = edges[: known + 1]
        lived = self._heartbeats.lived(edges, begin, end)
        heard = spoken(rows, edges) if sampled else np.zeros(known, bool)
        for row, i in enumerate(lanes):
            found = self._lane(i, rows, edges)
            if self.lanes[i].quiet:
                found[~lived & ~heard & (found == 0)] = np.nan
            elif sampled:
                found[~heard] = np.nan
            values[row, :known] = found
        own = rows[rows["t"] >= part.start] if sampled else rows
        return values, closed, earliest(own, LATE) if sampled else part.start

    def _lane(self, i: int, rows: Rows, edges: Edges) -> Values:
        try:
            with np.errstate(all="ignore"):
                return self.lanes[i].compute(rows, edges)
        except (ValueError, KeyError, TypeError, IndexError) as e:
            # A stream of another version, or of an enemy, may lack the fields or their types.
            self._unreadable[i] = f"{self.lanes[i].stream} does not have the fields it needs: {e}"
            return np.full(len(edges) - 1, np.nan)

    # -- longer buckets: from seconds -------------------------------------------------------------

    def _wide(self, window: Window) -> Values:
        """(lanes, buckets)"""
        w = window.width
        out = np.full((len(self.lanes), window.count), np.nan)
        begin, end = self.span()
        lo = max(window.first, begin // w)
        hi = min(window.first + window.count, -(-end // w))
        if lo >= hi:
            return out
        if self.session.live:
            _place(out, self._folded(lo, hi, w, begin, end), lo - window.first)
            return out
        block = self._block("", len(self.lanes), window, lo, hi)
        older = self._folded(lo, block.first, w, begin, end)
        newer = self._folded(block.stop, hi, w, begin, end)
        block = _Block(min(lo, block.first), np.hstack([older, block.values, newer]))
        _place(out, block.values, block.first - window.first)
        self._keep("", w, block, lo)
        return out

    def _folded(self, lo: int, hi: int, width: int, begin: int, end: int) -> Values:
        """Buckets ``lo`` to ``hi``, an hour at a time."""
        per = width // SECOND
        step = max(HOUR // width, 1)
        pieces = [np.empty((len(self.lanes), 0))]
        for first in range(lo, hi, step):
            count = min(step, hi - first)
            seconds = self._seconds(Window(first * per, count * per, SECOND), begin, end)
            by_bucket = seconds.reshape(len(self.lanes), count, per)
            pieces.append(
                np.array([FOLDS[la.fold](v) for la, v in zip(self.lanes, by_bucket, strict=True)])
            )
        return np.hstack(pieces)

    def _seconds(self, window: Window, begin: int, end: int) -> Values:
        """Values of single seconds: the roll-ups', and from rows where those have none."""
        if self.session.live:
            return self._fine(window)
        values = np.full((len(self.lanes), window.count), np.nan)
        number = np.arange(window.first, window.first + window.count)
        bare = (number >= begin // SECOND) & (number < -(-end // SECOND))
        rows = self.session.read(st.ROLLUP_LANE.name, window.start, window.end)
        if len(rows) and {"lane", "value"} <= set(rows.dtype.names or ()):
            at = rows["t"].astype(np.int64) // SECOND - window.first
            bare[at] = False
            whole = at[(number[at] * SECOND >= begin) & ((number[at] + 1) * SECOND <= end)]
            lived = self._heartbeats.lived(np.append(number, number[-1] + 1) * SECOND, begin, end)
            bare |= ~lived & (number >= begin // SECOND) & (number < -(-end // SECOND))
            for i, lane in enumerate(self.lanes):
                of = rows["lane"] == lane.id
                if lane.quiet:
                    values[i, whole] = 0.0  # summed up, without a row that speaks for it
                values[i, at[of]] = rows["value"][of]
                values[i] = self._masked(lane, values[i], window)
            spoken_for = rows["lane"] == COVERED
            version = np.full(window.count, VERSION)
            version[at[spoken_for]] = rows["value"][spoken_for]
            for since in {lane.since for lane in self.lanes}:
                newer = [i for i, lane in enumerate(self.lanes) if lane.since == since]
                for first, stop in _runs(version < since):
                    part = Window(window.first + first, stop - first, SECOND)
                    values[newer, first:stop] = self._fine(part)[newer]
        for first, stop in _runs(bare):
            values[:, first:stop] = self._fine(Window(window.first + first, stop - first, SECOND))
        return values

    # -- cache ------------------------------------------------------------------------------------

    def _block(self, stream: str, lanes: int, window: Window, lo: int, hi: int) -> _Block:
        """What is kept, if it is near enough to [lo, hi) to be extended; else an empty block."""
        block = self._blocks.get((stream, window.width))
        if block is None or lo > block.stop + window.count or hi < block.first - window.count:
            return _Block(lo, np.empty((lanes, 0)))
        return block

    def _keep(self, stream: str, width: int, block: _Block, lo: int) -> None:
        surplus = block.values.shape[1] - 2 * KEPT
        if surplus > 0:
            cut = min(max(lo - KEPT - block.first, 0), surplus)
            block = _Block(block.first + cut, block.values[:, cut : cut + 2 * KEPT].copy())
        self._blocks[stream, width] = block
        self._blocks.move_to_end((stream, width))
        while len(self._blocks) > BLOCKS:
            self._blocks.popitem(last=False)


def _whole(edges: Edges, until: int) -> int:
    """How many of the buckets between ``edges`` end at or before ``until``."""
    return max(int(np.searchsorted(edges, until, "right")) - 1, 0)


def _place(out: Values, values: Values, at: int) -> None:
    """Copy columns of ``values`` to column ``at`` of ``out``, as far as they overlap."""
    lo, hi = max(at, 0), min(at + values.shape[1], out.shape[1])
    if lo < hi:
        out[:, lo:hi] = values[:, lo - at : hi - at]


def _runs(flags: npt.NDArray[np.bool_]) -> list[tuple[int, int]]:
    """[start, stop) of the stretches that are true."""
    edge = np.flatnonzero(np.diff(np.concatenate([[False], flags, [False]]).astype(np.int8)))
    return [(int(a), int(b)) for a, b in edge.reshape(-1, 2)]
