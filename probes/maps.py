"""BPF maps as numpy arrays."""

from __future__ import annotations

import mmap
from typing import Any

import numpy as np
import numpy.typing as npt

from dsprobe.probes.probe import Map


class MappedArray:
    """An array map made with BPF_F_MMAPABLE: its values are memory of this process too.

    ``leaf`` is the dtype of one value; its size must be the map's, a multiple of 8 (the kernel
    aligns values so: kernel/bpf/arraymap.c).  Raises ValueError where they differ.
    """

    def __init__(self, map: Map, leaf: np.dtype[Any]) -> None:
        if leaf.itemsize != map.leaf_size or leaf.itemsize % 8:
            raise ValueError(f"the map holds values of {map.leaf_size} bytes, not {leaf.itemsize}")
        size = leaf.itemsize * map.entries
        length = -(-size // mmap.PAGESIZE) * mmap.PAGESIZE
        memory = mmap.mmap(map.fd, length, mmap.MAP_SHARED, mmap.PROT_READ | mmap.PROT_WRITE)
        self.live: npt.NDArray[Any] = np.frombuffer(memory, leaf, map.entries)
        """The values themselves, which BPF programs change at any time."""

    def snapshot(self) -> npt.NDArray[Any]:
        """A copy; each 8-byte field is whole, but fields may be an event apart."""
        return self.live.copy()
