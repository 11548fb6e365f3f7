"""Launches of processes between two moments: how often, how regularly, and the longest gaps.

Everything but :func:`kernels` is from counters, so exact.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from dsprobe.recordings import cudastreams as cuda
from dsprobe.recordings.lane import quantile
from dsprobe.recordings.model import Rows
from dsprobe.recordings.references import by_keys
from dsprobe.recordings.samples import ending
from dsprobe.recordings.session import Session

MAX_SINGLE = 200_000
"""Single launches looked at for one table: the newest ones."""


@dataclass(frozen=True)
class Launches:
    """Launches of one thread of a process, or of one CUDA stream.

    ``thread`` is 0 of a stream that threads share; ``stream`` is the CUstream, None of a row that
    is of a thread.  ``rate`` is per second.  ``hist`` counts the times since the launch before by
    powers of two (ns); ``p50`` and ``p99`` are upper bounds (ns) from it, NaN where there is none.
    ``longest`` (ns) is the longest of these times that ended between the moments, ``quiet`` how
    long (ns) before the later moment the last interval with a launch ended.  ``shed`` is the share
    (0-1) of launches without a row of their own (of a stream: NaN).
    """

    process: int
    thread: int
    stream: int | None
    count: int
    rate: float
    hist: tuple[int, ...]
    p50: float
    p99: float
    longest: int
    quiet: int
    shed: float


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


def by_thread(session: Session, start: int, end: int) -> tuple[Launches, ...]:
    """Launches of each thread within (start, end], most first."""
    rows = ending(session, cuda.CUDA_THREAD, start, end)
    return _launches(rows, ("process", "thread"), start, end)


def by_stream(session: Session, start: int, end: int) -> tuple[Launches, ...]:
    """Launches on each CUDA stream within (start, end], most first."""
    rows = ending(session, cuda.CUDA_STREAM, start, end)
    return _launches(rows, ("process", "thread", "stream"), start, end)


def _launches(rows: Rows, keys: tuple[str, ...], start: int, end: int) -> tuple[Launches, ...]:
    if not len(rows):
        return ()
    begins, rows = by_keys(rows, *keys)
    count = np.add.reduceat(rows["count"], begins)
    hist = np.add.reduceat(rows["hist"], begins, axis=0, dtype=np.uint64)
    p50, p99 = quantile(hist, 0.5), quantile(hist, 0.99)
    longest = np.maximum.reduceat(rows["longest"], begins)
    last = np.append(begins[1:], len(rows)) - 1  # rows of a key are in order of time
    shed = np.add.reduceat(rows["shed"], begins) if "stream" not in keys else None
    found = []
    for i, first in enumerate(begins.tolist()):
        row, n = rows[first], int(count[i])
        found.append(
            Launches(
                int(row["process"]), int(row["thread"]),
                int(row["stream"]) if "stream" in keys else None,
                n, n * 1e9 / max(end - start, 1), tuple(hist[i].tolist()),
                float(p50[i]), float(p99[i]), int(longest[i]), end - int(rows["t"][last[i]]),
                math.nan if shed is None else min(int(shed[i]) / n, 1.0) if n else 0.0,
            )
        )  # fmt: skip
    return tuple(sorted(found, key=lambda r: (-r.count, r.process, r.thread, r.stream or 0)))


def longest_gaps(session: Session, start: int, end: int, limit: int) -> tuple[Gap, ...]:
    """The longest gaps that ended within (start, end], one for each thread and interval."""
    rows = ending(session, cuda.CUDA_THREAD, start, end)
    rows = rows[rows["longest"] > 0]
    order = np.lexsort((-rows["longest_end"].astype(float), -rows["longest"].astype(float)))
    names = ("longest_end", "longest", "process", "thread", "within", "within_time")
    columns = (rows[name][order[:limit]].tolist() for name in names)
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
