"""Physical memory and its mappings for which the kernel's tables had no room.

Physical memory goes with its last handle and its last mapping (vmm.bpf.h).  Entries are dealt with
one by one, for a limited time at once; the rest waits.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from dsprobe.probes.blocktable import BLOCK
from dsprobe.probes.latefrees import PATIENCE, WAITING
from dsprobe.recordings.cudastreams import MEMORY_KINDS
from dsprobe.recordings.model import Rows

ADD, FREE, DROP, RETAIN, MAP, UNMAP, RANGE, REST = range(8)  # as in ledger.py
PHYSICAL, MAPPED = MEMORY_KINDS.index("physical"), MEMORY_KINDS.index("mapped")

AT_ONCE = 0.01
"""So many seconds are spent on entries at once."""
BACKLOG = 1 << 16
"""So many entries wait."""
STEPS = 256
"""Places of a long range looked at between two looks at the clock: each is a system call."""

Key = tuple[int, int, int]
"""Process, space, address or handle."""


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

    def unmap(
        self, process: int, start: int, end: int, t: int, steps: int
    ) -> tuple[list[Block], int]:
        """Take out the mappings in a range that were born before ``t``, so many ``steps`` of it:
        these, and the physical memory that went with them; and where to go on."""


class VmmLedger:
    """Up to ``size`` blocks.  ``count_out`` takes blocks that went, ``miss`` process and kind of
    a call on what nobody knows."""

    def __init__(
        self, size: int, count_out: Callable[[npt.NDArray[Any]], None],
        miss: Callable[[int, int], None],
    ) -> None:  # fmt: skip
        self.size = size
        self.mappings: Mappings
        self.lost = 0
        """Entries for which the backlog was too long."""
        self.refused = 0
        """Blocks that found no room."""
        self.placeless: dict[tuple[int, int], tuple[int, int]] = {}
        """Those that are live by process and context, and their bytes."""
        self._count, self._miss = count_out, miss
        self._backlog: deque[tuple[int, ...]] = deque()
        self._done: list[tuple[int, Block]] = []
        self._replaced: dict[Key, list[tuple[int, int]]] = {}
        """Blocks whose address was given again before they were freed: when they were born, and
        when what replaced them was."""
        self._blocks: dict[Key, Block] = {}
        self._mapped: dict[int, set[int]] = {}
        """Addresses of mappings by process."""

    def __len__(self) -> int:
        return len(self._blocks)

    def take(self, rows: Rows) -> None:
        """Entries of the ring, in their order."""
        room = BACKLOG - len(self._backlog)
        self.lost += max(0, len(rows) - room)
        self._backlog += rows[: max(0, room)].tolist()
        self.go_on()

    def go_on(self) -> None:
        """Deal with what waits, for a short time."""
        until = time.monotonic() + AT_ONCE
        while self._backlog:
            rest = self._one(*self._backlog.popleft())
            if rest:
                self._backlog.appendleft(rest)
            if time.monotonic() > until:
                break
        if self._done:
            rows = [(0, b.bytes, b.born, process, b.context, b.stack, b.kind, 0)
                    for process, b in self._done]  # fmt: skip
            self._count(np.array(rows, BLOCK))
            self._done = []

    def _one(
        self, t: int, address: int, size: int, handle: int, process: int, context: int,
        stack: int, handles: int, maps: int, what: int, kind: int,
    ) -> tuple[int, ...] | None:  # fmt: skip
        """What is left to do of this entry."""
        key = process, kind, address
        if what == ADD:
            self._add(key, Block(size, t, stack, context, kind, handle, handles, maps))
        elif what in (RANGE, REST):
            # Of a REST whose beginning was done, ``handles`` tells whether anything was found.
            end, at = address + size, address
            if what == REST:
                found, at = self.mappings.unmap(process, address, end, t, STEPS)
                self._done += [(process, block) for block in found]
                handles |= bool(found)
            until = at if what == REST else end
            handles |= self._unmap(process, address, until, t)
            if until < end:
                return (t, until, end - until, handle, process, context, stack, handles, maps,
                        what, kind)  # fmt: skip
            if not handles:
                self._miss(process, MAPPED)
        elif (physical := self._blocks.get(key)) and physical.born < t:
            physical.handles += (what == RETAIN) - (what == DROP)
            physical.maps += (what == MAP) - (what == UNMAP)
            self._settle(key, physical)
        elif what == DROP:
            self._late(key, kind, t)
        return None

    def _add(self, key: Key, block: Block) -> None:
        old = self._blocks.pop(key, None)
        if old:
            self._mapped.get(key[0], set()).discard(key[2])
            self._done.append((key[0], old))
            if len(self._replaced) < WAITING:
                self._replaced.setdefault(key, []).append((old.born, block.born))
        if len(self._blocks) >= self.size:
            self.refused += 1
            owner = key[0], block.context
            n, size = self.placeless.get(owner, (0, 0))
            self.placeless[owner] = n + 1, size + block.bytes
            return
        self._blocks[key] = block
        if block.kind == MAPPED:
            self._mapped.setdefault(key[0], set()).add(key[2])

    def _late(self, key: Key, kind: int, t: int) -> None:
        """A call that took its time: its handle was given again before it returned, or it is of
        one that nobody knows."""
        waiting = self._replaced.get(key, [])
        for i, (born, _) in enumerate(waiting):
            if born < t:
                del waiting[i]
                if not waiting:
                    del self._replaced[key]
                return
        self._miss(key[0], kind)

    def missed(self, now: int) -> int:
        """As :meth:`dsprobe.probes.ledger.Ledger.missed`."""
        late = [(k, w) for k, v in self._replaced.items() for w in v if w[1] < now - PATIENCE]
        for key, which in late:
            self._replaced[key].remove(which)
            if not self._replaced[key]:
                del self._replaced[key]
        return len(late)

    def _settle(self, key: Key, physical: Block) -> None:
        if physical.handles <= 0 and physical.maps <= 0:
            del self._blocks[key]
            self._done.append((key[0], physical))

    def _unmap(self, process: int, start: int, end: int, t: int) -> bool:
        mapped = self._mapped.get(process, set())
        found = [a for a in mapped if start <= a < end
                 and self._blocks[process, MAPPED, a].born < t]  # fmt: skip
        for address in found:
            mapped.remove(address)
            block = self._blocks.pop((process, MAPPED, address))
            self._done.append((process, block))
            key = process, PHYSICAL, block.handle
            if physical := self._blocks.get(key):
                physical.maps -= 1
                self._settle(key, physical)
        return bool(found)

    def blocks(self) -> npt.NDArray[Any]:
        """All of them (:data:`~dsprobe.probes.blocktable.BLOCK`)."""
        rows = [(k[2], b.bytes, b.born, k[0], b.context, b.stack, b.kind, k[1])
                for k, b in self._blocks.items()]  # fmt: skip
        return np.array(rows, BLOCK)

    def forget(self, processes: set[int], contexts: set[int]) -> None:
        """As :meth:`dsprobe.probes.ledger.Ledger.forget`."""
        for key in [k for k, b in self._blocks.items()
                    if k[0] in processes or b.context in contexts]:  # fmt: skip
            del self._blocks[key]
        for process in processes:
            self._mapped.pop(process, None)
        self.placeless = {k: v for k, v in self.placeless.items()
                          if k[0] not in processes and k[1] not in contexts}  # fmt: skip
        self._replaced = {k: v for k, v in self._replaced.items() if k[0] not in processes}
        if self._backlog:
            self._backlog = deque(e for e in self._backlog if e[4] not in processes)
