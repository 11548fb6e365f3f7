"""Goes through the kernel's tables of live blocks, a piece at a time: for their ages, and to take
out those whose process or context has ended.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from dsprobe.probes.hashmap import HashMap, Walk
from dsprobe.probes.ledger import Ledger
from dsprobe.probes.probe import Map
from dsprobe.probes.sums import summed
from dsprobe.recordings.cudastreams import GPU_AGE
from dsprobe.recordings.model import Rows

EVERY = 10 * 10**9
STEP = 32768
"""Entries looked at in one step."""
KEPT = 65536
"""The same, of what is kept outside the kernel, which takes less time."""
TAKEN = 2000
"""Blocks of ended contexts taken out in one step: each takes a system call."""

KEY = np.dtype([("process", "<u4"), ("space", "<u4"), ("address", "<u8")])
_BLOCK = [("bytes", "<u8"), ("born", "<u8"), ("stack", "<u4"), ("context", "<u4"),
          ("kind", "<u4"), ("shares", "<u4")]  # fmt: skip
TABLES = {
    "memory_blocks": np.dtype(_BLOCK),
    "memory_physical": np.dtype([*_BLOCK, ("handles", "<u8"), ("maps", "<u8")]),
    "memory_mapped": np.dtype([*_BLOCK, ("handle", "<u8")]),
}
"""Live blocks by :data:`KEY` (blocks.bpf.h)."""

_UNMAPPING_KEY = np.dtype([("thread", "<u4"), ("index", "<u4")])
_UNMAPPING = np.dtype([("mapping", _BLOCK), ("physical", _BLOCK), ("address", "<u8"),
                       ("handle", "<u8"), ("held", "<u4"), ("process", "<u4")])  # fmt: skip
_CONTEXT_KEY = np.dtype([("handle", "<u8"), ("process", "<u4"), ("pad", "<u4")])

Array = npt.NDArray[Any]


class MemoryWalk:
    def __init__(self, maps: Mapping[str, Map], ledger: Ledger) -> None:
        self._tables = [HashMap(maps[name], KEY, leaf) for name, leaf in TABLES.items()]
        self._unmapping = HashMap(maps["vmm_unmapping"], _UNMAPPING_KEY, _UNMAPPING)
        self._contexts = HashMap(maps["contexts"], _CONTEXT_KEY, "<u4")
        of_process = maps["context_processes"]
        self._processes = HashMap(of_process, "<u4", f"V{of_process.leaf_size}")
        self._ledger = ledger
        self._left: list[tuple[HashMap, Walk]] = []
        self._gone: set[int] = set()
        self._ended: set[int] = set()
        self._aging = False
        self._kept: int | None = None
        """Where in the ledger the walk is."""
        self._ages: list[tuple[Array, Array]] = []
        self._next = self._told = 0
        self.swept: tuple[set[int], set[int]] | None = None
        """Processes and contexts of which the last step found that nothing is left."""

    def step(self, now: int, gone: Collection[int], ended: Collection[int]) -> Rows:
        """Go on, for processes that are ``gone`` and contexts that have ``ended`` when a walk
        begins; rows of gpu.age when one is done."""
        self.swept = None
        self._next = self._next or now + EVERY
        if not self._left and self._kept is None:
            if now < self._next and not gone and not ended:
                return GPU_AGE.empty()
            self._begin(now, gone, ended)
        seen = taken = 0
        while self._left and seen < STEP and taken < TAKEN:
            table, walk = self._left[-1]
            keys, blocks = walk.next(STEP // 4 if not self._ended else TAKEN // 2)
            seen += len(keys)
            taken += self._look(table, keys, blocks, now)
            if walk.done:
                self._left.pop()
        if seen < STEP and not self._left and self._kept is not None:
            blocks, done = self._ledger.blocks(self._kept, self._kept + KEPT)
            self._age(blocks["process"], blocks, now)
            self._kept = None if done else self._kept + KEPT
        return GPU_AGE.empty() if self._left or self._kept is not None else self._finish(now)

    def _begin(self, now: int, gone: Collection[int], ended: Collection[int]) -> None:
        self._left = [(table, Walk(table)) for table in self._tables]
        self._gone, self._ended = set(gone), set(ended)
        self._aging = now >= self._next
        self._kept = 0 if self._aging else None
        self._ages = []
        if self._aging:
            self._next = now + EVERY

    def _look(self, table: HashMap, keys: Array, blocks: Array, now: int) -> int:
        """How many blocks of ended contexts were there."""
        if self._gone and len(keys):
            gone = np.isin(keys["process"], list(self._gone))
            table.delete(keys[gone])
            keys, blocks = keys[~gone], blocks[~gone]
        stale = 0
        if self._ended and len(keys):
            ended = np.isin(blocks["context"], list(self._ended))
            stale = int(ended.sum())
            for key in keys[ended].tolist():
                block = table.take(key)
                # Its address may have been given to another since it was read.
                if block is not None and int(block["context"]) not in self._ended:
                    table.put(key, tuple(block))
            keys, blocks = keys[~ended], blocks[~ended]
        if self._aging:
            self._age(keys["process"], blocks, now)
        return stale

    def _age(self, process: Array, blocks: Array, now: int) -> None:
        age = np.maximum(now - blocks["born"].astype(np.int64), 10**9) / 1e9
        key = process.astype(np.uint64) << np.uint64(16)
        key |= blocks["kind"].astype(np.uint64) << np.uint64(8)
        key |= np.log2(age).astype(np.uint64)
        sums = np.stack([blocks["bytes"], np.ones(len(blocks), np.uint64)], axis=1)
        self._ages.append(summed(key, sums))

    def _finish(self, now: int) -> Rows:
        if self._gone:
            for table, field in ((self._unmapping, None), (self._contexts, "process")):
                keys, values = table.read()
                process = keys[field] if field else values["process"]
                table.delete(keys[np.isin(process, list(self._gone))])
            self._processes.delete(np.array(list(self._gone)))
        if self._gone or self._ended:
            self.swept = self._gone, self._ended
        if not self._aging:
            return GPU_AGE.empty()
        keys, sums = (np.concatenate(x) for x in zip(*self._ages, strict=True))
        keys, sums = summed(keys, sums)
        rows = GPU_AGE.empty(len(keys))
        rows["t"], rows["dt"] = now, now - self._told if self._told else EVERY
        rows["process"], rows["kind"] = keys >> np.uint64(16), keys >> np.uint64(8) & np.uint64(255)
        rows["age"] = keys & np.uint64(255)
        rows["live"], rows["blocks"] = sums[:, 0], sums[:, 1]
        self._told = now
        return rows
