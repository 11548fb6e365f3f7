"""What the screen of launches shows, made off the render path."""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable
from dataclasses import dataclass

import numpy as np

from dsprobe.recordings.blocked import CallRow, OpenCall, calls, open_calls
from dsprobe.recordings.lane import quantile
from dsprobe.recordings.launches import Gap, Launches, by_stream, by_thread, longest_gaps
from dsprobe.recordings.timeline import SECOND
from dsprobe.tui import units
from dsprobe.tui.screen import Moment
from dsprobe.tui.treescreen import TreeBody, TreeRow, empty, state, unseen

ORDERS = ("rate", "P99", "longest", "shed")
MAX_ROWS = 1000
MAX_GAPS = 400
MAX_OPEN = 8
MAX_SAID = 8
MAX_CALLS = 3
FEW = 4
"""So many processes are open from the start."""
QUIET = 2 * SECOND


@dataclass(frozen=True)
class Asked:
    """``order`` is one of :data:`ORDERS`; ``toggled`` are the rows opened or closed by hand."""

    order: str = ORDERS[0]
    filter: str = ""
    toggled: frozenset[Hashable] = frozenset()
    all_open: bool = False


@dataclass(frozen=True)
class LaunchRow(TreeRow):
    """A process (``depth`` 0), one of its threads, or one of its CUDA streams.

    ``p50`` and ``p99`` are bounds (ns) of the time since the launch before, NaN where there is
    none, ``longest`` the longest one, ``hist`` the number of them by powers of two (ns); ``shed``
    is the share (0-1) of launches without a row of their own, NaN where that is not known.
    ``said`` are sentences: the longest gaps, and of a process the calls it spent most time in.
    """

    rate: float
    p50: float
    p99: float
    longest: int
    shed: float
    hist: tuple[int, ...]
    said: tuple[str, ...]


def look(asked: Asked, moment: Moment) -> TreeBody:
    """The launches up to ``moment``, over the time in view."""
    start = moment.start
    seen = _Seen(moment, start)
    rows = seen.rows(asked)
    return TreeBody(
        seen.total(),
        f"launches over {units.span(moment.at - start)} in view",
        tuple(rows[:MAX_ROWS]),
        seen.notes(),
        max(len(rows) - MAX_ROWS, 0),
        empty(asked.filter, "launches", moment, "nothing was launched"),
    )


