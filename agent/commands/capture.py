"""From an agent's connection into a file: what ``record`` and ``save`` share."""

from __future__ import annotations

import time
from collections import Counter
from typing import Any

from dsprobe.recordings import wire
from dsprobe.recordings.connection import Connection
from dsprobe.recordings.frames import FrameError
from dsprobe.recordings.streams import META_CLOCK, META_LOSS
from dsprobe.recordings.writer import Writer

SILENT_SECONDS = 3.0
"""An agent that said nothing for so long does not run."""
FLUSH_SECONDS = 0.4
"""A crash loses at most what came since the last flush; the file format promises a second."""


class Capture:
    """Writes what ``connection`` brings into ``writer``; ``rows`` counts by stream."""

    def __init__(self, connection: Connection, writer: Writer) -> None:
        self._connection, self._writer = connection, writer
        self.rows: Counter[str] = Counter()
        self.lost: Counter[str] = Counter()
        self.first = self.last = 0
        """First and last ``t`` of all frames but ``meta.*``."""
        self.lived = 0
        """Last ``t`` of all frames that come whatever the host does."""
        self.caught_up = False
        self._flushed = self._heard = time.monotonic()
        for stream in connection.streams.values():
            writer.declare(stream)

    def step(self, seconds: float) -> None:
        """Take what comes within ``seconds``.

        Raises :class:`~dsprobe.recordings.errors.StoreFull` once the disk takes no more.
        """
        for message in self._connection.receive(seconds):
            self._heard = time.monotonic()
            self._take(message)
            self._flush()
        self._flush()

    @property
    def silence(self) -> str:
        """That the agent has said nothing for a while, where that is so: it should each second,
        whatever the host does."""
        seconds = time.monotonic() - self._heard
        if seconds < SILENT_SECONDS:
            return ""
        path = self._connection.path
        return f"the agent at {path} has said nothing for {seconds:.1f} s: restart it"

    def _flush(self) -> None:
        now = time.monotonic()
        if now - self._flushed >= FLUSH_SECONDS:
            self._flushed = now
            self._writer.flush()

    def _take(self, message: dict[str, Any]) -> None:
        kind = message["m"]
        if kind == "live":
            self.caught_up = True
        elif kind == "lost":
            self._lose(wire.to_lost(message), "the recorder did not read fast enough")
        elif kind == "frame":
            try:
                frame = wire.to_frame(message)
            except wire.WireError as e:
                self._connection.give_up(f"the agent sent what is no message ({e})")
                return
            try:
                self._writer.write(frame)
            except FrameError:
                self._lose({frame.stream: frame.n}, "a frame from the agent could not be read")
                return
            self.rows[frame.stream] += frame.n
            if frame.stream == META_CLOCK.name:
                self.lived = max(self.lived, frame.t1)
            if not frame.stream.startswith("meta."):
                self.first = min(self.first or frame.t0, frame.t0)
                self.last = max(self.last, frame.t1)

    def _lose(self, lost: dict[str, int], reason: str) -> None:
        self.lost.update(lost)
        names = list(lost)
        self._writer.append(
            META_LOSS,
            META_LOSS.rows(
                t=[time.monotonic_ns()] * len(names),
                stream=names,
                reason=[reason] * len(names),
                lost=[lost[n] for n in names],
            ),
        )

    @property
    def size(self) -> int:
        """Bytes in the file."""
        return self._writer.size

    @property
    def events(self) -> int:
        """Rows of all streams but ``meta.*``."""
        return sum(n for name, n in self.rows.items() if not name.startswith("meta."))
