"""Calls of the CUDA driver between two moments: where threads waited, where they still are."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from dsprobe.recordings import cudastreams as cuda
from dsprobe.recordings.identities import Identities
from dsprobe.recordings.lane import quantile
from dsprobe.recordings.presence import presence
from dsprobe.recordings.references import last_of
from dsprobe.recordings.samples import ending, slabs, summed
from dsprobe.recordings.session import Session
from dsprobe.recordings.tables import word

RECENT = 1_500_000_000
"""cuda.open has a row for each such call once a second."""


@dataclass(frozen=True)
class CallRow:
    """Calls of one driver function (meta.string id) by one process; exact.

    ``kind`` and ``copy`` are words of ``cudastreams.CALL_KINDS`` and ``COPIES``.  ``busy`` is the
    time (ns) inside calls that returned, ``threads`` the same as a number of threads that stood
    there all the time that the process was seen, ``rate`` the calls per second of that time.
    ``p50`` and ``p99`` are upper bounds (ns) of the durations, NaN where
    returns are not traced; ``bytes`` what was copied, set or allocated.
    """

    process: int
    function: int
    kind: str
    copy: str
    count: int
    failed: int
    busy: int
    threads: float
    rate: float
    p50: float
    p99: float
    bytes: int

    @property
    def timed(self) -> bool:
        """Whether the time inside it is known: returns of launches are not traced."""
        return self.busy > 0 or not math.isnan(self.p50)


@dataclass(frozen=True)
class SlowCall:
    """One call that returned at ``t`` after ``duration`` (ns), with ``result`` (a CUresult)."""

    t: int
    duration: int
    process: int
    thread: int
    stack: int
    function: int
    kind: str
    copy: str
    result: int
    stream: int
    bytes: int


@dataclass(frozen=True)
class OpenCall:
    """A call that had not returned yet: it began at ``since``, ``duration`` ns before."""

    process: int
    thread: int
    function: int
    since: int
    duration: int


def calls(
    session: Session, start: int, end: int, who: Identities | None = None
) -> tuple[CallRow, ...]:
    """Calls of each function within (start, end], the longest in sum first."""
    keys = ("process", "function", "kind", "copy")
    sums = ("count", "failed", "busy", "bytes", "hist")
    found = summed(session, cuda.CUDA_CALLS, (start, end), keys, sums)
    seen = presence(session, start, end, who)
    time = np.array([seen.time(process) for process in found["process"].tolist()], float)
    columns = (
        *(found[name] for name in (*keys, "count", "failed", "busy")),
        found["busy"] / time, found["count"] * 1e9 / time, quantile(found["hist"], 0.5),
        quantile(found["hist"], 0.99), found["bytes"],
    )  # fmt: skip
    rows = zip(*(column.tolist() for column in columns), strict=True)
    made = [
        CallRow(process, function, word(cuda.CALL_KINDS, kind), word(cuda.COPIES, copy), *rest)
        for process, function, kind, copy, *rest in rows
    ]
    return tuple(sorted(made, key=lambda r: (-r.busy, -r.count, r.process, r.function)))


def slowest_calls(session: Session, start: int, end: int, limit: int) -> tuple[SlowCall, ...]:
    """The longest single calls that returned within (start, end], longest first."""
    rows = cuda.CUDA_CALL.empty()
    for begin, until in slabs(start, end):
        rows = np.concatenate([rows, ending(session, cuda.CUDA_CALL, begin, until)])
        rows = rows[np.lexsort((-rows["t"].astype(float), -rows["duration"].astype(float)))[:limit]]
    return tuple(
        SlowCall(
            int(r["t"]), int(r["duration"]), int(r["process"]), int(r["thread"]), int(r["stack"]),
            int(r["function"]), word(cuda.CALL_KINDS, int(r["kind"])),
            word(cuda.COPIES, int(r["copy"])), int(r["result"]), int(r["stream"]), int(r["bytes"]),
        )
        for r in rows
    )  # fmt: skip


def open_calls(session: Session, t: int) -> tuple[OpenCall, ...]:
    """Calls that had not returned at ``t``, the longest first, as far as the last second and a
    half tell."""
    rows = last_of(ending(session, cuda.CUDA_OPEN, t - RECENT, t), "process", "thread")
    returned = ending(session, cuda.CUDA_CALL, t - RECENT, t)
    columns = (returned[name].tolist() for name in ("process", "thread", "t"))
    last = {(process, thread): at for process, thread, at in zip(*columns, strict=True)}
    found = [
        OpenCall(*who, int(r["function"]), int(r["since"]), t - int(r["since"]))
        for r in rows
        for who in ((int(r["process"]), int(r["thread"])),)
        # A thread that returned from a call since is not in the one of this row any more.
        if r["since"] <= r["t"] and last.get(who, -1) < int(r["t"])
    ]
    return tuple(sorted(found, key=lambda c: (-c.duration, c.process, c.thread)))
