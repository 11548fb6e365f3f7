"""What cuda.bpf.h keeps in its maps, as numpy sees it.

Processes, threads, counters and streams lie in mapped arrays.  BPF takes a place in one when it
first sees the thing, user space reads it there without a system call, and gives the place back,
all zero, once the thing has ended and the last of it was read.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from dsprobe.probes import syscalls
from dsprobe.probes.maps import MappedArray
from dsprobe.probes.probe import Map
from dsprobe.recordings.cudastreams import LAUNCH_SLOTS

_MAP_UPDATE_ELEM = 2
SLOTS, DEPTH, BUDGETS, LOCAL_STREAMS = 512, 4, 3, 4

FUNCTION = np.dtype(
    [("probe", "<u8"), ("text_lo", "<u8"), ("text_hi", "<u8"), ("name", "<u4"), ("flags", "<u4"),
     ("slot", "<u2"), ("cls", "u1"), ("form", "u1"), ("kind", "u1"), ("copy", "u1"),
     ("memory", "u1"), ("out", "u1"), ("address", "u1"), ("bytes", "u1"), ("times", "u1"),
     ("shift", "u1"), ("stream", "u1"), ("pad", "u1", 3)]
)  # fmt: skip
CALL = np.dtype(
    [("sp", "<u8"), ("ret", "<u8"), ("t", "<u8"), ("a", "<u8", 6), ("stream", "<u8"),
     ("bytes", "<u8"), ("cookie", "<u4"), ("copy", "<u4"), ("end", "<u8"), ("stack", "<u4"),
     ("then", "<u4")]
)  # fmt: skip
GAP = np.dtype(
    [("longest", "<u8"), ("end", "<u8"), ("within_time", "<u8"), ("within", "<u4"),
     ("epoch", "<u4")]
)  # fmt: skip
THREAD = np.dtype(
    [("id", "<u4"), ("process", "<u4"), ("tgid", "<u4"), ("tid", "<u4"), ("ns_tid", "<u4"),
     ("proc", "<u4"), ("ended", "<u4"), ("depth", "<u4"), ("comm", "S16"), ("open", CALL, DEPTH),
     ("count", "<u8"), ("shed", "<u8"), ("last", "<u8"), ("in_time", "<u8"), ("in_name", "<u4"),
     ("pad", "<u4"), ("gaps", GAP, 2), ("hist", "<u4", LAUNCH_SLOTS),
     ("streams", "V16", LOCAL_STREAMS)]
)  # fmt: skip
PROCESS = np.dtype(
    [("since", "<u8"), ("id", "<u4"), ("tgid", "<u4"), ("ns_tgid", "<u4"), ("ended", "<u4"),
     ("budget", "V16", BUDGETS), ("cells", "<u4", SLOTS)]
)  # fmt: skip
CELL = np.dtype(
    [("process", "<u4"), ("name", "<u4"), ("count", "<u8"), ("failed", "<u8"), ("busy", "<u8"),
     ("bytes", "<u8"), ("hist", "<u4", LAUNCH_SLOTS)]
)  # fmt: skip
CONFIG = np.dtype(
    [("slow_ns", "<u8"), ("budget", "<u4", BUDGETS), ("filter", "<u4"), ("epoch", "<u4"),
     ("pad", "<u4")]
)  # fmt: skip
NUMBER = np.dtype("<u8")
NEXT_PROC, NEXT_THREAD, NEXT_CELL, NEXT_STREAM = range(4)


class Places:
    """The array map ``name`` with elements of ``leaf``; ``which`` of ``cuda_next`` counts those
    that were ever taken, and the queue ``free`` holds those to be taken again."""

    def __init__(
        self, maps: Mapping[str, Map], name: str, leaf: np.dtype[Any], which: int, free: str
    ) -> None:
        self._all = MappedArray(maps[name], leaf).live
        self._next = MappedArray(maps["cuda_next"], NUMBER).live[which : which + 1]
        self._free = maps[free].fd

    @property
    def live(self) -> npt.NDArray[Any]:
        """All that were ever taken (place 0 is nobody's), as BPF changes them."""
        return self._all[: min(int(self._next[0]) + 1, len(self._all))]

    def give_back(self, places: Iterable[int]) -> None:
        """Their things have ended: nobody writes there any more."""
        for i in places:
            self._all[i] = np.zeros((), self._all.dtype)
            push(self._free, int(i))


def push(queue: int, value: int) -> None:
    """Put a u32 into a queue map (BPF_MAP_UPDATE_ELEM, without a key)."""
    cell = np.array([value], "<u4")
    syscalls.bpf(_MAP_UPDATE_ELEM, struct.pack("<IIQQQ", queue, 0, 0, cell.ctypes.data, 0))
