"""Calls of the CUDA driver between two moments: where threads waited, where they still are."""

from __future__ import annotations

from dataclasses import dataclass

from dsprobe.recordings.session import Session


@dataclass(frozen=True)
class CallRow:
    """Calls of one driver function (meta.string id) by one process; exact.

    ``kind`` and ``copy`` are words of ``cudastreams.CALL_KINDS`` and ``COPIES``.  ``busy`` is the
    time (ns) inside calls that returned, ``threads`` the same as a number of threads that stood
    there all the time; ``p50`` and ``p99`` are upper bounds (ns) of the durations, NaN where
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
    p50: float
    p99: float
    bytes: int


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


def calls(session: Session, start: int, end: int) -> tuple[CallRow, ...]:
    """Calls of each function within (start, end], the longest in sum first."""
    raise NotImplementedError


def slowest_calls(session: Session, start: int, end: int, limit: int) -> tuple[SlowCall, ...]:
    """The longest single calls that returned within [start, end), longest first."""
    raise NotImplementedError


def open_calls(session: Session, t: int) -> tuple[OpenCall, ...]:
    """Calls that had not returned at ``t``, the longest first, as far as the last two seconds
    tell."""
    raise NotImplementedError
