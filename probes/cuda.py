"""Processes that use CUDA: who they are, what they call, how often and for how long.

The base of the probes that trace calls of the driver library: it gives processes and threads their
numbers, knows the traced functions, and counts their calls (cuda.bpf.h).  A library is attached to
when somebody maps it; :meth:`Cuda.library` says with what.
"""

from __future__ import annotations

import platform
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt

from dsprobe.probes import cudamaps, functions, opencalls, processes
from dsprobe.probes.btf import Btf, BtfError
from dsprobe.probes.cudamaps import Places
from dsprobe.probes.driver import Driver
from dsprobe.probes.functions import Class, Flag, Function
from dsprobe.probes.hashmap import HashMap
from dsprobe.probes.maps import MappedArray
from dsprobe.probes.native.symbolizer import Symbolizer
from dsprobe.probes.probe import (
    Batch,
    BpfProbe,
    Loss,
    Map,
    Program,
    Unavailable,
    Uprobe,
    need_btf,
)  # fmt: skip
from dsprobe.probes.stacks import Stacks
from dsprobe.recordings.cudastreams import (
    CUDA_CALLS,
    META_FRAME,
    META_PLACEMENT,
    META_PROCESS,
    META_STACK,
    META_THREAD,
)
from dsprobe.recordings.model import Field, Rows, Stream
from dsprobe.recordings.streams import META_STRING

_SEEN = Stream("cuda.seen", "A process has come or gone.", "cuda.bpf.h",
               (Field("t", "<u8", "ns", "CLOCK_MONOTONIC"),))  # fmt: skip
_LOST = (
    ("cuda.calls", "no room for another process"),
    ("cuda.calls", "no room for another thread"),
    ("cuda.calls", "no room for another function's counters"),
    ("cuda.call", "more than four calls open in one thread: the outer ones are given up"),
    ("cuda.stream", "no room for another stream"),
    ("meta.kernel", "no room for another kernel"),
    ("meta.kernel", "a name could not be read"),
)
"""In the order of ``enum cuda_lost_why``."""

SLOW_NS = 1_000_000
BUDGET = 20_000
"""Single events per second and process: launches, calls and allocations each."""
_WINDOW_NS = 1 << 27
AT_ONCE = 0.05
"""So many seconds are spent at once on getting to know new processes; the rest has its turn."""
FREED = 1000
"""Places of threads given back in one collection: each takes a system call."""


@dataclass
class _Process:
    """``place`` in cuda_procs; ``pid`` on the host; ``leaving``: the next collection forgets it."""

    id: int
    pid: int
    place: int
    row: Rows
    leaving: bool = False
    threads: set[int] = field(default_factory=set)


