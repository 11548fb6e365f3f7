"""The flight ring: the last minutes of frames, in memory, bounded by age and by bytes."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass

from dsprobe.recordings import streams as st

KEPT = frozenset(s.name for s in (st.META_SESSION, st.META_STRING, st.META_NETNS, st.META_COVERAGE))
"""Streams whose rows give later rows their meaning, so age does not end them."""

MAX_KEPT_BYTES = 16 << 20


@dataclass(frozen=True)
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
        self._kept: deque[Sent] = deque()
        self._kept_bytes = 0
        self.bytes = 0
        self.full = False
        """Whether the byte limit has ever shortened the span."""

    def add(self, sent: Sent) -> None:
        if sent.stream in KEPT:
            self._kept.append(sent)
            self._kept_bytes += sent.cost
            while self._kept_bytes > MAX_KEPT_BYTES:
                self._kept_bytes -= self._kept.popleft().cost
            return
        self._recent.append(sent)
        self.bytes += sent.cost
        while self._recent and (
            self.bytes > self.limit or self._recent[0].t1 < sent.t1 - self.span
        ):
            self.full |= self.bytes > self.limit
            self.bytes -= self._recent.popleft().cost

    def since(self, t: int) -> Iterator[Sent]:
        """What gives rows their meaning, then the frames that end at ``t`` or later."""
        yield from self._kept
        yield from (s for s in self._recent if s.t1 >= t)

    @property
    def begins(self) -> int:
        """``t`` of the oldest frame held, 0 when there is none."""
        return self._recent[0].t1 if self._recent else 0
