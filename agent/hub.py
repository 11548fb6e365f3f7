"""The hub stamps rows into frames, remembers them and hands them to every subscriber.

It never waits for a subscriber: one that does not read loses frames, which are counted, per stream,
and told to it as soon as there is room again.  For each subscriber and stream, history and what was
produced since it came equal what it was given plus what it was told it lost.
"""

from __future__ import annotations

from collections import Counter, deque

from dsprobe.agent.flight import Flight, Sent
from dsprobe.recordings import frames, wire
from dsprobe.recordings.model import Rows, Stream

_LOST_MESSAGE_ROOM = 4096


class Subscriber:
    """What waits for one viewer: history, then at most ``limit`` bytes of what came since.

    History stays the flight ring's: a frame that the ring lets go of before it was sent is lost, so
    a viewer that does not read costs no memory but its queue.  One that does not ``follow`` gets
    history alone.
    """

    def __init__(
        self, limit: int, streams: frozenset[str] | None, follow: bool, flight: Flight, since: int
    ) -> None:
        self._limit, self._streams, self.follow = limit, streams, follow
        self._first = deque(s.message for s in flight.kept() if self.wants(s.stream))
        self._history = deque(s for s in flight.since(since) if self.wants(s.stream))
        self._queue: deque[bytes] = deque()
        self.queued = 0
        self._missed: dict[str, list[int]] = {}  # of history: [frames, rows] by stream
        self._lost: dict[str, list[int]] = {}  # of what came since

    def wants(self, stream: str) -> bool:
        return self._streams is None or stream in self._streams or stream.startswith("meta.")

    def offer(self, sent: Sent) -> None:
        """Queue a frame, or count it as lost."""
        if not self.follow or not self.wants(sent.stream):
            return
        if self.queued + len(sent.message) > self._limit - _LOST_MESSAGE_ROOM:
            _count(self._lost, sent)
            return
        self._flush_lost()
        self.put(sent.message)

    def forget(self, gone: Sent) -> None:
        """The flight ring has let go of its oldest frame."""
        if self._history and self._history[0] is gone:
            _count(self._missed, self._history.popleft())

    def put_first(self, message: bytes) -> None:
        """Send a message before all that waits."""
        self._first.appendleft(message)

    def put(self, message: bytes) -> None:
        """Queue a message that is not a frame."""
        self._queue.append(message)
        self.queued += len(message)

    def end(self, why: str) -> None:
        """Nothing comes any more, once all that waits has been sent."""
        self._flush_lost()
        self.put(wire.pack("bye", why=why))
        self.follow = False

    def _flush_lost(self) -> None:
        if self._lost:
            self.put(wire.pack("lost", streams=self._lost))
            self._lost = {}

    @property
    def waiting(self) -> bool:
        """Whether :meth:`take` has anything."""
        return bool(self._first or self._history or self._missed or self._queue or self._lost)

    def take(self) -> bytes | None:
        """The next message to send, if there is one."""
        if self._first:
            return self._first.popleft()
        if self._history:
            return self._history.popleft().message
        if self._missed:
            missed, self._missed = self._missed, {}
            return wire.pack("lost", streams=missed)
        if not self._queue:
            self._flush_lost()  # it has caught up, so tell it now
        if not self._queue:
            return None
        message = self._queue.popleft()
        self.queued -= len(message)
        return message


def _count(lost: dict[str, list[int]], sent: Sent) -> None:
    pair = lost.setdefault(sent.stream, [0, 0])
    pair[0] += 1
    pair[1] += sent.rows


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
            gone = self.flight.add(sent)
            for s in self._subscribers:
                for old in gone:
                    s.forget(old)
                s.offer(sent)

    def subscribe(
        self, since: int, limit: int, streams: frozenset[str] | None, follow: bool
    ) -> Subscriber:
        """A new subscriber, with the history from ``since`` on before what comes next."""
        s = Subscriber(limit, streams, follow, self.flight, since)
        self._subscribers.append(s)
        return s

    def unsubscribe(self, subscriber: Subscriber) -> None:
        if subscriber in self._subscribers:
            self._subscribers.remove(subscriber)
