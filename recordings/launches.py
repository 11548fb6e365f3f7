"""Launches of processes between two moments: how often, how regularly, and the longest gaps.

Everything but :func:`kernels` is from counters, so exact.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from dsprobe.recordings import cudastreams as cuda
from dsprobe.recordings.identities import Identities
from dsprobe.recordings.lane import quantile
from dsprobe.recordings.presence import Presence, presence
from dsprobe.recordings.references import by_keys
from dsprobe.recordings.samples import Column, Columns, ending, slabs, summed
from dsprobe.recordings.session import Session

MAX_SINGLE = 200_000
"""Single launches looked at for one table: the newest ones."""


@dataclass(frozen=True)
class Launches:
    """Launches of one thread of a process, or of one CUDA stream.

    ``thread`` is 0 of a stream that threads share; ``stream`` is the CUstream, None of a row that
    is of a thread.  ``rate`` is per second of the time its process was seen.  ``hist`` counts the
    times since the launch before by powers of two (ns); ``p50`` and ``p99`` are upper bounds (ns)
    from it, NaN where there is none.  ``longest`` (ns) is the longest of these times that ended
    between the moments, ``quiet`` how long (ns) before the later moment the last interval with a
    launch ended.  ``shed`` is the share (0-1) of launches without a row of their own (of a stream:
    NaN).
    """

    process: int
    thread: int
    stream: int | None
    count: int
    rate: float
    p50: float
    p99: float
    longest: int
    quiet: int
    shed: float
    hist: tuple[int, ...]


@dataclass(frozen=True)
class Gap:
    """A long time between two launches of a thread, that ended at ``t`` after ``duration`` (ns).

    ``function`` is the meta.string id of the driver function in which the thread spent most of it,
    ``within`` ns of it; 0 where it was in none.
    """

    t: int
    duration: int
    process: int
    thread: int
    function: int
    within: int


@dataclass(frozen=True)
class Kernel:
    """Launches of one kernel (meta.kernel; 0: graphs) among those that have a row of their own.

    ``share`` (0-1) is its part of these.  ``grid`` and ``block`` are those of the last one.
    """

    process: int
    kernel: int
    seen: int
    share: float
    grid: tuple[int, int, int]
    block: tuple[int, int, int]
    shared: int


def by_thread(
    session: Session, start: int, end: int, who: Identities | None = None
) -> tuple[Launches, ...]:
    """Launches of each thread within (start, end], most first."""
    found = summed(session, cuda.CUDA_THREAD, (start, end), ("process", "thread"),
                   ("count", "shed", "hist"), ("t", "longest"))  # fmt: skip
    found["stream"] = np.full(len(found["t"]), None)
    found["shed"] = np.minimum(found["shed"] / np.maximum(found["count"], 1), 1)
    return _launches(found, end, presence(session, start, end, who))


def by_stream(
    session: Session, start: int, end: int, who: Identities | None = None
) -> tuple[Launches, ...]:
    """Launches on each CUDA stream within (start, end], most first."""
    found = summed(session, cuda.CUDA_STREAM, (start, end), ("process", "thread", "stream"),
                   ("count", "hist"), ("t", "longest"))  # fmt: skip
    found["shed"] = np.full(len(found["t"]), np.nan)
    return _launches(found, end, presence(session, start, end, who))


def _launches(found: Columns, end: int, seen: Presence) -> tuple[Launches, ...]:
    count = found["count"].astype(np.uint64)
    columns = (
        found["process"], found["thread"], found["stream"], count,
        _rates(seen, found["process"], count), quantile(found["hist"], 0.5),
        quantile(found["hist"], 0.99), found["longest"], end - found["t"].astype(np.int64),
        found["shed"],
    )  # fmt: skip
    hist = map(tuple, found["hist"].tolist())
    made = [Launches(*row) for row in zip(*(c.tolist() for c in columns), hist, strict=True)]
    return tuple(sorted(made, key=lambda r: (-r.count, r.process, r.thread, r.stream or 0)))


def _rates(seen: Presence, processes: Column, counts: Column) -> Column:
    pairs = zip(processes.tolist(), counts.tolist(), strict=True)
    return np.array([seen.rate(process, count) for process, count in pairs], float)


def longest_gaps(session: Session, start: int, end: int, limit: int) -> tuple[Gap, ...]:
    """The longest gaps that ended within (start, end], one for each thread and interval."""
    found = cuda.CUDA_THREAD.empty()
    for begin, until in slabs(start, end):
        rows = ending(session, cuda.CUDA_THREAD, begin, until)
        found = np.concatenate([found, rows[rows["longest"] > 0]])
        order = np.lexsort((-found["longest_end"].astype(float), -found["longest"].astype(float)))
        found = found[order[:limit]]
    names = ("longest_end", "longest", "process", "thread", "within", "within_time")
    columns = (found[name].tolist() for name in names)
    return tuple(Gap(*values) for values in zip(*columns, strict=True))


def kernels(session: Session, start: int, end: int, limit: int) -> tuple[Kernel, ...]:
    """The kernels launched most within (start, end], as far as single launches were kept."""
    rows = ending(session, cuda.CUDA_LAUNCH, start, end)[-MAX_SINGLE:]
    if not len(rows):
        return ()
    total = len(rows)
    begins, rows = by_keys(rows, "process", "kernel")
    ends = np.append(begins[1:], total)
    most = np.argsort(begins - ends, kind="stable")[:limit]
    return tuple(
        Kernel(
            int(row["process"]), int(row["kernel"]), int(ends[i] - begins[i]),
            float(ends[i] - begins[i]) / total, tuple(row["grid"].tolist()),
            tuple(row["block"].tolist()), int(row["shared"]),
        )
        for i in most.tolist()
        for row in (rows[ends[i] - 1],)
    )  # fmt: skip
