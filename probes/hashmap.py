"""BPF hash maps, read and emptied many entries at a call, with numpy.

Source: kernel/bpf/hashtab.c and bpf(2): a batch is whole buckets, so an entry that stays is seen
once in a walk; a cursor is the number of the next bucket.  Batches need Linux 5.6.
"""

from __future__ import annotations

import ctypes
import errno
import struct
from typing import Any

import numpy as np
import numpy.typing as npt

from dsprobe.probes import syscalls
from dsprobe.probes.probe import Map

Array = npt.NDArray[Any]

_LOOKUP, _UPDATE, _DELETE, _TAKE, _LOOKUP_BATCH, _DELETE_BATCH = 1, 2, 3, 21, 24, 27
_NO_EXIST = 1
_BATCH = struct.Struct("<QQQQIIQQ")
_BUCKET = 1024
"""Entries that the buffers have room for at least: a bucket's must fit."""


class HashMap:
    """A hash map (not of per-CPU values) whose keys and values have these dtypes.

    Raises ValueError where their sizes are not the map's.
    """

    def __init__(self, map: Map, key: npt.DTypeLike, leaf: npt.DTypeLike) -> None:
        self.key, self.leaf = np.dtype(key), np.dtype(leaf)
        if (self.key.itemsize, self.leaf.itemsize) != (map.key_size, map.leaf_size):
            raise ValueError(
                f"the map holds keys of {map.key_size} and values of {map.leaf_size} bytes,"
                f" not {self.key.itemsize} and {self.leaf.itemsize}"
            )
        self._fd, self.entries = map.fd, map.entries

    def read(self) -> tuple[Array, Array]:
        """Keys and values of all entries."""
        walk = Walk(self)
        parts = []
        while not walk.done:
            parts.append(walk.next(16384))
        keys, values = zip(*parts, strict=True)
        return np.concatenate(keys), np.concatenate(values)

    def get(self, key: object) -> Any:
        """The value of a key (a tuple of its fields); None where there is none."""
        return self._one(_LOOKUP, key)

    def take(self, key: object) -> Any:
        """The same, and the entry is gone (Linux 5.14)."""
        return self._one(_TAKE, key)

    def _one(self, command: int, key: object) -> Any:
        keys, values = np.array([key], self.key), np.zeros(1, self.leaf)
        attr = struct.pack("<IIQQQ", self._fd, 0, keys.ctypes.data, values.ctypes.data, 0)
        try:
            syscalls.bpf(command, attr)
        except OSError as e:
            if e.errno == errno.ENOENT:
                return None
            raise
        return values[0]

    def put(self, key: object, value: object) -> bool:
        """Enter a value where the key has none yet; whether that was done."""
        keys, values = np.array([key], self.key), np.array([value], self.leaf)
        attr = struct.pack("<IIQQQ", self._fd, 0, keys.ctypes.data, values.ctypes.data, _NO_EXIST)
        try:
            syscalls.bpf(_UPDATE, attr)
        except OSError:
            return False
        return True

    def delete(self, keys: Array) -> None:
        """Remove these entries, those that are there."""
        keys = np.ascontiguousarray(keys, self.key)
        at = 0
        while at < len(keys):
            done, error = self.batch(_DELETE_BATCH, 0, 0, keys[at:], None, len(keys) - at)
            at += done + (error == errno.ENOENT)  # that one had gone
            if error not in (0, errno.ENOENT):
                raise OSError(error, "BPF_MAP_DELETE_BATCH")

    def batch(
        self, command: int, start: int, end: int, keys: Array, values: Array | None, count: int
    ) -> tuple[int, int]:
        """Entries done, and errno; ``start`` and ``end`` are addresses of cursors."""
        data = 0 if values is None else values.ctypes.data
        attr = ctypes.create_string_buffer(
            _BATCH.pack(start, end, keys.ctypes.data, data, count, self._fd, 0, 0), _BATCH.size
        )
        error = syscalls.bpf_in_place(command, attr)
        (done,) = struct.unpack_from("<I", attr, 32)
        return (done if error in (0, errno.ENOENT) else 0), error


class Walk:
    """One pass over a map, in as many steps as wanted."""

    def __init__(self, map: HashMap) -> None:
        self._map = map
        self._cursors = (ctypes.c_uint64 * 2)()
        self._begun = False
        self.done = False

    def next(self, count: int) -> tuple[Array, Array]:
        """About ``count`` more keys and values; none, or some, when it is done."""
        m = self._map
        count = min(max(count, _BUCKET), max(m.entries, 1) + _BUCKET)
        while not self.done:
            keys, values = np.zeros(count, m.key), np.zeros(count, m.leaf)
            start, end = (ctypes.addressof(self._cursors) + 8 * i for i in (0, 1))
            n, error = m.batch(_LOOKUP_BATCH, start if self._begun else 0, end, keys, values, count)
            if error == errno.ENOSPC:  # a bucket holds more than that
                count *= 2
                continue
            if error not in (0, errno.ENOENT):
                raise OSError(error, "BPF_MAP_LOOKUP_BATCH")
            self.done = error == errno.ENOENT
            self._begun = True
            self._cursors[0] = self._cursors[1]
            return keys[:n], values[:n]
        return np.zeros(0, m.key), np.zeros(0, m.leaf)
