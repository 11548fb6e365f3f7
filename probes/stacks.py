"""Stacks of threads that call CUDA: what BPF captured of them, with names.

The BPF side is stacks.bpf.h: it numbers stacks, and sends the frames of one that it sees for the
first time.  Here Python's frames are named from their code objects (:mod:`dsprobe.probes.pystacks`)
and the callers in native code by the symbolizer (:mod:`dsprobe.probes.native`).  Frames are
innermost first: native ones, then Python's, then a sentence where the stack is not whole.
"""

from __future__ import annotations

import os
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import ClassVar

import numpy as np

from dsprobe.probes import framerows, stackrecords
from dsprobe.probes.btf import Btf
from dsprobe.probes.framerows import FrameTable
from dsprobe.probes.maps import MappedArray
from dsprobe.probes.native.symbolizer import NativeFrame, Registers, Symbolizer
from dsprobe.probes.probe import Batch, Loss, Map, need_btf
from dsprobe.probes.pystacks.config import Looked, Table, look, packed
from dsprobe.probes.pystacks.interpreter import is_shim
from dsprobe.probes.pystacks.naming import CodeKey, Naming, Place
from dsprobe.probes.pystacks.reader import Reader
from dsprobe.recordings.cudastreams import META_FRAME, META_STACK
from dsprobe.recordings.model import Rows, Stream

MAX_WAITING = 20_000
"""Stacks that wait for names."""
SECONDS = 10.0
"""A stack waits no longer for its names."""
WAIT = 0.25
"""A process is looked at within so long, or else meanwhile."""
RETRY, RETRIES = 1.0, 30
"""A process whose Python does not run yet is looked at again after so many seconds, so often."""
AT_ONCE = 0.05
"""So many seconds of one collection are spent on names."""
BURIED, LOST = 2_000, 2_000
"""So many stacks of processes that are gone are forgotten in one collection, and so many are told
of that were lost."""
_INITIAL_PID_NAMESPACE = 0xEFFFFFFC  # PROC_PID_INIT_INO, include/linux/proc_ns.h
_MAX_LOOKED = 65_536


@dataclass
class _Process:
    pid: int
    looked: Looked | None = None
    tries: int = 0
    again: float = 0.0
    keys: list[bytes] = field(default_factory=list)
    """Of its stacks in BPF."""
    gone: bool = False


@dataclass
class _Stack:
    record: Rows
    since: float
    native: tuple[NativeFrame, ...] | None = None
    note: str = ""
    unwound: bool = False
    """The symbolizer was asked."""


def _text(record: Rows, name: str) -> bytes:
    """What was captured of a string object."""
    size, wide = int(record[f"{name}_size"]), int(record[f"{name}_wide"])
    return bytes(record[name][: size + wide if size else 0])


