"""Memory allocated through the CUDA driver: what is live, by kind, by stack and by age; exact.

The kernel keeps the books (blocks.bpf.h, contexts.bpf.h, vmm.bpf.h): sums that only grow, which are
read here and told where they changed.  What its table of blocks has no room for is kept here
(:mod:`dsprobe.probes.ledger`).  A context that has ended takes its memory along: its sums are then
read as if all of it had been freed, and its blocks are taken out of the table bit by bit.

Source: CUDA driver API reference, "Memory Management", "Virtual Memory Management", "Stream Ordered
Memory Allocator", "Context Management", "Primary Context Management".
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt

from dsprobe.probes import cudamaps
from dsprobe.probes.btf import Btf
from dsprobe.probes.cuda import Cuda
from dsprobe.probes.cudamaps import Places
from dsprobe.probes.functions import Class
from dsprobe.probes.hashmap import HashMap
from dsprobe.probes.ledger import ENTRIES, Ledger
from dsprobe.probes.mappedmemory import MappedMemory
from dsprobe.probes.maps import MappedArray
from dsprobe.probes.memorywalk import MemoryWalk
from dsprobe.probes.probe import Batch, BpfProbe, Loss, Map, Program
from dsprobe.probes.sums import Keys, Sums, Told, summed, wide, words
from dsprobe.recordings.cudastreams import ALLOC_OPS, GPU_AGE, GPU_ALLOC, GPU_MEMORY, GPU_STACK
from dsprobe.recordings.model import Rows

SECOND = 10**9
STACKS_EVERY, LIVE_EVERY = SECOND, 10 * SECOND
SLACK = SECOND // 10
"""By so much a tick may come early."""

_SUM = [(n, "<u8") for n in ("frees", "freed", "allocs", "allocated", "born")]
_TOTAL_KEY = np.dtype([("process", "<u4"), ("context", "<u4"), ("kind", "<u4"), ("pad", "<u4")])
_TOTAL = np.dtype([*_SUM, ("bare", np.dtype(_SUM)),
                   *((n, "<u8") for n in ("failed", "unknown", "shed", "placeless",
                                          "without"))])  # fmt: skip
_STACK_KEY = np.dtype([(n, "<u4") for n in ("process", "context", "stack", "kind")])
_END = np.dtype([("t", "<u8"), ("handle", "<u8"), ("process", "<u4"), ("thread", "<u4"),
                 ("function", "<u4"), ("pad", "<u4")])  # fmt: skip
"""``placeless`` blocks, of ``without`` bytes, are in no table."""
FREES, FREED, ALLOCS, ALLOCATED, BORN, FAILED, UNKNOWN, SHED, RECLAIMED, RECLAIMED_BYTES = range(10)
"""Columns of sums; those of stacks end with BORN."""
_KINDS = [*range(5), *range(10, 13)]
"""Words of a total that make these columns up to SHED."""
_COLUMNS = (("allocs", ALLOCS), ("frees", FREES), ("allocated", ALLOCATED), ("freed", FREED))
_CALLS = (("failed", FAILED), ("unknown", UNKNOWN), ("shed", SHED), ("reclaimed", RECLAIMED),
          ("reclaimed_bytes", RECLAIMED_BYTES))  # fmt: skip
NOTE_OVERFLOWED, NOTE_BARE, NOTE_PLACELESS, NOTE_REPLACED, NOTE_UNSURE, NOTE_UNTOLD = range(6)
_LOST = (
    None,
    ("gpu.stack", "no room for another stack: its memory is that of stack 0"),
    ("gpu.memory", "blocks without a place: they stay live, their frees cannot be told"),
    ("gpu.memory", "frees that were not seen"),
    ("gpu.memory", "contexts that may have ended"),
    ("gpu.memory", "calls on blocks outside the kernel's table: too many at once"),
    ("gpu.memory", "no room for another process, context and kind"),
)
"""In the order of ``enum memory_note``; what overflows is not lost."""


Array = npt.NDArray[Any]


class Memory(BpfProbe):
    """The numbers are sizes of the kernel's tables, ``kept`` that of the table of what overflows
    them."""

    name = "memory"
    doc = "memory allocated through the CUDA driver: live bytes by kind, stack and age"
    requires = (Cuda,)
    streams = (GPU_ALLOC, GPU_MEMORY, GPU_STACK, GPU_AGE)
    source = "memory.bpf.c"
    programs = (
        Program("memory_alloc_begin", "uprobe"),
        Program("memory_alloc_return", "uretprobe"),
        Program("memory_allocated", "tail", "stack_users[1]"),
        Program("memory_free_begin", "uprobe"),
        Program("memory_unmap", "tail", "memory_programs[0]"),
        Program("memory_free_return", "uretprobe"),
        Program("memory_unmapped", "tail", "memory_programs[1]"),
        Program("context_begin", "uprobe"),
        Program("context_return", "uretprobe"),
    )
    rings: ClassVar = {"memory_ledger": ENTRIES, "memory_alloc": GPU_ALLOC}

    def __init__(
        self, blocks: int = 1 << 20, vmm: int = 1 << 18, stacks: int = 1 << 17, totals: int = 4096,
        kept: int = 1 << 21,
    ) -> None:  # fmt: skip
        self._sizes = {"MEMORY_BLOCKS": blocks, "MEMORY_VMM": vmm, "MEMORY_STACKS": stacks,
                       "MEMORY_TOTALS": totals}  # fmt: skip
        self.ledger = Ledger(kept)
        self._memory, self._told_stacks = Told(10), Told(5)
        self._ended: dict[int, Any] = {}
        """Contexts that have ended and may have blocks in the tables, by number: context_end."""
        self._gone: set[int] = set()
        """Processes of which that is so."""
        self._retired_kinds: list[Any] = [np.empty(0, np.uint64), np.empty((0, 10), np.uint64)]
        self._retired_stacks: list[Any] = [np.empty(0, np.uint64), np.empty((0, 5), np.uint64)]
        """Keys and sums of contexts that ended before those."""
        self._last = self._short_until = self._missed = 0
        self._placeless: dict[int, tuple[int, int]] = {}
        """Blocks that are in no table, by process, and their bytes."""
        self._next_stacks = 0

    def build_on(self, required: BpfProbe) -> None:
        assert isinstance(required, Cuda)
        self._cuda = required
        required.serves |= {
            Class.ALLOC: ("memory_alloc_begin", "memory_alloc_return"),
            Class.FREE: ("memory_free_begin", "memory_free_return"),
            Class.CONTEXT: ("context_begin", "context_return"),
        }

    def defines(self, btf: Btf | None) -> Mapping[str, int]:
        return self._sizes | {"CUINIT_SLOT": Cuda.INIT_SLOT}

    def open(self, maps: Mapping[str, Map]) -> None:
        self._notes = MappedArray(maps["memory_notes"], cudamaps.NUMBER).live
        self._noted = self._notes.copy()
        self._procs = Places(
            maps, "cuda_procs", cudamaps.PROCESS, cudamaps.NEXT_PROC, "cuda_free_procs"
        )
        self._totals_map = HashMap(maps["memory_totals"], _TOTAL_KEY, _TOTAL)
        self._stacks_map = HashMap(maps["memory_stacks"], _STACK_KEY, _SUM)
        self._ends_map = HashMap(maps["contexts_ended"], "<u4", _END)
        self._walk = MemoryWalk(maps, self.ledger)
        self.ledger.vmm.mappings = MappedMemory(maps)

    @property
    def shortage(self) -> str:
        said = []
        if len(self.ledger) or self._last < self._short_until:
            said.append("more is live than the kernel's table holds: the rest is kept outside it")
        if self._notes[NOTE_BARE]:
            said.append("the kernel's table of stacks is full: more memory is under stack 0")
        pids = {p: str(self._cuda.processes[p].pid) for p in self._placeless
                if p in self._cuda.processes}  # fmt: skip
        if pids:
            blocks, size = (sum(self._placeless[p][i] for p in pids) for i in (0, 1))
            said.append(
                f"{_about(blocks)} blocks of {_about(size)} bytes of process"
                f" {', '.join(pids.values())} found no place: they count as live until it ends, as"
                " their frees cannot be told"
            )
        return "; ".join(said)

    def took(self, ring: str, rows: Rows) -> list[Batch]:
        if ring == "memory_alloc":
            return [(GPU_ALLOC, rows)]
        self.ledger.take(rows)
        return []

    def collect(self, now: int) -> list[Batch]:
        start, self._last = self._last or now, now
        self.ledger.go_on()
        if len(self.ledger):
            self._short_until = now + LIVE_EVERY
        # Who lives is read last: whoever is in the sums lives then, or has ended.
        due = now >= self._next_stacks
        stacks = self._stacks_map.read() if due else None
        totals = self._totals_map.read()
        self._find_placeless(*totals)
        ends = self._ends_map.read()
        processes = self._procs.live
        living = processes["id"][processes["ended"] == 0]
        batches = [(GPU_ALLOC, self._released(totals, ends))]
        keys, sums = self._by_kind(*totals)
        dead = np.setdiff1d(keys >> np.uint64(8), living.astype(np.uint64))
        batches.append((GPU_MEMORY, self._tell_memory(keys, sums, dead, start, now)))
        if stacks is None and len(dead):
            stacks = self._stacks_map.read()
        if stacks is not None:
            keys, sums = self._by_stack(*stacks, *totals)
            batches.append((GPU_STACK, self._tell_stacks(keys, sums, dead, start, now, due)))
            self._bury(dead, totals[0], stacks[0])
        if due:
            self._next_stacks = now + STACKS_EVERY - SLACK
        batches.append((GPU_AGE, self._walk.step(now, self._gone, self._ended)))
        if self._walk.swept:
            self._retire(*self._walk.swept)
        return [(stream, rows) for stream, rows in batches if len(rows)]

    def losses(self) -> list[Loss]:
        notes = self._notes.copy()
        notes[NOTE_PLACELESS] += self.ledger.lost
        notes[NOTE_UNTOLD] += self.ledger.vmm.lost
        self._missed += self.ledger.missed(self._last)
        notes[NOTE_REPLACED] += self._missed
        new, self._noted = notes - self._noted, notes
        return [Loss(*said, int(n)) for said, n in zip(_LOST, new, strict=False) if said and n]

    # -- what the kernel counts, with what is kept here -------------------------------------------

    def _by_kind(self, keys: Array, totals: Array) -> tuple[Keys, Sums]:
        """Sums by process << 8 | kind."""
        sums = _with_reclaimed(words(totals)[:, _KINDS])
        self._end(sums, keys["context"])
        gone_keys, gone = self.ledger.gone()
        unknown_keys, unknown = self.ledger.unknown()
        return summed(
            np.concatenate([
                _kind_key(keys["process"], keys["kind"]), self._retired_kinds[0],
                _kind_key(gone_keys["process"], gone_keys["kind"]),
                _kind_key(unknown_keys["process"], unknown_keys["kind"]),
            ]),
            np.concatenate([sums, self._retired_kinds[1], wide(gone, 10, (FREES, FREED, BORN)),
                            wide(unknown, 10, (UNKNOWN,))]),
        )  # fmt: skip

    def _by_stack(
        self, keys: Array, stacks: Array, total_keys: Array, totals: Array
    ) -> tuple[Keys, Sums]:
        """Sums by process << 36 | kind << 32 | stack."""
        sums, bare = words(stacks), words(totals)[:, 5:10].copy()
        self._end(sums, keys["context"])
        self._end(bare, total_keys["context"])
        some = bare[:, ALLOCS] != 0
        gone_keys, gone = self.ledger.gone()
        return summed(
            np.concatenate([
                _stack_key(keys), self._retired_stacks[0], _stack_key(gone_keys),
                _stack_key(total_keys[some], bare=True),
            ]),
            np.concatenate([sums, self._retired_stacks[1], wide(gone, 5, (FREES, FREED, BORN)),
                            bare[some]]),
        )  # fmt: skip

    def _find_placeless(self, keys: Array, totals: Array) -> None:
        here = self.ledger.placeless()
        some = (totals["placeless"] != 0) & ~np.isin(keys["context"], list(self._ended))
        for key, total in zip(keys[some], totals[some], strict=True):
            n, size = here.get(int(key["process"]), (0, 0))
            here[int(key["process"])] = n + int(total["placeless"]), size + int(total["without"])
        self._placeless = here

    def _end(self, sums: Sums, contexts: Array) -> None:
        """What was allocated in contexts that have ended has gone with them."""
        if self._ended:
            _gone(sums, np.isin(contexts, list(self._ended)))

    # -- rows -------------------------------------------------------------------------------------

    def _released(self, totals: tuple[Array, Array], ends: tuple[Array, Array]) -> Rows:
        """Take note of contexts that have ended: what they held, by kind."""
        new = {int(n): e for n, e in zip(*ends, strict=True) if int(n) not in self._ended}
        if not new:
            return GPU_ALLOC.empty()
        self._ended |= new
        self.ledger.forget(set(), set(new))
        keys, sums = totals
        held = (sums["allocated"] > sums["freed"]) & np.isin(keys["context"], list(new))
        rows = GPU_ALLOC.empty(int(held.sum()))
        for row, key, value in zip(rows, keys[held], sums[held], strict=True):
            end = new[int(key["context"])]
            for name in ("t", "process", "thread", "function"):
                row[name] = end[name]
            row["address"], row["kind"] = end["handle"], key["kind"]
            row["op"] = ALLOC_OPS.index("release")
            row["bytes"] = value["allocated"] - value["freed"]
        return rows

    def _tell_memory(self, keys: Keys, sums: Sums, dead: Keys, start: int, now: int) -> Rows:
        ended = np.isin(keys >> np.uint64(8), dead)
        _gone(sums, ended)
        place, told, t = self._memory.since(keys, start)
        # Taken back where it turns out that two threads were freeing the same block.
        sums[:, UNKNOWN] = np.maximum(sums[:, UNKNOWN], told[:, UNKNOWN])
        # A free that was under way when its context or process ended.
        reclaimed = slice(RECLAIMED, RECLAIMED_BYTES + 1)
        sums[:, reclaimed] = np.maximum(sums[:, reclaimed], told[:, reclaimed])
        say = (sums != told).any(axis=1) | (now - t >= STACKS_EVERY - SLACK) | ended
        new = (sums - told)[say]
        rows = GPU_MEMORY.empty(len(new))
        rows["t"], rows["dt"] = now, now - t[say]
        rows["process"], rows["kind"] = keys[say] >> np.uint64(8), keys[say] & np.uint64(0xFF)
        rows["live"], rows["blocks"] = _live(sums[say])
        for name, column in (*_COLUMNS, *_CALLS):
            rows[name] = new[:, column]
        self._memory.tell(place[say], sums[say], now)
        self._memory.forget(np.isin(self._memory.keys >> np.uint64(8), dead))
        return rows

    def _tell_stacks(
        self, keys: Keys, sums: Sums, dead: Keys, start: int, now: int, due: bool
    ) -> Rows:
        """Of all processes where that is ``due``, else of those that have ended."""
        ended = np.isin(keys >> np.uint64(36), dead)
        _gone(sums, ended)
        place, told, t = self._told_stacks.since(keys, start)
        live, blocks = _live(sums)
        say = (sums != told).any(axis=1) | ((now - t >= LIVE_EVERY - SLACK) & (blocks > 0))
        say &= due | ended
        new = (sums - told)[say]
        rows = GPU_STACK.empty(len(new))
        rows["t"], rows["dt"] = now, now - t[say]
        rows["process"] = keys[say] >> np.uint64(36)
        rows["kind"] = keys[say] >> np.uint64(32) & np.uint64(15)
        rows["stack"] = keys[say] & np.uint64(0xFFFFFFFF)
        rows["live"], rows["blocks"] = live[say], blocks[say]
        for name, column in _COLUMNS:
            rows[name] = new[:, column]
        born = sums[say, BORN] // np.maximum(blocks[say], 1) << np.uint64(20)
        rows["born"] = np.where(blocks[say] > 0, born, 0)
        self._told_stacks.tell(place[say], sums[say], now)
        self._told_stacks.forget(np.isin(self._told_stacks.keys >> np.uint64(36), dead))
        return rows

    # -- what is over -----------------------------------------------------------------------------

    def _bury(self, dead: Keys, total_keys: Array, stack_keys: Array) -> None:
        """The last of these processes has been told."""
        if not len(dead):
            return
        self._totals_map.delete(total_keys[np.isin(total_keys["process"], dead)])
        self._stacks_map.delete(stack_keys[np.isin(stack_keys["process"], dead)])
        for retired, shift in ((self._retired_kinds, 8), (self._retired_stacks, 36)):
            left = ~np.isin(retired[0] >> np.uint64(shift), dead)
            retired[:] = [retired[0][left], retired[1][left]]
        gone = set(dead.tolist())
        self._gone |= gone
        self.ledger.forget(gone, set())

    def _retire(self, processes: set[int], contexts: set[int]) -> None:
        """No block of these is in the tables any more."""
        self._gone -= processes
        self.ledger.over(processes, contexts)
        if not contexts:
            return
        numbers = list(contexts)
        keys, sums = self._totals_map.read()
        these = np.isin(keys["context"], numbers)
        kinds = _with_reclaimed(words(sums[these])[:, _KINDS])
        bare = words(sums[these])[:, 5:10]
        stack_keys, stacks = self._stacks_map.read()
        those = np.isin(stack_keys["context"], numbers)
        stacks = words(stacks[those])
        for gone in (kinds, bare, stacks):
            _gone(gone, np.ones(len(gone), bool))
        _append(self._retired_kinds, _kind_key(keys[these]["process"], keys[these]["kind"]), kinds)
        _append(self._retired_stacks, _stack_key(stack_keys[those]), stacks)
        _append(self._retired_stacks, _stack_key(keys[these], bare=True), bare)
        self._totals_map.delete(keys[these])
        self._stacks_map.delete(stack_keys[those])
        self._ends_map.delete(np.array(numbers, "<u4"))
        for number in numbers:
            self._ended.pop(number, None)


def _about(n: int) -> str:
    """Its first two digits, so that a sentence does not change all the time."""
    unit = 10 ** max(0, len(str(n)) - 2)
    return f"{n // unit * unit:,}" + ("" if unit == 1 else " or more")


def _kind_key(process: Array, kind: Array) -> Keys:
    return process.astype(np.uint64) << np.uint64(8) | kind


def _stack_key(keys: Array, bare: bool = False) -> Keys:
    stack = np.uint64(0) if bare else keys["stack"]
    kind = keys["kind"].astype(np.uint64) << np.uint64(32)
    return keys["process"].astype(np.uint64) << np.uint64(36) | kind | stack


def _with_reclaimed(sums: Sums) -> Sums:
    return np.pad(sums, ((0, 0), (0, 2)))


def _gone(sums: Sums, these: npt.NDArray[np.bool_]) -> None:
    """Have all of it been freed, in place; and reclaimed, where that is counted."""
    if sums.shape[1] > RECLAIMED:
        live, blocks = _live(sums[these])
        sums[these, RECLAIMED] += blocks
        sums[these, RECLAIMED_BYTES] += live
    sums[these, FREES], sums[these, FREED] = sums[these, ALLOCS], sums[these, ALLOCATED]
    sums[these, BORN] = 0


def _live(sums: Sums) -> tuple[Sums, Sums]:
    """Bytes and blocks; what is read while it changes may be ahead of itself by one."""
    live = (sums[:, ALLOCATED] - sums[:, FREED]).astype(np.int64)
    blocks = (sums[:, ALLOCS] - sums[:, FREES]).astype(np.int64)
    return np.maximum(live, 0).astype(np.uint64), np.maximum(blocks, 0).astype(np.uint64)


def _append(to: list[Any], keys: Keys, sums: Sums) -> None:
    to[:] = summed(np.concatenate([to[0], keys]), np.concatenate([to[1], sums]))
