"""Live blocks for which the kernel's tables had no room, kept here instead.

The kernel has counted a block in before it comes here (blocks.bpf.h), so what is kept is where the
block belongs, and what has gone since: :meth:`Ledger.gone` are sums to add to the kernel's.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from dsprobe.recordings.cudastreams import MEMORY_KINDS
from dsprobe.recordings.model import Field, Rows, Stream

ADD, FREE, DROP, RETAIN, MAP, UNMAP, RANGE, REST = range(8)  # enum memory_entry
PHYSICAL, MAPPED = MEMORY_KINDS.index("physical"), MEMORY_KINDS.index("mapped")

PATIENCE = 5 * 10**9
"""How long (ns) the return of a free may take to be seen."""

ENTRIES = Stream(
    "memory.ledger",
    "Blocks that found no room in the kernel's table, and calls on such; not recorded.",
    "uprobes on libcuda",
    (
        Field("t", "<u8", "ns", "when the block was allocated, or the call began"),
        Field("address", "<u8", "address", "address or handle"),
        Field("bytes", "<u8", "bytes", "size"),
        Field("handle", "<u8", "handle", "physical memory that a mapping is of"),
        Field("process", "<u4", "id", "process"),
        Field("context", "<u4", "id", "context"),
        Field("stack", "<u4", "id", "stack that allocated it"),
        Field("handles", "<u4", "count", "handles of physical memory"),
        Field("maps", "<u4", "count", "mappings of it"),
        Field("entry", "u1", "enum", "what to do", names=("add", "free", "drop", "retain", "map",
                                                          "unmap", "range", "rest")),
        Field("kind", "u1", "enum", "what kind of memory", names=MEMORY_KINDS),
    ),
)  # fmt: skip


_GONE = np.dtype([(n, "<u4") for n in ("process", "context", "stack", "kind")])
_UNKNOWN = np.dtype([(n, "<u4") for n in ("process", "kind")])
_BLOCK = np.dtype([(n, "<u8") for n in ("process", "context", "kind", "bytes", "born")])


@dataclass
class Block:
    bytes: int
    born: int
    stack: int
    context: int
    kind: int
    handle: int
    handles: int
    maps: int


class Mappings(Protocol):
    """What the kernel's tables hold of mappings."""

    def unmap(self, process: int, start: int, size: int, t: int) -> list[Block]:
        """Take out the mappings in a range that were born before ``t``: these, and the physical
        memory that went with them."""


