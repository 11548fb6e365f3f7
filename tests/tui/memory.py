"""A session in memory, live or at rest, that a test appends rows to."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from dsprobe.recordings import streams as st
from dsprobe.recordings.assemble import between, join
from dsprobe.recordings.model import Rows, Stream

NONE = np.empty(0, [("t", "<u8")])


class MemorySession:
    """What has been appended is seen after the next refresh, as from a socket."""

    def __init__(self, live: bool = True, name: str = "memory") -> None:
        self.live = live
        self.name = name
        self.streams: dict[str, Stream] = {}
        self.problems: tuple[str, ...] = ()
        self.losses: dict[str, int] = {}
        self.reads: list[tuple[str, int, int, int]] = []
        self.closed = False
        self._pending: list[tuple[str, Rows]] = []
        self._frames: dict[str, list[Rows]] = {}
        self._span = (0, 0)

    def append(self, stream: str, /, **columns: object) -> None:
        self._pending.append((stream, st.STREAMS[stream].rows(**columns)))

    def append_rows(self, stream: Stream, rows: Rows) -> None:
        self.streams[stream.name] = stream
        self._pending.append((stream.name, rows))

    def refresh(self) -> bool:
        taken, self._pending = self._pending, []
        for name, rows in taken:
            if not len(rows):
                continue
            self.streams.setdefault(name, st.STREAMS.get(name))  # type: ignore[arg-type]
            self._frames.setdefault(name, []).append(rows)
            if not name.startswith(("meta.", "rollup.")):
                first, last = int(rows["t"].min()), int(rows["t"].max())
                begin, end = self._span
                self._span = (min(begin or first, first), max(end, last))
        return bool(taken)

    def drop_before(self, t: int) -> None:
        """As a flight ring does: forget everything but metadata before ``t``."""
        for name in [n for n in self._frames if not n.startswith("meta.")]:
            kept = [rows[rows["t"] >= t] for rows in self._frames[name]]
            self._frames[name] = [rows for rows in kept if len(rows)]
        self._span = (max(self._span[0], t), self._span[1])

    def span(self) -> tuple[int, int]:
        return self._span

    def read(self, stream: str, start: int, end: int) -> Rows:
        frames = [
            rows
            for rows in self._frames.get(stream, ())
            if int(rows["t"][-1]) >= start and int(rows["t"][0]) < end
        ]
        declared = self.streams.get(stream)
        if not frames:
            return declared.empty() if declared else NONE
        rows = between(join(self.streams[stream], frames), start, end)
        self.reads.append((stream, start, end, len(rows)))
        return rows

    def lost(self) -> Mapping[str, int]:
        return self.losses

    def close(self) -> None:
        self.closed = True
