"""Launches of processes between two moments: how often, how regularly, and the longest gaps.

Everything but :func:`kernels` is from counters, so exact.
"""

from __future__ import annotations

from dataclasses import dataclass

from dsprobe.recordings.session import Session


@dataclass(frozen=True)
class Launches:
    """Launches of one thread of a process, or of one CUDA stream.

    ``thread`` is 0 of a stream that threads share; ``stream`` is the CUstream, None of a row that
    is of a thread.  ``rate`` is per second.  ``hist`` counts the times since the launch before by
    powers of two (ns); ``p50`` and ``p99`` are upper bounds (ns) from it, NaN where there is none.
    ``longest`` (ns) is the longest of these times that ended between the moments, ``open`` the one
    (ns) that had not ended at the later moment.  ``shed`` is the share (0-1) of launches without a
    row of their own (of a stream: NaN).
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
    open: int
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
    raise NotImplementedError


def by_stream(session: Session, start: int, end: int) -> tuple[Launches, ...]:
    """Launches on each CUDA stream within (start, end], most first."""
    raise NotImplementedError


def longest_gaps(session: Session, start: int, end: int, limit: int) -> tuple[Gap, ...]:
    """The longest gaps that ended within (start, end], one for each thread and interval."""
    raise NotImplementedError


def kernels(session: Session, start: int, end: int, limit: int) -> tuple[Kernel, ...]:
    """The kernels launched most within [start, end), as far as single launches were kept."""
    raise NotImplementedError