class Ledger:
    """Up to ``size`` blocks; more are counted as ``lost`` and as gone."""

    def __init__(self, size: int = 1 << 21) -> None:
        self.size = size
        self.mappings: Mappings
        self.lost = 0
        self._replaced: dict[tuple[int, int, int], list[tuple[int, int]]] = {}
        """Blocks whose address was given again before they were freed: when they were born, and
        when what replaced them was."""
        self._blocks: dict[tuple[int, int, int], Block] = {}
        self._mapped: dict[int, set[int]] = {}
        """Addresses of mappings by process."""
        self._gone: dict[tuple[int, int, int, int], list[int]] = {}
        self._unknown: dict[tuple[int, int], list[int]] = {}
        self._over: set[int] = set()
        """Processes and contexts that have ended; their numbers are of one sequence."""

    def __len__(self) -> int:
        return len(self._blocks)

    def take(self, rows: Rows) -> None:
        """Entries of the ring, in their order."""
        for row in rows.tolist():
            t, address, size, handle, process, context, stack, handles, maps, what, kind = row
            space = kind if kind >= PHYSICAL else 0
            key = process, space, address
            if process in self._over or context in self._over:
                continue
            if what == ADD:
                self._add(key, Block(size, t, stack, context, kind, handle, handles, maps))
            elif what == FREE:
                self._free(key, kind, t)
            elif what in (RANGE, REST):
                found = self.mappings.unmap(process, address, size, t) if what == REST else []
                for block in found:
                    self._count_out(process, block)
                if not self._unmap(process, address, size, t) and not found:
                    self._miss(process, MAPPED)
            elif (physical := self._blocks.get(key)) and physical.born < t:
                physical.handles += (what == RETAIN) - (what == DROP)
                physical.maps += (what == MAP) - (what == UNMAP)
                self._settle(key, physical)
            elif what == DROP:
                self._late(key, kind, t)

    def _add(self, key: tuple[int, int, int], block: Block) -> None:
        old = self._blocks.pop(key, None)
        if old:
            self._count_out(key[0], old)
            self._replaced.setdefault(key, []).append((old.born, block.born))
        if len(self._blocks) >= self.size:
            self._count_out(key[0], block)
            self.lost += 1
            return
        self._blocks[key] = block
        if block.kind == MAPPED:
            self._mapped.setdefault(key[0], set()).add(key[2])

    def _free(self, key: tuple[int, int, int], kind: int, t: int) -> None:
        block = self._blocks.get(key)
        if block and block.born < t:
            del self._blocks[key]
            self._count_out(key[0], block)
        else:
            self._late(key, kind, t)

    def _late(self, key: tuple[int, int, int], kind: int, t: int) -> None:
        """A call that took its time: its address was given again before it returned, or it is of a
        block that nobody knows."""
        waiting = self._replaced.get(key, [])
        for i, (born, _) in enumerate(waiting):
            if born < t:
                del waiting[i]
                if not waiting:
                    del self._replaced[key]
                return
        self._miss(key[0], kind)

    def missed(self, now: int) -> int:
        """Blocks that were replaced some time before ``now`` by others with the same address, and
        whose free has not come since; each is told once."""
        late = [(k, w) for k, v in self._replaced.items() for w in v if w[1] < now - PATIENCE]
        for key, which in late:
            self._replaced[key].remove(which)
            if not self._replaced[key]:
                del self._replaced[key]
        return len(late)

    def _settle(self, key: tuple[int, int, int], physical: Block) -> None:
        if physical.handles <= 0 and physical.maps <= 0:
            del self._blocks[key]
            self._count_out(key[0], physical)

    def _unmap(self, process: int, start: int, size: int, t: int) -> bool:
        mapped = self._mapped.get(process, set())
        found = [a for a in mapped if start <= a < start + size
                 and self._blocks[process, MAPPED, a].born < t]  # fmt: skip
        for address in found:
            mapped.remove(address)
            block = self._blocks.pop((process, MAPPED, address))
            self._count_out(process, block)
            key = process, PHYSICAL, block.handle
            if physical := self._blocks.get(key):
                physical.maps -= 1
                self._settle(key, physical)
        return bool(found)

    def _count_out(self, process: int, block: Block) -> None:
        key = process, block.context, block.stack, block.kind
        sums = self._gone.setdefault(key, [0, 0, 0])
        sums[0] += 1
        sums[1] += block.bytes
        sums[2] -= block.born >> 20

    def _miss(self, process: int, kind: int) -> None:
        self._unknown.setdefault((process, kind), [0])[0] += 1

    def gone(self) -> tuple[npt.NDArray[Any], npt.NDArray[np.uint64]]:
        """(process, context, stack, kind) and (frees, bytes freed, change of the sum of births) of
        what was freed from here, since the beginning."""
        return _arrays(self._gone, _GONE, 3)

    def unknown(self) -> tuple[npt.NDArray[Any], npt.NDArray[np.uint64]]:
        """(process, kind) and how many frees of blocks that nobody knows."""
        return _arrays(self._unknown, _UNKNOWN, 1)

    def blocks(self) -> npt.NDArray[Any]:
        """(process, context, kind, bytes, born) of all blocks."""
        rows = [(k[0], b.context, b.kind, b.bytes, b.born) for k, b in self._blocks.items()]
        return np.array(rows, _BLOCK)

    def forget(self, processes: set[int], contexts: set[int]) -> None:
        """Drop what belongs to processes and contexts that have ended, now and from now on."""
        self._over |= processes | contexts
        for key in [k for k, b in self._blocks.items()
                    if k[0] in processes or b.context in contexts]:  # fmt: skip
            del self._blocks[key]
        for process in processes:
            self._mapped.pop(process, None)
        self._replaced = {k: v for k, v in self._replaced.items() if k[0] not in processes}
        self._gone = {k: v for k, v in self._gone.items()
                      if k[0] not in processes and k[1] not in contexts}  # fmt: skip
        self._unknown = {k: v for k, v in self._unknown.items() if k[0] not in processes}

    def over(self, processes: set[int], contexts: set[int]) -> None:
        """Nothing of these can come any more."""
        self._over -= processes | contexts


def _arrays(
    table: Mapping[Any, list[int]], key: np.dtype[Any], columns: int
) -> tuple[npt.NDArray[Any], npt.NDArray[np.uint64]]:
    values = np.array(list(table.values()), np.int64).reshape(len(table), columns)
    return np.array(list(table), key), values.view(np.uint64)
