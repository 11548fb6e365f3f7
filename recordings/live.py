"""A session that is still being written: what an agent holds and goes on to send.

It keeps as much as the agent's own flight ring does, by age and by bytes, so that a viewer can
look back as far as the agent could.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from dsprobe.recordings import frames, wire
from dsprobe.recordings import streams as st
from dsprobe.recordings.assemble import Sequences, between, join
from dsprobe.recordings.connection import Connection
from dsprobe.recordings.frames import Frame, FrameError
from dsprobe.recordings.model import Field, Rows, Stream
from dsprobe.recordings.references import LASTING

_KEPT_FRAMES = 1 << 14  # of each; about what the agent keeps
_UNKNOWN = Stream("", "", "", (Field("t", "<u8", "ns", "CLOCK_MONOTONIC"),))


@dataclass
class _Held:
    frame: Frame
    rows: Rows | None = None

    @property
    def cost(self) -> int:
        return len(self.frame.data) + 300


class LiveSession:
    """The session behind ``connection``; see :class:`dsprobe.recordings.session.Session`."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._held: dict[str, deque[_Held]] = {name: deque() for name in connection.streams}
        self._span = _number(connection.hello.get("span"), 600 * 10**9)
        self._limit = _number(connection.hello.get("limit"), 256 << 20)
        self._bytes = 0
        self._sequences = Sequences()
        self._lost: Counter[str] = Counter()
        self._damaged = 0
        self._first = self._last = 0
        self.caught_up = False
        """Whether all of the agent's history has arrived."""

    @property
    def live(self) -> bool:
        return not self._connection.ended

    @property
    def name(self) -> str:
        return self._connection.path

    @property
    def streams(self) -> Mapping[str, Stream]:
        return self._connection.streams

    @property
    def problems(self) -> tuple[str, ...]:
        out = []
        if self._connection.ended:
            out.append(self._connection.ended)
        if self._damaged:
            out.append(f"{self._damaged} frames from the agent could not be read")
        return tuple(out)

    def fileno(self) -> int:
        """The socket, to wait on."""
        return self._connection.fileno()

    def refresh(self) -> bool:
        changed = False
        for message in self._connection.receive():
            self._take(message)
            changed = True
        return changed

    def wait(self, seconds: float) -> bool:
        """Like :meth:`refresh`, but wait so long for something to come."""
        changed = False
        for message in self._connection.receive(seconds):
            self._take(message)
            changed = True
        return changed

    def _take(self, message: dict[str, Any]) -> None:
        kind = message["m"]
        if kind == "live":
            self.caught_up = True
        elif kind == "lost":
            self._lost.update(wire.to_lost(message))
        elif kind == "frame":
            try:
                frame = wire.to_frame(message)
            except wire.WireError:
                self._damaged += 1
                return
            if frame.stream in self._held:
                self._add(frame)

    def _add(self, frame: Frame) -> None:
        self._sequences.see(frame.stream, frame.seq)
        if frame.stream == st.META_LOSS.name:
            for row in self._decode(_Held(frame)):
                self._lost[str(row["stream"])] += int(row["lost"])
        held, stream = _Held(frame), self._held[frame.stream]
        stream.append(held)
        if frame.stream in LASTING:
            if len(stream) > _KEPT_FRAMES:
                stream.popleft()
            return
        self._bytes += held.cost
        if not frame.stream.startswith("meta."):
            self._first = min(self._first, frame.t0) if self._first else frame.t0
            self._last = max(self._last, frame.t1)
        self._trim(frame.t1 - self._span)

    def _trim(self, before: int) -> None:
        for name, held in self._held.items():
            while held and held[0].frame.t1 < before and name not in LASTING:
                self._drop(name)
        while self._bytes > self._limit:
            oldest = min(
                (held[0].frame.t1, name)
                for name, held in self._held.items()
                if held and name not in LASTING
            )
            self._drop(oldest[1])

    def _drop(self, name: str) -> None:
        gone = self._held[name].popleft()
        self._bytes -= gone.cost
        if not name.startswith("meta."):
            self._first = max(self._first, gone.frame.t1)

    def _decode(self, held: _Held) -> Rows:
        if held.rows is None:
            stream = self.streams[held.frame.stream]
            try:
                held.rows = frames.decode(stream, held.frame.data)
            except FrameError:
                self._damaged += 1
                held.rows = stream.empty()
        return held.rows

    def span(self) -> tuple[int, int]:
        return self._first, self._last

    def read(self, stream: str, start: int, end: int) -> Rows:
        declared = self.streams.get(stream)
        if declared is None:
            return _UNKNOWN.empty()
        # From the newest backwards: what is asked for is nearly always recent.  Frames end in
        # nearly ascending order, so one that ends a second too early ends the search.
        parts: list[Rows] = []
        for held in reversed(self._held[stream]):
            if held.frame.t1 < start - 10**9:
                break
            if held.frame.t1 >= start and held.frame.t0 < end:
                parts.append(self._decode(held))
        return between(join(declared, parts[::-1]), start, end)

    def lost(self) -> Mapping[str, int]:
        return {k: v for k, v in self._lost.items() if v}

    def mark(self, label: str) -> None:
        """Put a marker into the agent's session, for all who read it."""
        self._connection.send("mark", label=label)

    def stop_agent(self) -> None:
        """Ask the agent to end; it does when nobody else is looking."""
        self._connection.send("stop")

    def close(self) -> None:
        self._connection.close()
        self._held = {name: deque() for name in self._held}


def _number(value: Any, default: int) -> int:
    return value if isinstance(value, int) and value > 0 else default
