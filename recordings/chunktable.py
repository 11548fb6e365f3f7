"""Where the chunks of a recording are and what they hold, as compact as a day of them needs."""

from __future__ import annotations

from array import array
from collections.abc import Iterable

import numpy as np
import numpy.typing as npt

Longs = npt.NDArray[np.int64]


class ChunkTable:
    """Chunks in file order, columns of int64: ``offset``, ``length``, ``first`` and ``last`` (the
    range of the last times of their frames), and which channels each one holds."""

    def __init__(self) -> None:
        self._chunks = array("q")
        self._channels = array("H")
        self._holders = array("q")
        self._by_channel: dict[int, Longs] | None = None
        self.unlisted: set[int] = set()
        """Chunks whose channels nobody listed: they may hold any."""

    def __len__(self) -> int:
        return len(self._chunks) // 4

    def add(
        self, offset: int, length: int, first: int, last: int, channels: Iterable[int] | None
    ) -> None:
        n = len(self)
        self._chunks.extend((offset, length, first, last))
        if channels is None:
            self.unlisted.add(n)
        else:
            before = len(self._channels)
            self._channels.extend(channels)
            self._holders.extend([n] * (len(self._channels) - before))
        self._by_channel = None

    def drop_unlisted_tail(self) -> int:
        """Forget a last chunk whose channels are unlisted; its offset, or -1 if there is none."""
        n = len(self) - 1
        if n not in self.unlisted:
            return -1
        self.unlisted.remove(n)
        offset = self._chunks[-4]
        del self._chunks[-4:]
        self._by_channel = None
        return offset

    @property
    def chunks(self) -> Longs:
        """An (n, 4) copy of the columns."""
        return np.array(self._chunks, np.int64).reshape(-1, 4)

    def row(self, n: int) -> tuple[int, int, int, int]:
        offset, length, first, last = self._chunks[4 * n : 4 * n + 4]
        return offset, length, first, last

    def holding(self, channel: int) -> Longs:
        """Numbers of the chunks that hold (or may hold) frames of ``channel``, ascending."""
        if self._by_channel is None:
            channels = np.array(self._channels, np.int64)
            holders = np.array(self._holders, np.int64)
            order = np.argsort(channels, kind="stable")
            ids, starts = np.unique(channels[order], return_index=True)
            groups = np.split(holders[order], starts[1:])
            self._by_channel = dict(zip(ids.tolist(), groups, strict=False))
        held = self._by_channel.get(channel, np.empty(0, np.int64))
        if self.unlisted:
            held = np.union1d(held, np.fromiter(self.unlisted, np.int64))
        return held

    def find(self, channel: int, start: int, end: int, span: int) -> Longs:
        """Numbers of the chunks that may hold rows of ``channel`` in ``[start, end)``.

        ``span`` is the longest time one frame of the channel covers: the table knows only when
        frames end.
        """
        held = self.holding(channel)
        if not len(held):
            return held
        chunks = np.frombuffer(self._chunks, np.int64).reshape(-1, 4)[held]
        fits = (chunks[:, 3] >= start) & (chunks[:, 2] < min(end + span, 1 << 62))
        return held[fits]

    def channel_ids(self) -> list[int]:
        """Channels that some chunk is listed to hold."""
        return sorted(set(self._channels))

    def members(self, n: int) -> list[int]:
        """The channels listed for chunk ``n``."""
        holders = np.array(self._holders, np.int64)
        channels = np.array(self._channels, np.int64)
        return [int(ch) for ch in channels[holders == n]]
