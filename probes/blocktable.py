"""A table of blocks by process, space and address, many looked up, added and removed at a call.

It is a hash with chains, in numpy arrays of a fixed size: memory that no block was in yet is never
touched, so it costs nothing.
"""

from __future__ import annotations

import secrets
from typing import Any

import numpy as np
import numpy.typing as npt

BLOCK = np.dtype([("address", "<u8"), ("bytes", "<u8"), ("born", "<u8"), ("process", "<u4"),
                  ("context", "<u4"), ("stack", "<u4"), ("kind", "<u2"),
                  ("space", "<u2")])  # fmt: skip
_NOBODY = 0xFFFF
"""The space of a row that holds no block."""

Array = npt.NDArray[Any]
Places = npt.NDArray[np.int64]


class BlockTable:
    """Up to ``size`` blocks (:data:`BLOCK`), each at a place of its own, from 1 on."""

    def __init__(self, size: int) -> None:
        self.size = size
        self._bits = max(4, (size - 1).bit_length())
        # Addresses are chosen by those who are traced: chains must not be.
        self._secret = np.array([secrets.randbits(64) | 1 for _ in range(3)], np.uint64)
        self._clear()

    def _clear(self) -> None:
        self._first = np.zeros(1 << self._bits, np.int32)
        self._next = np.zeros(self.size + 1, np.int32)
        self._rows = np.zeros(self.size + 1, BLOCK)
        self._free = np.zeros(self.size, np.int32)
        self._freed = 0
        self.end = 1
        """No place from here on was taken."""

    def __len__(self) -> int:
        return self.end - 1 - self._freed

    def _bucket(self, keys: Array) -> Places:
        a, b, c = self._secret
        mixed = (keys["process"].astype(np.uint64) << np.uint64(16) | keys["space"]) * b
        mixed ^= keys["address"] * a
        mixed ^= mixed >> np.uint64(29)
        found: Places = ((mixed * c) >> np.uint64(64 - self._bits)).astype(np.int64)
        return found

    def find(self, keys: Array) -> Places:
        """The place of each (process, space and address of :data:`BLOCK`); 0: it is not here."""
        found = np.zeros(len(keys), np.int64)
        at = self._first[self._bucket(keys)].astype(np.int64)
        left = np.flatnonzero(at)
        at = at[left]
        while len(left):
            same = self._rows["address"][at] == keys["address"][left]
            for name in ("process", "space"):
                same &= self._rows[name][at] == keys[name][left]
            found[left[same]] = at[same]
            left, at = left[~same], self._next[at[~same]].astype(np.int64)
            some = at != 0
            left, at = left[some], at[some]
        return found

    def blocks(self, places: Places) -> Array:
        """What is there (a copy)."""
        found: Array = self._rows[places]
        return found

    def occupied(self, start: int, stop: int) -> Places:
        """Places among these that hold a block."""
        stop = min(stop, self.end)
        return np.flatnonzero(self._rows["space"][start:stop] != _NOBODY) + start

    def add(self, blocks: Array) -> int:
        """Put in blocks that are not here, and differ; how many of them found room, the first."""
        n = min(len(blocks), self.size - len(self))
        reused = min(n, self._freed)
        places = np.arange(self.end - reused, self.end - reused + n)
        places[:reused] = self._free[self._freed - reused : self._freed]
        self._freed -= reused
        self.end += n - reused
        self._rows[places] = blocks[:n]
        self._link(places, self._bucket(blocks[:n]))
        return n

    def remove(self, places: Places) -> None:
        """Take out what is at these, which differ."""
        if len(places) == len(self):
            self._clear()
            return
        buckets = np.unique(self._bucket(self._rows[places]))
        self._rows["space"][places] = _NOBODY
        stay: list[tuple[Places, Places]] = []
        at, of = self._first[buckets].astype(np.int64), buckets
        self._first[buckets] = 0
        while len(at):
            some = self._rows["space"][at] != _NOBODY
            stay.append((at[some], of[some]))
            at = self._next[at].astype(np.int64)
            at, of = at[at != 0], of[at != 0]
        if stay:
            self._link(*(np.concatenate(x) for x in zip(*stay, strict=True)))
        self._free[self._freed : self._freed + len(places)] = places
        self._freed += len(places)

    def _link(self, places: Places, buckets: Places) -> None:
        """Put places at the head of the chains of these buckets."""
        if not len(places):
            return
        order = np.argsort(buckets, kind="stable")
        places, buckets = places[order], buckets[order]
        ends = np.flatnonzero(np.r_[buckets[1:] != buckets[:-1], True])
        follow = np.r_[places[1:], 0]
        follow[ends] = self._first[buckets[ends]]
        self._next[places] = follow
        begins = np.r_[0, ends[:-1] + 1]
        self._first[buckets[begins]] = places[begins]
