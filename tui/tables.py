"""The tables beside the lanes as text: who is behind a curve, and what is known where nobody is."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from dsprobe.recordings.model import Rows
from dsprobe.recordings.session import Session
from dsprobe.recordings.tables import (
    by_vector,
    slowest,
    softirq_rows,
    top_cpus,
    top_flows,
)
from dsprobe.recordings.timeline import SECOND, Timeline
from dsprobe.tui import units

LIMIT = 40
SPAN = 10 * SECOND
LONG_SPAN = 60 * SECOND
"""For what is rare: flows that send again, slow softirqs."""
PROBES = {"cpus": "softirq", "flows": "tcp", "vectors": "softirq", "slow": "softirq"}
TABLES = tuple(PROBES)


@dataclass(frozen=True)
class Table:
    """``right`` says which columns are numbers.  ``choices`` are numbers of the columns to show,
    the most that is wanted first, for where there is less room; empty: from the right, the last
    column goes first.  ``empty`` is the sentence for no rows."""

    title: str
    columns: tuple[str, ...]
    right: tuple[bool, ...]
    rows: tuple[tuple[str, ...], ...]
    empty: str
    choices: tuple[tuple[int, ...], ...] = ()


class Tables:
    """Makes the tables of ``session`` over some time up to a moment; ``timeline`` knows what could
    be seen then, and ``moment`` writes a moment as text."""

    def __init__(self, session: Session, timeline: Timeline, moment: Callable[[int], str]) -> None:
        self._session, self._timeline, self._moment = session, timeline, moment

    def make(self, names: tuple[str, ...], at: int, width: int, first: int) -> dict[str, Table]:
        """Tables ``names`` up to ``at``, over the buckets' ``width`` if that is longer than usual;
        none begins before ``first``."""
        made: dict[str, Table] = {}
        start = max(at - min(max(SPAN, width), LONG_SPAN), first, 0)
        since = max(at - LONG_SPAN, first, 0)
        if {"cpus", "vectors"} & set(names):
            rows = softirq_rows(self._session, start, at)
            for name, build in (("cpus", _cpus), ("vectors", _vectors)):
                if name in names:
                    made[name] = self._told(name, build(rows, start, at), start, at)
        if "flows" in names:
            made["flows"] = self._told("flows", _flows(self._session, since, at), since, at)
        if "slow" in names:
            made["slow"] = self._told("slow", self._slow(since, at), since, at)
        return made

    def _told(self, name: str, table: Table, start: int, end: int) -> Table:
        """``table`` with its probe's state where that is why it has no rows, or no new ones."""
        status = self._timeline.status(PROBES[name], end)
        if status is not None and status.status not in ("attached", "shed"):
            why = f"{status.status}: {status.reason}" if status.reason else status.status
            title = f"{table.title}: {status.status}" if table.rows else table.title
            return replace(table, title=title, empty=why)
        if status is None or not self._timeline.watched(PROBES[name], start, end):
            return replace(table, empty="not known here")
        return table

    def _slow(self, start: int, end: int) -> Table:
        rows = slowest(self._session, start, end, LIMIT)
        return Table(
            f"slowest softirq runs and waits, last {units.span(end - start)}",
            ("took", "what", "CPU", "vector", "ended", "interrupted"),
            (True, False, True, False, False, False),
            tuple(
                (units.nanoseconds(r.duration), r.kind, str(r.cpu), r.vector, self._moment(r.t),
                 r.task)
                for r in rows
            ),
            "none took 1ms or longer",
        )  # fmt: skip


def _cpus(softirqs: Rows, start: int, end: int) -> Table:
    rows, span = top_cpus(softirqs, start, end, LIMIT), end - start
    return Table(
        f"CPUs by net_rx, last {units.span(span)}",
        ("CPU", "runs/s", "busy", "wait P99"),
        (True, True, True, True),
        tuple(
            (
                str(r.cpu),
                units.si(r.runs / (span / 1e9)),
                units.digits(100 * r.busy) + "%",
                units.bound(r.wait),
            )
            for r in rows
        ),
        "no net_rx softirq ran",
    )


def _flows(session: Session, start: int, end: int) -> Table:
    rows, span = top_flows(session, start, end, LIMIT), end - start
    return Table(
        f"flows by retransmits, last {units.span(span)}",
        ("segs", "calls", "from", "from", "to", "what", "netns"),
        (True, True, False, False, False, False, False),
        tuple(
            (
                units.si(r.segments),
                units.si(r.calls),
                r.source,
                r.source.rpartition(":")[0],
                r.destination,
                r.causes[0] + (f" +{len(r.causes) - 1}" if len(r.causes) > 1 else ""),
                r.netns,
            )
            for r in rows
        ),
        "nothing was sent again",
        # What was sent again and where say more than how often and from which port.
        ((0, 1, 2, 4, 5, 6), (0, 2, 4, 5, 6), (0, 3, 4, 5, 6), (0, 4, 5, 6), (0, 4, 5), (0, 4)),
    )


def _vectors(softirqs: Rows, start: int, end: int) -> Table:
    rows, span = by_vector(softirqs, start, end), end - start
    return Table(
        f"softirqs by vector, last {units.span(span)}",
        ("vector", "runs/s", "CPUs", "wait P99", "run P99"),
        (False, True, True, True, True),
        tuple(
            (
                r.vector,
                units.si(r.runs / (span / 1e9)),
                units.digits(r.busy),
                units.bound(r.wait),
                units.bound(r.run),
            )
            for r in rows
        ),
        "no softirq ran",
    )
