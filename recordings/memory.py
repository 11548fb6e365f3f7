"""GPU memory of processes at a moment, and what grew between two moments.

Both work on any session.  The state at ``t`` is read from the last :data:`STATE` before it, as
every stack that holds memory has a row at least every ten seconds.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from dsprobe.recordings.session import Session
from dsprobe.recordings.stacks import Frame, Stacks

SECOND = 10**9
STATE = 12 * SECOND


@dataclass(frozen=True)
class KindMemory:
    """Live memory of one process and kind (a word of ``cudastreams.MEMORY_KINDS``), exact.

    ``device`` is whether the kind takes memory of a device.  ``grown`` is by how many bytes
    ``live`` changed since the moment asked for; the counts are those of the time since then.
    """

    process: int
    kind: str
    device: bool
    live: int
    blocks: int
    grown: int
    allocs: int
    frees: int
    failed: int
    unknown: int
    shed: int


@dataclass(frozen=True)
class StackMemory:
    """What one stack of one process has allocated and not yet freed, of one kind.

    ``grown`` and ``grown_blocks`` say by how much that changed since the moment asked for, below 0
    where it shrank.  ``age`` (ns) is the mean age of what is live, 0 where nothing is.
    """

    process: int
    stack: int
    kind: str
    live: int
    blocks: int
    grown: int
    grown_blocks: int
    age: int


@dataclass(frozen=True)
class AgeMemory:
    """Live memory of one process and kind that was allocated ``youngest`` to ``oldest`` s ago."""

    process: int
    kind: str
    youngest: int
    oldest: int
    live: int
    blocks: int


@dataclass(frozen=True)
class Memory:
    """Memory at moment ``t`` and how it changed since ``since``; largest first.

    ``whole`` is False where the session holds too little before ``t`` (or before ``since``) to
    know of every stack.
    """

    t: int
    since: int
    kinds: tuple[KindMemory, ...]
    stacks: tuple[StackMemory, ...]
    ages: tuple[AgeMemory, ...]
    whole: bool


@dataclass(frozen=True)
class MemoryNode:
    """Stacks that begin alike, outermost frame first: Python over native.

    ``path`` (frame ids from the root) names the node from one refresh to the next.  The amounts
    are the sums of all stacks through it; ``age`` is the mean by block.  ``stacks`` are the ids of
    those that end in it.
    """

    frame: Frame
    path: tuple[int, ...]
    live: int
    blocks: int
    grown: int
    grown_blocks: int
    age: int
    stacks: tuple[int, ...]
    children: tuple[MemoryNode, ...]


ORDERS: dict[str, Callable[[StackMemory | MemoryNode], float]] = {
    "live": lambda row: row.live,
    "growth": lambda row: row.grown,
    "age": lambda row: row.age,
    "blocks": lambda row: row.blocks,
}
"""What stacks and nodes can be sorted by, the most first."""


def memory_at(session: Session, t: int, since: int | None = None) -> Memory:
    """Memory at ``t``, and how it changed since ``since`` (default: a minute before)."""
    raise NotImplementedError


def tree(
    rows: Sequence[StackMemory], stacks: Stacks, order: str = "live"
) -> tuple[MemoryNode, ...]:
    """The stacks of ``rows`` as trees, siblings sorted by ``order``, a key of :data:`ORDERS`."""
    raise NotImplementedError