class _Seen:
    """What happened from ``start`` to the moment."""

    def __init__(self, moment: Moment, start: int) -> None:
        self.moment, self.who = moment, moment.who
        session, at = moment.session, moment.at
        self.threads = by_thread(session, start, at, self.who)
        self.streams = by_stream(session, start, at, self.who)
        self.gaps = longest_gaps(session, start, at, MAX_GAPS)
        self.calls = calls(session, start, at, self.who)
        self.open = {(c.process, c.thread): c for c in open_calls(session, at)}

    def rows(self, asked: Asked) -> list[LaunchRow]:
        words = asked.filter.lower().split()
        order = _ORDER[asked.order]
        parts: dict[int, list[LaunchRow]] = {}
        for launches in (*self.threads, *self._waiting(), *self.streams):
            row = self._row(launches)
            text = f"{self.who.process(launches.process).label} {row.text}".lower()
            if all(word in text for word in words):
                parts.setdefault(launches.process, []).append(row)
        alive = sum(not self.who.process(id).ended for id in parts)
        few = alive <= FEW or bool(words) or asked.all_open
        whole = [self._process(id, of, few, asked) for id, of in parts.items()]
        rows: list[LaunchRow] = []
        for row, of in sorted(whole, key=lambda pair: order(pair[0])):
            rows.append(row)
            rows += sorted(of, key=order) if row.opened else []
        return rows

    def _waiting(self) -> list[Launches]:
        """Threads that are in a call and launched nothing."""
        known = {(t.process, t.thread) for t in self.threads}
        return [
            Launches(c.process, c.thread, None, count=0, rate=0.0, p50=math.nan, p99=math.nan,
                     longest=0, quiet=0, shed=math.nan, hist=())
            for c in self.open.values()
            if (c.process, c.thread) not in known
        ]  # fmt: skip

    def _row(self, seen: Launches) -> LaunchRow:
        """A thread or a stream."""
        text = self.who.thread(seen.thread).label if seen.thread else ""
        if seen.stream is not None:
            text = f"stream {_stream(seen.stream)}" + (f" of {text}" if text else "")
        gaps: list[Gap] = []
        if seen.stream is None:
            waits = self.open.get((seen.process, seen.thread))
            text += f": {self._waits(waits)}" if waits else ""
            gaps = [g for g in self.gaps if (g.process, g.thread) == (seen.process, seen.thread)]
        if seen.quiet > QUIET and seen.count:
            text += f", quiet for {units.span(seen.quiet)}"
        key = (seen.process, seen.thread, seen.stream)
        return LaunchRow(
            key, 1, None, text, seen.rate, seen.p50, seen.p99, seen.longest, seen.shed, seen.hist,
            tuple(self._gap(g, named=False) for g in gaps[:MAX_SAID]),
        )  # fmt: skip

    def _process(
        self, id: int, of: list[LaunchRow], opened: bool, asked: Asked
    ) -> tuple[LaunchRow, list[LaunchRow]]:
        """A process as the sum of its threads that are shown; of its streams where none is."""
        process = self.who.process(id)
        whole = [t for t in self.threads if t.process == id]
        hist = np.sum([t.hist for t in whole], axis=0) if whole else np.zeros(1)
        n = sum(t.count for t in whole)
        shed = sum(t.shed * t.count for t in whole if t.count)
        text = process.label
        if process.ended and process.ended <= self.moment.at:
            text += " (ended)"
        waiting = sum(c.process == id for c in self.open.values())
        text += f": {units.count(waiting, 'thread')} waiting" if waiting else ""
        busy = [c for c in self.calls if c.process == id and c.busy][:MAX_CALLS]
        said = [self._call(c) for c in busy]
        said += [self._gap(g, named=True) for g in self.gaps if g.process == id][:MAX_SAID]
        key = (id,)
        row = LaunchRow(
            key, 0, opened != (key in asked.toggled), text, sum(t.rate for t in whole),
            float(quantile(hist, 0.5)), float(quantile(hist, 0.99)),
            max((t.longest for t in whole), default=0), shed / n if n else math.nan,
            tuple(hist.astype(int).tolist()), tuple(said),
        )  # fmt: skip
        return row, of

    def _waits(self, call: OpenCall) -> str:
        function = self.who.text(call.function) or "a call"
        return f"in {function} for {units.nanoseconds(call.duration)}"

    def _both(self, call: OpenCall) -> str:
        """Process and thread of a call; once where they are called the same."""
        labels = (self.who.process(call.process).label, self.who.thread(call.thread).label)
        return " ".join(dict.fromkeys(labels))

    def _gap(self, gap: Gap, named: bool) -> str:
        text = f"gap of {units.nanoseconds(gap.duration)} until {self.moment.scale.precise(gap.t)}"
        if named:
            text += f", {self.who.thread(gap.thread).label}"
        if not gap.function:
            return f"{text}, in no CUDA call"
        return f"{text}, {units.nanoseconds(gap.within)} of it in {self.who.text(gap.function)}"

    def _call(self, call: CallRow) -> str:
        return (
            f"{self.who.text(call.function)}: {units.digits(call.threads)} threads in it on "
            f"average, {units.si(call.rate)}/s, P99 "
            f"{units.bound(call.p99)}"
        )

    def total(self) -> str:
        if not self.threads and (why := unseen("launches", self.moment)):
            return f"not known: {why}"
        # What ended had its rate at another time: it is in no sum with that of others.
        ended = {p.id for p in self.who.processes.values() if 0 < p.ended <= self.moment.at}
        threads = [t for t in self.threads if t.process not in ended]
        processes = len({t.process for t in threads})
        rate = sum(t.rate for t in threads)
        inside: dict[str, float] = {}
        for call in self.calls:
            if call.process in ended:
                continue
            inside[call.kind] = inside.get(call.kind, 0.0) + call.threads
        busy = [f"{units.digits(n)} in {kind}" for kind, n in inside.items() if n >= 0.005]
        blocked = f", threads {', '.join(busy)}" if busy else ""
        return (
            f"{units.count(processes, 'process')}, {units.count(len(threads), 'thread')}: "
            f"{units.si(rate)} launches/s{blocked}"
        )

    def notes(self) -> tuple[str, ...]:
        """What waits and what was left out."""
        waits = [f"{self._both(c)} {self._waits(c)}" for c in list(self.open.values())[:MAX_OPEN]]
        shed: dict[int, float] = {}
        for t in self.threads:
            if t.shed > 0:
                shed[t.process] = shed.get(t.process, 0.0) + t.shed * t.count
        left_out = [
            f"{self.who.process(id).label}: {units.si(n)} launches without a row of their own, to "
            "save cost; the counts are exact"
            for id, n in shed.items()
        ]
        return (*waits, *state("launches", self.moment), *left_out)


def _stream(handle: int) -> str:
    return {0: "default", 1: "legacy default", 2: "per-thread default"}.get(handle, f"{handle:#x}")


def _high(value: float) -> float:
    return -value if math.isfinite(value) else 1.0


_ORDER: dict[str, Callable[[LaunchRow], tuple[float, ...]]] = {
    "rate": lambda row: (-row.rate, -row.longest),
    "P99": lambda row: (_high(row.p99), -row.longest),
    "longest": lambda row: (-row.longest, -row.rate),
    "shed": lambda row: (_high(row.shed), -row.rate),
}
