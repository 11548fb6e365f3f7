"""The hub stamps rows into frames, remembers them and hands them to every subscriber.

It never waits for a subscriber: one that does not read loses frames, which are counted, per stream,
and told to it as soon as there is room again.  For each subscriber and stream, what was produced
since it came equals what it was given plus what it was told it lost.
"""

from __future__ import annotations

from collections import Counter, deque

from dsprobe.agent.flight import Flight, Sent
from dsprobe.recordings import frames, wire
from dsprobe.recordings.model import Rows, Stream

_LOST_MESSAGE_ROOM = 4096


class Subscriber:
    """The queue of one viewer, at most ``limit`` bytes long.

    ``backlog`` is the history it asked for; it shares its bytes with the flight ring, so it counts
    for nothing until the ring has let go of them, and is never longer than the ring.
    """

    def __init__(self, limit: int, streams: frozenset[str] | None) -> None:
        self._limit, self._streams = limit, streams
        self.backlog: deque[bytes] = deque()
        self._queue: deque[bytes] = deque()
        self.queued = 0
        self._lost: dict[str, list[int]] = {}

    def wants(self, stream: str) -> bool:
        return self._streams is None or stream in self._streams or stream.startswith("meta.")

    def offer(self, sent: Sent) -> None:
        """Queue a frame, or count it as lost."""
        if not self.wants(sent.stream):
            return
        if self.queued + len(sent.message) > self._limit - _LOST_MESSAGE_ROOM:
            lost = self._lost.setdefault(sent.stream, [0, 0])
            lost[0] += 1
            lost[1] += sent.rows
            return
        self._flush_lost()
        self.put(sent.message)

    def put(self, message: bytes) -> None:
        """Queue a message that is not a frame."""
        self._queue.append(message)
        self.queued += len(message)

    def _flush_lost(self) -> None:
        if self._lost:
            self.put(wire.pack("lost", streams=self._lost))
            self._lost = {}

    def take(self) -> bytes | None:
        """The next message to send, if there is one."""
        if self.backlog:
            return self.backlog.popleft()
        if not self._queue:
            self._flush_lost()  # it has caught up, so tell it now
        if not self._queue:
            return None
        message = self._queue.popleft()
        self.queued -= len(message)
        return message


class Hub:
    """``produced`` counts rows by stream since the start."""

    def __init__(self, flight: Flight) -> None:
        self.flight = flight
        self.produced: Counter[str] = Counter()
        self._seq: Counter[str] = Counter()
        self._subscribers: list[Subscriber] = []

    def publish(self, stream: Stream, rows: Rows) -> None:
        """Make rows into frames and give them to everybody."""
        limit = max(1, min(frames.MAX_FRAME_ROWS, (4 << 20) // stream.dtype.itemsize))
        for at in range(0, len(rows), limit):
            part = rows[at : at + limit]
            f = frames.make(stream, self._seq[stream.name], part)
            self._seq[stream.name] += 1
            self.produced[stream.name] += len(part)
            sent = Sent(stream.name, f.t1, f.n, wire.frame(f))
            self.flight.add(sent)
            for s in self._subscribers:
                s.offer(sent)

    def subscribe(
        self, since: int, limit: int, streams: frozenset[str] | None, follow: bool
    ) -> Subscriber:
        """A new subscriber, with the history from ``since`` on before what comes next."""
        s = Subscriber(limit, streams)
        s.backlog.extend(sent.message for sent in self.flight.since(since) if s.wants(sent.stream))
        if follow:
            self._subscribers.append(s)
        return s

    def unsubscribe(self, subscriber: Subscriber) -> None:
        if subscriber in self._subscribers:
            self._subscribers.remove(subscriber)