class Stacks:
    """For :class:`~dsprobe.probes.cuda.Cuda`, which hands on what its rings held.

    ``unwind``: BPF copies the top of the native stack, and all native frames are named, not only
    the caller.
    """

    rings: ClassVar[Mapping[str, Stream]] = {
        "cuda_stack": stackrecords.STACK_RECORD,
        "cuda_code": stackrecords.CODE_RECORD,
        "cuda_native": stackrecords.NATIVE_RECORD,
    }

    def __init__(
        self, symbolizer: Symbolizer | None = None, unwind: bool = False,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:  # fmt: skip
        self._symbolizer, self.unwind, self._clock = symbolizer, unwind, clock
        self._reader = Reader(clock)
        self._naming = Naming(self._reader)
        self._table = FrameTable()
        self._processes: dict[int, _Process] = {}
        self._pythons: dict[int, Looked] = {}
        self._next = 1
        self._looks: deque[tuple[int, int, int, Looked]] = deque()
        self._waiting: dict[int, _Stack] = {}
        self._lost: dict[tuple[str, str], int] = {}
        self._maps: tuple[Table, Table] | None = None
        self._reserved = False
        self._changed: set[int] = set()
        self._without = 0

    def defines(self, btf: Btf | None) -> Mapping[str, int]:
        """Constants for stacks.bpf.h.  Raises as :meth:`BpfProbe.defines`."""
        btf = need_btf(btf)
        namespace = os.stat("/proc/self/ns/pid").st_ino
        return {
            "STACKS": stackrecords.STACKS,
            "NATIVE_STACKS": int(self.unwind),
            "PID_NAMESPACE": 0 if namespace == _INITIAL_PID_NAMESPACE else namespace,
            "TASK_FSBASE": btf.offset("task_struct", "thread.fsbase"),
            "TASK_PID": btf.offset("task_struct", "pid"),
            "TASK_GROUP_LEADER": btf.offset("task_struct", "group_leader"),
            "TASK_THREAD_PID": btf.offset("task_struct", "thread_pid"),
            "PID_LEVEL": btf.offset("pid", "level"),
            "PID_NUMBERS": btf.offset("pid", "numbers"),
            "NS_INODE": btf.offset("pid_namespace", "ns.inum"),
        }

    def open(self, maps: Mapping[str, Map]) -> None:
        """Take the maps that are ours."""
        self._maps = Table(maps["pythons"]), Table(maps["stack_ids"])
        self._untold = Table(maps["stacks_lost"])
        self._numbers = MappedArray(maps["stack_numbers"], np.dtype([("n", "<u8")]))

    # -- processes ----------------------------------------------------------------------------

    def process_seen(self, pid: int, process: int = 0) -> str:
        """Look at a process so that its stacks can be read: before probes are attached, and (with
        its number) once it has one.  ``pid`` as this process's /proc has it.

        Returns what meta.process says of its Python: its version, "" where it has none, or why it
        cannot be read; more may be known later (:meth:`python`).
        """
        p = self._processes.setdefault(process, _Process(pid)) if process else _Process(pid)
        if process and self._symbolizer:
            self._symbolizer.seen(process, pid, time.monotonic_ns())
        done = self._look(pid, process)
        if done is None or not self._reader.wait(done, WAIT):
            return "its memory does not answer yet"
        looked = self._take_looks().get(pid) or p.looked
        return looked.sentence if looked else ""

    def python(self, process: int) -> str:
        """As :meth:`process_seen` returned it, as far as is known now."""
        p = self._processes.get(process)
        return p.looked.sentence if p and p.looked else ""

    def changed(self) -> list[int]:
        """Processes of which :meth:`python` says something else than before the last call."""
        self._take_looks()
        changed, self._changed = self._changed, set()
        return sorted(changed)

    def _look(self, pid: int, process: int) -> threading.Event | None:
        done = threading.Event()
        number, self._next = self._next, self._next + 1

        def job() -> None:
            looked = look(pid)
            self._looks.append((pid, process, number, looked))
            if self._maps:
                try:
                    self._maps[0].set(pid.to_bytes(4, "little"), packed(looked, number))
                except OSError:  # the table is full: its stacks say that it was not looked at
                    pass
            done.set()

        return done if self._reader.ask(job) else None

    def _take_looks(self) -> dict[int, Looked]:
        found = {}
        while self._looks:
            pid, process, number, looked = self._looks.popleft()
            found[pid] = self._pythons[number] = looked
            if len(self._pythons) > _MAX_LOOKED:
                del self._pythons[next(iter(self._pythons))]
            if p := self._processes.get(process):
                if p.looked != looked:
                    self._changed.add(process)
                p.looked = looked
                p.again = self._clock() + RETRY if looked.passing and p.tries < RETRIES else 0.0
        return found

    def _retry(self) -> None:
        now = self._clock()
        for number, p in self._processes.items():
            if p.again and now >= p.again and not p.gone:
                p.tries, p.again = p.tries + 1, 0.0
                self._look(p.pid, number)

    def gone(self, process: int) -> None:
        """A process ended, or became another program."""
        if p := self._processes.get(process):
            p.gone = True
        if self._symbolizer:
            self._symbolizer.gone(process)

    def _bury(self) -> None:
        """Forget processes that are gone and whose stacks have been told."""
        gone = {n for n, p in self._processes.items() if p.gone}
        if not gone:
            return
        gone -= {int(s.record["process"]) for s in self._waiting.values()}
        left, done = BURIED, []
        for number in gone:
            p = self._processes[number]
            keys, p.keys = p.keys[:left], p.keys[left:]
            left -= len(keys)
            if self._maps:
                for key in keys:
                    self._maps[1].remove(key)
            if not p.keys:
                del self._processes[number]
                done.append(number)
        if done:
            self._naming.gone(*done)

    # -- what BPF captured --------------------------------------------------------------------

    def took(self, ring: str, rows: Rows) -> None:
        """Records of one of :attr:`rings`."""
        {"cuda_stack": self._stacks, "cuda_code": self._codes, "cuda_native": self._copies}[ring](
            rows
        )

    def _stacks(self, rows: Rows) -> None:
        for record in rows:
            if len(self._waiting) >= MAX_WAITING:
                self._lose("meta.stack", "more stacks than can be named")
                continue
            number, process, pid = (int(record[k]) for k in ("id", "process", "pid"))
            p = self._processes.setdefault(process, _Process(pid))
            p.keys.append(record["hash"].tobytes() + record["ret"].tobytes()
                          + record["native"].tobytes() + process.to_bytes(8, "little"))  # fmt: skip
            stack = self._waiting[number] = _Stack(record, self._clock())
            if not self.unwind:
                self._ask(number, stack)

    def _ask(self, number: int, stack: _Stack) -> None:
        """Have the caller named."""
        stack.unwound = True
        r = stack.record
        where = number, int(r["process"]), int(r["pid"]), int(r["t"])
        if not self._symbolizer or not self._symbolizer.ask(*where, [int(r["ret"])]):
            stack.native = (NativeFrame("", "", int(r["ret"]), ""),)

    def _copies(self, rows: Rows) -> None:
        for record in rows:
            number = int(record["id"])
            stack = self._waiting.get(number)
            if not stack or not self._symbolizer:
                continue
            words = {k: int(record[k]) for k in stackrecords.REGISTERS}
            copy = record["copy"].tobytes()[: int(record["size"])]
            where = number, int(record["process"]), int(record["pid"]), int(record["t"])
            stack.unwound = self._symbolizer.unwind(*where, Registers(**words), copy)

    def _codes(self, rows: Rows) -> None:
        self._take_looks()
        for r in rows:
            looked = self._pythons.get(int(r["python"]))
            if looked is None or looked.interpreter is None:
                continue
            key = CodeKey(int(r["process"]), int(r["code"]), int(r["signature"]))
            name, file = (_text(r, k) for k in ("name", "file"))
            table = r["table"].tobytes()[: int(r["table_size"])]
            self._naming.learn(
                key, looked.interpreter, int(r["first"]), int(r["whole"]), name, file, table
            )

    # -- rows ---------------------------------------------------------------------------------

    def collect(self, now: int) -> list[Batch]:
        """Rows of meta.frame and meta.stack: of stacks whose names are known, or are not coming."""
        self._take_looks()
        self._naming.answers()
        self._retry()
        for answer in self._symbolizer.answers() if self._symbolizer else ():
            if isinstance(answer.key, int) and (stack := self._waiting.get(answer.key)):
                stack.native, stack.note = answer.frames, answer.note
        self._tell_lost(now)
        begun = self._clock()
        for number, stack in list(self._waiting.items()):
            late = begun - stack.since > SECONDS
            if stack.native is None and not stack.unwound:
                self._ask(number, stack)  # its copy was lost
            frames = self._frames(now, stack, late)
            if frames is not None:
                del self._waiting[number]
                self._table.stack(now, number, frames)
            else:  # its turn comes when all others had theirs
                self._waiting[number] = self._waiting.pop(number)
            if self._clock() - begun > AT_ONCE:
                break
        self._bury()
        frames_, stacks = self._table.rows()
        batches = [(META_FRAME, frames_), (META_STACK, stacks)]
        return [(stream, rows) for stream, rows in batches if len(rows)]

    def _tell_lost(self, now: int) -> None:
        """Stacks of which there is nothing but a number."""
        numbers = [stackrecords.RING_FULL] if not self._reserved else []
        while self._maps and len(numbers) < LOST and (one := self._untold.pop()):
            numbers.append(int.from_bytes(one, "little"))
        if numbers:
            lost = self._table.frame(now, framerows.status("lost: too many new stacks at once"))
        for number in numbers:
            self._table.stack(now, number, [lost])
        if not self._reserved:
            self._reserved = True
            why = framerows.status(f"lost: more than {stackrecords.STACKS:,} stacks")
            self._table.stack(now, stackrecords.NO_ROOM, [self._table.frame(now, why)])
        without = int(self._numbers.live["n"][1]) if self._maps else 0
        self._lose("meta.stack", "no room for another stack", without - self._without)
        self._without = without

    def _frames(self, now: int, stack: _Stack, late: bool) -> list[int] | None:
        """Numbers of its frames; None: not yet."""
        record = stack.record
        looked = self._pythons.get(int(record["python"]))
        it = looked.interpreter if looked else None
        native = stack.native
        if native is None and late:
            native = (NativeFrame("", "", int(record["ret"]), ""),)
        places: list[Place | str | None] | None = []
        for frame in stackrecords.frames_of(record):
            if it is None or is_shim(frame.owner, it.minor):
                continue
            key = CodeKey(int(record["process"]), frame.code, frame.signature)
            place = self._naming.place(key, int(record["pid"]), it, frame.instr, late)
            if place is None and not late:
                places = None  # the others are asked for too
            elif places is not None:
                places.append(place)
        if native is None or places is None:
            return None
        self._lose("meta.frame", "Python frames without a line: their tables take long to read",
                   sum(isinstance(p, Place) and p.unread for p in places))  # fmt: skip
        python = [self._python(p) for p in places]
        own = it.path if it else None
        frames: list[framerows.Frame] = []
        for f in native:
            if f.module == own and frames and python:
                break  # here Python's frames take over
            frames.append((framerows.NATIVE, f.function, "", 0, f.module, f.offset, f.build_id))
        status = int(record["status"])
        if record["first"] != record["second"]:
            python, status = [], stackrecords.CHANGED
        frames += python
        why = stackrecords.SENTENCES.get(status, "")
        if status == stackrecords.UNSUPPORTED and looked:
            why = looked.reason
        if why or (stack.note and not python):
            frames.append(framerows.status(why or stack.note))
        return [self._table.frame(now, f) for f in frames]

    @staticmethod
    def _python(place: Place | str | None) -> framerows.Frame:
        if isinstance(place, Place):
            return (framerows.PYTHON, place.function, place.file, place.line, "", 0, "")
        return framerows.status(f"a Python function: {place or 'its process does not answer'}")

    def _lose(self, stream: str, reason: str, lost: int = 1) -> None:
        if lost:
            self._lost[stream, reason] = self._lost.get((stream, reason), 0) + lost

    def losses(self) -> list[Loss]:
        """What found no room since the last call."""
        if self._table.refused:
            self._lose("meta.frame", "too many different frames", self._table.refused)
            self._table.refused = 0
        if self._symbolizer and self._symbolizer.refused:
            self._lose("meta.frame", "native frames without names: too many at once",
                       self._symbolizer.refused)  # fmt: skip
            self._symbolizer.refused = 0
        lost, self._lost = self._lost, {}
        return [Loss(stream, reason, n) for (stream, reason), n in lost.items()]

    def close(self) -> None:
        """End the threads."""
        self._reader.close()
        if self._symbolizer:
            self._symbolizer.close()
