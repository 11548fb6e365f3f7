"""The flight ring: the last minutes of frames, in memory, bounded by age and by bytes."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import chain

from dsprobe.recordings.references import LASTING as KEPT

MAX_KEPT_BYTES = 8 << 20
"""Of each of these streams: one that grows does not push out another."""


@dataclass(frozen=True, slots=True)
class Sent:
    """A frame as the message that goes out.  ``cost`` is its memory in bytes."""

    stream: str
    t1: int
    rows: int
    message: bytes

    @property
    def cost(self) -> int:
        return len(self.message) + 200  # this object and its places in queues


class Flight:
    """Holds frames not older than ``span`` ns and not more than ``limit`` bytes of them."""

    def __init__(self, span: int, limit: int) -> None:
        self.span, self.limit = span, limit
        self._recent: deque[Sent] = deque()
        self._kept: dict[str, deque[Sent]] = {name: deque() for name in KEPT}
        self._kept_bytes = dict.fromkeys(KEPT, 0)
        self.bytes = 0
        self.full = False
        """Whether the byte limit has ever shortened the span."""

    def add(self, sent: Sent) -> list[Sent]:
        """Take a frame; those that had to go for it, oldest first."""
        name = sent.stream
        if name in KEPT:
            self._kept[name].append(sent)
            self._kept_bytes[name] += sent.cost
            while self._kept_bytes[name] > MAX_KEPT_BYTES:
                self._kept_bytes[name] -= self._kept[name].popleft().cost
            return []
        self._recent.append(sent)
        self.bytes += sent.cost
        gone = []
        while self._recent and (
            self.bytes > self.limit or self._recent[0].t1 < sent.t1 - self.span
        ):
            self.full |= self.bytes > self.limit
            gone.append(self._recent.popleft())
            self.bytes -= gone[-1].cost
        return gone

    def kept(self) -> Iterator[Sent]:
        """What gives rows their meaning, whatever its age."""
        return chain.from_iterable(self._kept.values())

    def since(self, t: int) -> Iterator[Sent]:
        """The other frames that end at ``t`` or later."""
        return (s for s in self._recent if s.t1 >= t)

    @property
    def begins(self) -> int:
        """``t`` of the oldest frame held, 0 when there is none."""
        return self._recent[0].t1 if self._recent else 0
