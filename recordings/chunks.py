"""The chunks of a recording, unpacked on demand and kept for a while.

A chunk or frame that is damaged is left out, noted once in the layout's problems, and counted.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import Any, NamedTuple

from dsprobe.recordings import container as c
from dsprobe.recordings import frames
from dsprobe.recordings.assemble import join, memory
from dsprobe.recordings.index import File, Layout
from dsprobe.recordings.model import Rows

CACHE_BYTES = 48 << 20
MAX_ROWS_BYTES = 32 << 20  # of one stream in one chunk; the writer stays far below


class Chunk(NamedTuple):
    """An unpacked chunk: where in ``payload`` the frames of each channel are."""

    payload: bytes
    messages: dict[int, list[c.Message]]


class _Cache:
    """Keeps what was used last, up to a number of bytes."""

    def __init__(self, limit: int) -> None:
        self._limit, self._used = limit, 0
        self._held: OrderedDict[tuple[int, int], tuple[Any, int]] = OrderedDict()

    def get(self, key: tuple[int, int]) -> Any:
        found = self._held.get(key)
        if found is None:
            return None
        self._held.move_to_end(key)
        return found[0]

    def put(self, key: tuple[int, int], value: Any, size: int) -> None:
        while self._held and self._used + size > self._limit:
            self._used -= self._held.popitem(last=False)[1][1]
        if size <= self._limit:
            self._held[key] = (value, size)
            self._used += size


class Chunks:
    """The chunks of ``file`` that ``layout`` lists, by their number there."""

    def __init__(self, file: File, layout: Layout) -> None:
        self._file = file
        self.layout = layout
        self._cache = _Cache(CACHE_BYTES)
        self._broken: set[int] = set()
        self.lost: dict[tuple[int, int], int] = {}
        """Frames left out, by chunk offset and channel; of a chunk that cannot be unpacked, one
        frame of each channel it is listed to hold, which is what the writer puts there."""

    def get(self, n: int) -> Chunk | None:
        """Chunk ``n``; None where it is damaged."""
        offset, length, _, _ = self.layout.table.row(n)
        held: Chunk | None = self._cache.get((offset, -1))
        if held is not None or offset in self._broken:
            return held
        try:
            if length > c.MAX_CHUNK_BYTES:
                raise c.Damaged(f"{length} bytes of data")
            payload = c.unpack_chunk(self._file.read(offset, length))
            chunk = Chunk(payload, c.messages(payload))
            self._learn(payload)
        except c.Damaged as e:
            self._broken.add(offset)
            for channel in self.layout.table.members(n):
                self.lost[offset, channel] = 1
            self.layout.problem(f"the chunk at byte {offset} is damaged and was left out ({e})")
            return None
        count = sum(map(len, chunk.messages.values()))
        self._cache.put((offset, -1), chunk, len(payload) + 120 * count)
        return chunk

    def _learn(self, payload: bytes) -> None:
        """Take the declarations, which come first in a chunk: those in the file's head are under
        no checksum."""
        for opcode, start, end in c.records(payload):
            if opcode not in (c.SCHEMA, c.CHANNEL):
                break
            self.layout.take(opcode, payload[start:end], sure=True)

    def rows(self, n: int, channel: int) -> Rows:
        """The ordered rows that chunk ``n`` holds of ``channel``."""
        offset = self.layout.table.row(n)[0]
        held: Rows | None = self._cache.get((offset, channel))
        if held is not None:
            return held
        stream = self.layout.channels[channel]
        payload, messages = self.get(n) or Chunk(b"", {})
        parts, used, bad = [], 0, 0
        for m in messages.get(channel, ()):
            try:
                if used > MAX_ROWS_BYTES:
                    raise frames.FrameError("more rows than a chunk may hold")
                rows = frames.decode(stream, payload[m.start : m.end])
            except frames.FrameError as e:
                bad += 1
                self.layout.problem(f"a frame of {stream.name[:64]} was left out ({e})")
                continue
            used += memory(stream, rows)
            parts.append(rows)
        if bad:
            self.lost[offset, channel] = bad
        rows = join(stream, parts)
        self._cache.put((offset, channel), rows, used + 256)
        return rows
