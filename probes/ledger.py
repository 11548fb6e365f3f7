"""Live blocks for which the kernel's tables had no room, kept here instead.

The kernel has counted a block in before it comes here (blocks.bpf.h), so what is kept is where the
block belongs, and what has gone since: :meth:`Ledger.gone` are sums to add to the kernel's.  What
comes at once is dealt with at once, in numpy; virtual memory, of which little comes, is a loop of
its own with a limit on its time (:mod:`dsprobe.probes.vmmledger`).
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from dsprobe.probes.blocktable import BLOCK, BlockTable
from dsprobe.probes.latefrees import LateFrees
from dsprobe.probes.sums import summed
from dsprobe.probes.vmmledger import VmmLedger
from dsprobe.recordings.cudastreams import MEMORY_KINDS
from dsprobe.recordings.model import Field, Rows, Stream

ADD, FREE, DROP, RETAIN, MAP, UNMAP, RANGE, REST = range(8)  # enum memory_entry
PHYSICAL, MAPPED = MEMORY_KINDS.index("physical"), MEMORY_KINDS.index("mapped")
SWEPT = 1 << 15
"""Places looked at in one collection for blocks of what has ended."""

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
_UNKNOWN = np.dtype([("process", "<u4"), ("kind", "<u4")])
_NEVER = np.uint64(2**64 - 1)

Array = npt.NDArray[Any]
Sums = npt.NDArray[np.uint64]


class Ledger:
    """Up to ``size`` blocks, and a sixteenth of that of virtual memory; what finds no room stays
    live, and nothing is known of its free."""

    def __init__(self, size: int = 1 << 21) -> None:
        self.vmm = VmmLedger(max(size >> 4, min(size, 64)), self._count_out, self._miss)
        self._table = BlockTable(size)
        self._late = LateFrees()
        self._placeless: dict[tuple[int, int], tuple[int, int]] = {}
        """Blocks that found no room by process and context, and their bytes."""
        self._lost = 0
        self._gone = np.empty(0, _GONE), np.empty((0, 3), np.uint64)
        self._new: list[tuple[Array, Sums]] = []
        """To be added to that."""
        self._unknown: dict[tuple[int, int], int] = {}
        self._over: set[int] = set()
        """Processes and contexts that have ended; their numbers are of one sequence."""
        self._swept = self._table.end
        """Of these there is nothing at places before this."""
        self._last: set[int] = set()
        """Numbers to be dropped from ``_over`` when everything was looked at."""

    def __len__(self) -> int:
        return len(self._table) + len(self.vmm)

    def take(self, rows: Rows) -> None:
        """Entries of the ring, in their order."""
        if self._over:
            over = list(self._over)
            rows = rows[~(np.isin(rows["process"], over) | np.isin(rows["context"], over))]
        virtual = (rows["kind"] == PHYSICAL) | (rows["kind"] == MAPPED)
        self.vmm.take(rows[virtual])
        rows = rows[~virtual]
        blocks = np.zeros(len(rows), BLOCK)
        for name in ("address", "bytes", "process", "context", "stack", "kind"):
            blocks[name] = rows[name]
        blocks["born"] = rows["t"]
        blocks["space"] = np.where(rows["kind"] > MAPPED, rows["kind"], 0)
        if len(rows):
            self._take(blocks, rows["entry"] == ADD)

    def _take(self, blocks: Array, adds: npt.NDArray[np.bool_]) -> None:
        """Blocks to add, and, where not ``adds``, frees that began when those were "born"."""
        where = blocks["process"].astype(np.uint64) << np.uint64(16) | blocks["space"]
        order = np.lexsort((blocks["address"], where))
        blocks, adds, where = blocks[order], adds[order], where[order]
        t, at, address = blocks["born"], np.arange(len(blocks)), blocks["address"]
        first = np.r_[True, (where[1:] != where[:-1]) | (address[1:] != address[:-1])]
        group, starts = np.cumsum(first) - 1, np.flatnonzero(first)
        place, old = self._known(blocks[starts])
        # Whose turn it is at each entry: the last one added before it, or else the old one.
        latest = np.maximum.accumulate(np.where(adds, at, -1))
        latest[latest < starts[group]] = -1
        born = np.where(latest >= 0, t[latest], np.where(place > 0, old["born"], _NEVER)[group])
        fits = np.flatnonzero(~adds & (t > born))
        owner = np.where(latest[fits] >= 0, latest[fits], -1 - group[fits])
        frees = np.r_[True, owner[1:] != owner[:-1]] if len(fits) else np.zeros(0, bool)
        owner = owner[frees]
        freed, old_freed = np.zeros(len(blocks), bool), np.zeros(len(starts), bool)
        freed[owner[owner >= 0]] = True
        old_freed[-1 - owner[owner < 0]] = True
        # An address that is given again while it has a block.
        ends = np.r_[starts[1:], len(blocks)] - 1
        following = np.flatnonzero(adds & ~first)
        before = latest[following - 1]
        again = following[(before >= 0) & ~freed[before]]
        replaced = latest[again - 1]
        first_add = np.full(len(starts), len(blocks))
        first_add[group[adds][::-1]] = at[adds][::-1]  # the last that is assigned stays
        renewed = (place > 0) & ~old_freed & (first_add < len(blocks))
        self._late.replaced(
            np.concatenate([blocks[replaced], old[renewed]]),
            np.concatenate([t[again], t[first_add[renewed]]]),
        )
        done = old_freed | renewed
        self._count_out(np.concatenate([blocks[freed], blocks[replaced], old[done]]))
        if done.any():
            self._table.remove(place[done])
        stay = latest[ends]
        stay = stay[stay >= 0]
        stay = stay[~freed[stay]]
        room = self._table.add(blocks[stay])
        self._find_no_place(blocks[stay[room:]])
        late = ~adds
        late[fits[frees]] = False
        odd = blocks[late]
        odd = odd[self._late.unknown(odd, odd["born"])]
        of = odd["process"].astype(np.int64) << 8 | odd["kind"]
        for key, n in zip(*map(np.ndarray.tolist, np.unique(of, return_counts=True)), strict=True):
            self._miss(key >> 8, key & 255, n)

    def _known(self, keys: Array) -> tuple[npt.NDArray[np.int64], Array]:
        """Places of these (0: not here), and what is there."""
        place = self._table.find(keys)
        old = np.zeros(len(keys), BLOCK)
        old[place > 0] = self._table.blocks(place[place > 0])
        if self._over:
            ended = (place > 0) & np.isin(old["context"], list(self._over))
            if ended.any():
                self._table.remove(place[ended])
                place[ended] = 0
        return place, old

    def _find_no_place(self, blocks: Array) -> None:
        if not len(blocks):
            return
        self._lost += len(blocks)
        owner = blocks["process"].astype(np.uint64) << np.uint64(32) | blocks["context"]
        sizes = np.stack([np.ones(len(blocks), np.uint64), blocks["bytes"]], axis=1)
        for key, (n, size) in zip(*(x.tolist() for x in summed(owner, sizes)), strict=True):
            blocks_, bytes_ = self._placeless.get((key >> 32, key & 0xFFFFFFFF), (0, 0))
            self._placeless[key >> 32, key & 0xFFFFFFFF] = blocks_ + n, bytes_ + size

    @property
    def lost(self) -> int:
        """How many blocks found no place here since the beginning."""
        return self._lost + self.vmm.refused

    def placeless(self) -> dict[int, tuple[int, int]]:
        """How many live blocks of each process found no place here, and their bytes."""
        found: dict[int, tuple[int, int]] = {}
        for held in (self._placeless, self.vmm.placeless):
            for (process, _), (n, size) in held.items():
                blocks, more = found.get(process, (0, 0))
                found[process] = blocks + n, more + size
        return found

    def missed(self, now: int) -> int:
        """Blocks that were replaced some time before ``now`` by others with the same address, and
        whose free has not come since; each is told once."""
        return self._late.missed(now) + self.vmm.missed(now)

    def _count_out(self, blocks: Array) -> None:
        if len(blocks):
            keys = np.empty(len(blocks), _GONE)
            for name in ("process", "context", "stack", "kind"):
                keys[name] = blocks[name]
            born = np.uint64(0) - (blocks["born"] >> np.uint64(20))
            ones = np.ones(len(blocks), np.uint64)
            self._new.append(_summed(keys, np.stack([ones, blocks["bytes"], born], axis=1)))

    def _miss(self, process: int, kind: int, n: int = 1) -> None:
        self._unknown[process, kind] = self._unknown.get((process, kind), 0) + n

    def gone(self) -> tuple[Array, Sums]:
        """(process, context, stack, kind) and (frees, bytes freed, change of the sum of births) of
        what was freed from here, since the beginning."""
        if self._new:
            keys, sums = zip(self._gone, *self._new, strict=True)
            self._gone = _summed(np.concatenate(keys), np.concatenate(sums))
            self._new = []
        return self._gone

    def unknown(self) -> tuple[Array, Sums]:
        """(process, kind) and how many frees of blocks that nobody knows."""
        counts = np.array(list(self._unknown.values()), np.uint64)
        return np.array(list(self._unknown), _UNKNOWN), counts.reshape(-1, 1)

    def blocks(self, start: int, stop: int) -> tuple[Array, bool]:
        """What is at places from ``start`` to ``stop`` (:data:`~dsprobe.probes.blocktable.BLOCK`),
        and whether there are none beyond; virtual memory is at the first."""
        found = self._table.blocks(self._table.occupied(max(start, 1), stop))
        if self._over:
            over = list(self._over)
            found = found[~(np.isin(found["process"], over) | np.isin(found["context"], over))]
        if start == 0:
            found = np.concatenate([found, self.vmm.blocks()])
        return found, stop >= self._table.end

    # -- what is over -------------------------------------------------------------------------

    def forget(self, processes: set[int], contexts: set[int]) -> None:
        """Drop what belongs to processes and contexts that have ended, now and from now on."""
        self._over |= processes | contexts
        self._swept = 1
        self.vmm.forget(processes, contexts)
        self._late.forget(processes)
        keys, sums = self.gone()
        left = ~np.isin(keys["process"], list(processes))
        left &= ~np.isin(keys["context"], list(contexts))
        self._gone = keys[left], sums[left]
        self._unknown = {k: v for k, v in self._unknown.items() if k[0] not in processes}
        self._placeless = {k: v for k, v in self._placeless.items()
                           if k[0] not in processes and k[1] not in contexts}  # fmt: skip
        self.go_on()

    def go_on(self) -> None:
        """Do more of what takes long: to be called at each collection."""
        self.vmm.go_on()
        if self._swept < self._table.end:
            places = self._table.occupied(self._swept, self._swept + SWEPT)
            blocks, over = self._table.blocks(places), list(self._over)
            ended = np.isin(blocks["process"], over) | np.isin(blocks["context"], over)
            if ended.any():
                self._table.remove(places[ended])
            self._swept = min(self._swept + SWEPT, self._table.end)
        if self._swept >= self._table.end:
            self._over -= self._last
            self._last = set()

    def over(self, processes: set[int], contexts: set[int]) -> None:
        """Nothing of these can come any more."""
        self._last |= processes | contexts
        self.go_on()


def _summed(keys: Array, sums: Sums) -> tuple[Array, Sums]:
    """One row for each key."""
    words = keys.view("<u8").reshape(len(keys), 2)
    order = np.lexsort((words[:, 0], words[:, 1]))
    words, sums = words[order], sums[order]
    first = np.flatnonzero(np.r_[True, (words[1:] != words[:-1]).any(axis=1)])
    keys = words.view(_GONE).reshape(-1)
    return keys[first], np.add.reduceat(sums, first, axis=0)
