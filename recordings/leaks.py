"""Which stacks leak GPU memory: those whose floor rises in every window, and goes on to rise."""

from __future__ import annotations

from dataclasses import dataclass

from dsprobe.recordings.session import Session
from dsprobe.recordings.stacks import Stacks


@dataclass(frozen=True)
class Thresholds:
    """When a stack is said to leak.  Times in ns."""

    warmup: int = 10 * 10**9
    """After a process was first seen: what it sets up then is no leak."""
    window: int = 10 * 10**9
    """Shortest window."""
    windows: int = 6
    """In each of so many the least that was live must be more than in the one before."""
    min_bytes: int = 1 << 20
    """Growth below this is not named."""


@dataclass(frozen=True)
class Leak:
    """A stack of a process whose live memory of ``kind`` rose in each of ``windows`` windows of
    ``window`` ns.

    ``rate`` and ``block_rate`` are bytes and blocks per second over these, ``grown`` the bytes,
    ``live`` and ``blocks`` what is there at the end.
    """

    process: int
    stack: int
    kind: str
    live: int
    blocks: int
    grown: int
    rate: float
    block_rate: float
    window: int
    windows: int


@dataclass(frozen=True)
class Findings:
    """``leaks``, the fastest first.  ``short`` says what is missing where there was not enough time
    to tell of some process; empty where all could be judged."""

    leaks: tuple[Leak, ...]
    short: str
    start: int
    end: int


def find_leaks(
    session: Session, start: int, end: int, stacks: Stacks, thresholds: Thresholds = Thresholds()
) -> Findings:
    """What leaked within [start, end], by its rows of gpu.stack."""
    raise NotImplementedError