class Cuda(BpfProbe):
    name = "cuda"
    doc = "processes that use CUDA, and their calls of the driver: counts, time, bytes"
    module = "cuda"
    streams = (CUDA_CALLS, META_PROCESS, META_THREAD, META_STRING, META_STACK, META_FRAME)
    source = "cuda.bpf.c"
    programs = (
        Program("cuda_exit", "raw_tracepoint", "sched_process_exit"),
        Program("cuda_exec", "raw_tracepoint", "sched_process_exec"),
        Program("cuda_fork", "raw_tracepoint", "sched_process_fork"),
        Program("stack_walked", "tail", "stack_programs[0]", False, "there are no stacks"),
        Program("stack_first_sight", "tail", "stack_programs[1]", False, "stacks are lost"),
        Program("stack_send", "tail", "stack_programs[2]", False, "stacks are lost"),
    )
    rings: ClassVar = {"cuda_seen": _SEEN, **Stacks.rings}
    INIT_SLOT: ClassVar[int] = 0
    """Slot of cuInit: a process that has a cell there was seen from its beginning on."""

    def __init__(self) -> None:
        self.serves: dict[Class, tuple[str, str]] = {}
        """Programs for entry and return ("": none) of functions, by class; set by the probes that
        build on this one."""
        self.stacks = Stacks(Symbolizer())
        self.processes: dict[int, _Process] = {}
        self._met: dict[int, tuple[int, bool]] = {}  # by id: place, leaving
        self._strings: dict[str, int] = {}
        self._slots: dict[str, int] = {"cuInit": self.INIT_SLOT}
        self._functions: dict[int, Function] = {}  # by string id
        self._free_rows: list[int] = []
        self._rows: dict[tuple[int, ...], int] = {}  # of cuda_functions, by what is in it
        self._drivers: dict[int, Driver] = {}
        self._pending: list[Batch] = []

    def close(self) -> None:
        self.stacks.close()

    def defines(self, btf: Btf | None) -> Mapping[str, int]:
        if platform.machine() != "x86_64":
            raise Unavailable(f"driver calls are traced on x86_64, not on {platform.machine()}")
        btf = need_btf(btf)
        found = {
            **self.stacks.defines(btf),
            "TASK_THREAD_PID": btf.offset("task_struct", "thread_pid"),
            "TASK_GROUP_LEADER": btf.offset("task_struct", "group_leader"),
            "TASK_SIGNAL": btf.offset("task_struct", "signal"),
            "TASK_MM": btf.offset("task_struct", "mm"),
            "SIGNAL_LIVE": btf.offset("signal_struct", "live.counter"),
            "PID_LEVEL": btf.offset("pid", "level"),
            "PID_NUMBERS": btf.offset("pid", "numbers"),
            "UPID_SIZE": 16,  # struct upid {int nr; struct pid_namespace *ns;}
        }
        try:
            found["MM_XOL_AREA"] = btf.offset("mm_struct", "uprobes_state.xol_area")
            found["XOL_VADDR"] = btf.offset("xol_area", "vaddr")
        except BtfError:
            pass  # then a call that a call jumps to counts as one of its own
        return found

    def open(self, maps: Mapping[str, Map]) -> None:
        self.stacks.open(maps)
        self._wanted = HashMap(maps["cuda_wanted"], "<u4", "<u4")
        self._cells_of = HashMap(maps["cuda_cells_of"], "<u8", "<u4")
        self._procs = Places(
            maps, "cuda_procs", cudamaps.PROCESS, cudamaps.NEXT_PROC, "cuda_free_procs"
        )
        self.threads = Places(
            maps, "cuda_threads", cudamaps.THREAD, cudamaps.NEXT_THREAD, "cuda_free_threads"
        )
        self._cells = Places(
            maps, "cuda_cells", cudamaps.CELL, cudamaps.NEXT_CELL, "cuda_free_cells"
        )
        self._table = MappedArray(maps["cuda_functions"], cudamaps.FUNCTION).live
        self.config = MappedArray(maps["cuda_config"], cudamaps.CONFIG).live
        self._lost = MappedArray(maps["cuda_lost"], cudamaps.NUMBER).live
        self._told = self._lost.copy()
        self._before = np.zeros(0, cudamaps.CELL)
        self.config["slow_ns"] = SLOW_NS
        self.set_budget(BUDGET)

    def set_budget(self, per_second: int) -> None:
        """How many single events of each kind a process may cause."""
        self.budget = per_second
        self.config["budget"] = max(1, per_second * _WINDOW_NS // 10**9)

    # -- what is traced ------------------------------------------------------------------------

    def string(self, text: str) -> int:
        """Its number in ``meta.string``."""
        number = self._strings.get(text)
        if number is None:
            number = self._strings[text] = len(self._strings) + 1
            rows = META_STRING.rows(t=time.monotonic_ns(), id=number, text=[text])
            self._pending.append((META_STRING, rows))
        return number

    def open_calls(self, now: int) -> npt.NDArray[Any]:
        """Those that have gone on for long (:data:`~dsprobe.probes.opencalls.OPEN`)."""
        return opencalls.open_calls(self.threads.live, self._table, now)

    def library(self, driver: Driver, returns: bool = True) -> tuple[list[Uprobe], Rows]:
        """Probes for a library, and where they sit (``meta.placement``).

        ``returns``: whether probes may sit on returns; without, calls are counted and no more.
        """
        uprobes: list[Uprobe] = []
        rows = []
        for symbol, place in driver.entries.items():
            served = [f for f in functions.services(symbol) if f.cls in self.serves]
            why = "" if len(self._rows) + len(served) <= len(self._table) else "too many libraries"
            for i, f in enumerate(() if why else served):
                uprobes += self._uprobes(driver, f, place.offset, first=i == 0, returns=returns)
            if served:
                rows.append((symbol, place.offset, not why, place.emulated, place.instruction,
                             why or place.why))  # fmt: skip
        if not rows:
            return [], META_PLACEMENT.empty()
        names = ("function", "offset", "attached", "cheap", "instruction", "why")
        columns = dict(zip(names, map(list, zip(*rows, strict=True)), strict=True))
        n = len(rows)
        return uprobes, META_PLACEMENT.rows(
            t=time.monotonic_ns(),
            library=[driver.path] * n,
            build_id=[driver.build_id] * n,
            **columns,
        )

    def _uprobes(
        self, driver: Driver, f: Function, offset: int, *, first: bool, returns: bool
    ) -> list[Uprobe]:
        entry, leave = self.serves[f.cls]
        flags = f.flags
        if not (leave and returns):
            flags |= Flag.ENTRY_ONLY
        if not first:
            flags |= Flag.UNCOUNTED
        at = driver.functions[f.name].offset + offset
        name = self.string(f.name)
        self._functions.setdefault(name, f)
        content = (
            at, *driver.text, name, flags, self._slots.setdefault(f.name, len(self._slots)), f.cls,
            f.form, *f.codes, f.out, f.address, f.bytes, f.times, f.shift, f.stream,
        )  # fmt: skip
        row = self._rows.get(content)  # libraries that are alike share it
        if row is None:
            free = self._free_rows
            row = self._rows[content] = free.pop() if free else len(self._rows)
        self._table[row] = (*content, 0)
        probes = [Uprobe(entry, at, row)]
        if leave and returns:
            probes.append(Uprobe(leave, at, row, returns=True))
        return probes

    def forget(self, uprobes: Iterable[Uprobe]) -> None:
        """None of these is attached any more, nor will be: their rows are free for others."""
        gone = {u.cookie for u in uprobes}
        self._free_rows += sorted(gone & set(self._rows.values()))
        self._rows = {content: row for content, row in self._rows.items() if row not in gone}

    # -- who is traced -------------------------------------------------------------------------

    def want(self, pids: Iterable[int]) -> None:
        """From now on only these processes, those wanted before, and their children to come."""
        for pid in pids:
            self._wanted.put(pid, 1)
        self.config["filter"] = 1

    def wants(self, pid: int) -> bool:
        """Whether calls of this process are looked at."""
        return not self.config["filter"][0] or self._wanted.get(pid) is not None

    def strangers(self) -> set[int]:
        """Processes that make calls, and of which it was not said what they map: forked ones, and
        those that became another program."""
        alive = {p.pid for p in self.processes.values() if not p.row["ended"][0]}
        return alive - self._drivers.keys()

    def look_at(self, pid: int) -> None:
        """See to it that stacks of this process can be read from its first call on."""
        self.stacks.process_seen(pid)

    def process_seen(self, pid: int, driver: Driver) -> None:
        """A process maps this library."""
        self._drivers[pid] = driver
        self.stacks.process_seen(pid)
        for p in self.processes.values():
            if p.pid == pid and not p.row["ended"][0]:
                self._publish(p)

    def took(self, ring: str, rows: Rows) -> list[Batch]:
        if ring in Stacks.rings:
            self.stacks.took(ring, rows)
            return []
        self._meet()
        return self._take()

    # -- rows ----------------------------------------------------------------------------------

    def collect(self, now: int) -> list[Batch]:
        self._meet()
        self._count(now)
        self._forget()
        for id in self.stacks.changed():
            if id in self.processes:
                self._publish(self.processes[id])
        self._pending += self.stacks.collect(now)
        return self._take()

    def losses(self) -> list[Loss]:
        lost = self._lost.copy()
        new, self._told = lost - self._told, lost
        own = [Loss(*_LOST[i], int(new[i])) for i in np.flatnonzero(new[: len(_LOST)])]
        return own + self.stacks.losses()

    def _take(self) -> list[Batch]:
        """What is to be told, a batch for each stream."""
        by_stream: dict[str, list[Batch]] = {}
        for batch in self._pending:
            by_stream.setdefault(batch[0].name, []).append(batch)
        self._pending = []
        return [(them[0][0], np.concatenate([rows for _, rows in them]))
                for them in by_stream.values()]  # fmt: skip

    def _meet(self) -> None:
        """Take note of processes and threads that have come or gone."""
        procs = self._procs.live
        until, new = time.monotonic() + AT_ONCE, False
        for place in np.flatnonzero(procs["since"]):
            row = procs[place]
            p = self.processes.get(int(row["id"]))
            if p is None:
                if new and time.monotonic() > until:
                    continue
                new = True
                p = self.processes[int(row["id"])] = self._new(int(place), row)
                self._publish(p)
            if row["ended"] and not p.row["ended"][0]:
                p.row["ended"] = time.monotonic_ns()
                self._drivers.pop(p.pid, None)
                self.stacks.gone(p.id)
                self._publish(p)
        tasks = self.threads.live
        strange = [i for i in np.flatnonzero(tasks["id"]) if int(tasks["id"][i]) not in self._met]
        if strange:
            self._met |= {int(tasks["id"][i]): (int(i), False) for i in strange}
            them = tasks[strange]
            rows = META_THREAD.rows(
                t=[time.monotonic_ns()] * len(strange), id=them["id"], process=them["process"],
                tid=them["tid"], ns_tid=them["ns_tid"],
                comm=[processes.printable(c, processes.MAX_COMM) for c in them["comm"].tolist()],
            )  # fmt: skip
            self._pending.append((META_THREAD, rows))

    def _new(self, place: int, row: Any) -> _Process:
        pid = int(row["tgid"])
        facts = processes.facts(pid)
        if facts is None:  # it was too quick; what BPF saw is left
            tasks = self.threads.live
            names = tasks["comm"][tasks["process"] == row["id"]].tolist()
            comm = processes.printable(names[0], processes.MAX_COMM) if names else ""
            facts = processes.Facts(pid, comm=comm)
        self.stacks.process_seen(pid, int(row["id"]))
        # Whoever was forked from one that is seen has used nothing before.
        parents = {p.pid for p in self.processes.values() if not p.row["ended"][0]}
        begun = row["cells"][self.INIT_SLOT] or facts.parent in parents
        return _Process(int(row["id"]), pid, place, META_PROCESS.rows(
            id=int(row["id"]), pid=pid, ns_pid=int(row["ns_tgid"]), parent=facts.parent,
            uid=facts.uid, comm=[facts.comm], command=[facts.command], cgroup=[facts.cgroup],
            container=[facts.container], pod=[facts.pod], late=0 if begun else int(row["since"]),
            seen=int(row["since"]),
        ))  # fmt: skip

    def _publish(self, p: _Process) -> None:
        driver = self._drivers.get(p.pid)
        if driver and not p.row["ended"][0]:
            p.row["library"], p.row["driver"] = driver.path, driver.version
        p.row["python"] = self.stacks.python(p.id)
        p.row["t"] = time.monotonic_ns()
        self._pending.append((META_PROCESS, p.row.copy()))

    def _count(self, now: int) -> None:
        cells = self._cells.live.copy()
        before = np.zeros(len(cells), cudamaps.CELL)
        before[: len(self._before)] = self._before
        opencalls.stand_in(cells, before, self.open_calls(now), now)
        changed = np.zeros(len(cells), bool)
        for name in ("count", "failed", "busy", "bytes"):
            changed |= cells[name] != before[name]
        at = np.flatnonzero(changed & (cells["process"] != 0))
        if len(at):
            rows = CUDA_CALLS.empty(len(at))
            rows["t"] = now
            rows["process"], rows["function"] = cells["process"][at], cells["name"][at]
            for name in ("count", "failed", "busy", "bytes", "hist"):
                rows[name] = cells[name][at] - before[name][at]
            for i, name in enumerate(rows["function"].tolist()):
                f = self._functions[name]
                rows["kind"][i], rows["copy"][i], _ = f.codes
            self._pending.append((CUDA_CALLS, rows))
        self._before = cells

    def _forget(self) -> None:
        """What had ended when the last collection began has been read by every probe since."""
        tasks = self.threads.live
        gone = {id: place for id, (place, leaving) in self._met.items() if leaving}
        gone = dict(list(gone.items())[:FREED])
        self.threads.give_back(gone.values())
        for id in gone:
            del self._met[id]
        ended = [(id, place) for id, (place, _) in self._met.items() if tasks["ended"][place]]
        self._met |= {id: (place, True) for id, place in ended}
        left = [p for p in self.processes.values() if p.leaving]
        if left:
            cells = self._cells.live
            them = np.flatnonzero(np.isin(cells["process"], [p.id for p in left]))
            slots = [self._slots[self._functions[n].name] for n in cells["name"][them].tolist()]
            keys = cells["process"][them].astype("<u8") << 32 | np.array(slots, "<u8")
            self._cells_of.delete(keys)
            self._cells.give_back(them.tolist())
            self._before[them] = np.zeros((), cudamaps.CELL)
            self._procs.give_back([p.place for p in left])
            for p in left:
                del self.processes[p.id]
        for p in self.processes.values():
            p.leaving = bool(p.row["ended"][0])
