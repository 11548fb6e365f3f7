"""Try probes out on a copy of a library, in a process that is thrown away.

Where a probe sits in a function is derived from the function's code.  On a build whose entries
nobody has verified, that is put to the test before a server runs with it: each function is called
with known arguments, and the probe must see these arguments and the result.  Nothing is
initialised, so an entry of the driver only says so; the copy is a file of its own, so no process
that uses the library notices.
"""

from __future__ import annotations

import fcntl
import json
import os
import select
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import numpy as np

from dsprobe.probes import throwaway
from dsprobe.probes.btf import Btf
from dsprobe.probes.driver import Driver
from dsprobe.probes.maps import MappedArray
from dsprobe.probes.native import sandbox
from dsprobe.probes.placement import Placement
from dsprobe.probes.probe import Batch, BpfProbe, Map, Program, Uprobe
from dsprobe.probes.tracer import Tracer

VERIFIED = {"1a992e76d26258169850de50259437906bf01205": "535.261.03"}
"""Builds, by build id, on whose every entry the tests have tried the placement."""

MAX_LIBRARY = 256 << 20
MAX_FUNCTIONS = 1024
_UNTRIED = "it cannot be tried without a device, so it is probed at its first instruction"
DEATHS = 16
"""How many functions may kill the process before the rest is given up."""
SECONDS, ALTOGETHER = 3.0, 12.0
"""How long one order, and the whole trial of a library, may take."""
SCRATCH, SCRATCH_SIZE = 0x5EED_0000_0000, 1 << 20
ARGUMENTS = [SCRATCH + 0x1_1000 * i for i in range(1, 13)]
"""Six in registers, six on the stack.  All point at memory that may be written: many functions
clear what they are to fill before they look at anything else."""
_CALL = {"arguments": ARGUMENTS, "scratch": SCRATCH, "size": SCRATCH_SIZE}

MAX_LINE = 512
MAX_ANSWERS = 16
# read write open close stat fstat lstat poll lseek mmap mprotect munmap brk rt_sigaction
# rt_sigprocmask rt_sigreturn pread64 readv writev access sched_yield mremap madvise nanosleep
# getpid exit uname getcwd readlink gettimeofday getrlimit getrusage sysinfo times getuid getgid
# geteuid getegid getppid sigaltstack arch_prctl gettid futex sched_getaffinity getdents64
# set_tid_address clock_gettime clock_getres clock_nanosleep exit_group openat newfstatat
# readlinkat set_robust_list getrandom statx rseq, and uretprobe and uprobe, by which the kernel
# returns from probes: of x86_64 (arch/x86/entry/syscalls/syscall_64.tbl).  What can be opened is
# nothing.
_HARMLESS = (0xC000003E, (
    0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15, 17, 19, 20, 21, 24, 25, 28, 35, 39, 60,
    63, 79, 89, 96, 97, 98, 99, 100, 102, 104, 107, 108, 110, 131, 158, 186, 202, 204, 217, 218,
    228, 229, 230, 231, 257, 262, 267, 273, 318, 332, 334, 335, 336,
))  # fmt: skip
_MFD_EXEC = 0x10  # include/uapi/linux/memfd.h

_SEEN = np.dtype(
    [("registers", "<u8", 6), ("stack", "<u8", 6), ("result", "<u8"),
     ("entries", "<u4"), ("returns", "<u4")]
)  # fmt: skip


class Died(Exception):
    """The throwaway process has ended or says nothing; ``calling`` is what it was in."""

    def __init__(self, calling: str = "") -> None:
        super().__init__(f"it died in {calling}" if calling else "it died")
        self.calling = calling


class Throwaway:
    """A process of :mod:`dsprobe.probes.throwaway` with ``fd`` as its code, which is ``trusted``
    or may make harmless system calls only."""

    def __init__(self, fd: int, trusted: bool = False) -> None:
        filter = b"" if trusted else sandbox.only(*_HARMLESS)
        self._process = subprocess.Popen(
            [sys.executable, "-I", "-S", throwaway.__file__, str(fd), str(os.getpid()),
             filter.hex()],
            pass_fds=[fd], stdin=subprocess.PIPE, stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL, cwd="/", env={},
        )  # fmt: skip
        self._rest = b""

    def ask(self, do: str, **order: Any) -> list[dict[str, Any]]:
        """Give an order; its answers.  Raises :class:`Died`."""
        assert self._process.stdin
        try:
            self._process.stdin.write(json.dumps({"do": do, **order}).encode() + b"\n")
            self._process.stdin.flush()
        except OSError:
            raise Died from None
        answers: list[dict[str, Any]] = []
        most = 2 * len(order.get("names", ())) + MAX_ANSWERS
        for answer in self._lines():
            if "done" in answer:
                return answers
            answers.append(answer)
            if len(answers) > most:
                break  # the library talks
        last = answers[-1] if answers else {}
        raise Died(str(last.get("calling", "")))

    def _lines(self) -> Iterator[dict[str, Any]]:
        assert self._process.stdout
        fd = self._process.stdout.fileno()
        poll = select.poll()  # select(2) takes no descriptor above 1023
        poll.register(fd, select.POLLIN)
        deadline = time.monotonic() + SECONDS
        while True:
            *lines, self._rest = self._rest.split(b"\n")
            for line in lines:
                answer = _answer(line)
                if answer is not None:
                    yield answer
            ready = poll.poll(max(0.0, deadline - time.monotonic()) * 1000)
            data = os.read(fd, 1 << 16) if ready else b""
            if not data or len(self._rest) > MAX_LINE:
                return
            self._rest += data

    def end(self) -> None:
        self._process.kill()
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe:
                pipe.close()
        self._process.wait()


def _answer(line: bytes) -> dict[str, Any] | None:
    """A line as :mod:`dsprobe.probes.throwaway` writes them; None where it is of the library."""
    if len(line) > MAX_LINE or not line.startswith(b"{"):
        return None
    try:
        answer = json.loads(line)
    except (ValueError, RecursionError):
        return None
    plain = isinstance(answer, dict) and all(isinstance(v, int | str) for v in answer.values())
    return answer if plain else None


@contextmanager
def process(fd: int, trusted: bool = False) -> Iterator[Throwaway]:
    """A throwaway process for a while."""
    made = Throwaway(fd, trusted)
    try:
        yield made
    finally:
        made.end()


class Trial(BpfProbe):
    """Records what it sees of calls."""

    name = "trial"
    doc = "what a probe sees of a call"
    streams = ()
    source = "trial.bpf.c"
    module = "trial"
    programs = (
        Program("trial_enter", "uprobe"),
        Program("trial_leave", "uretprobe"),
        Program("trial_nothing", "uprobe"),
        Program("trial_nothing_back", "uretprobe"),
    )
    rings: ClassVar = {}

    def defines(self, btf: Btf | None) -> Mapping[str, int]:
        return {"TRIAL_FUNCTIONS": MAX_FUNCTIONS}

    def open(self, maps: Mapping[str, Map]) -> None:
        self._seen = MappedArray(maps["trial_seen"], _SEEN)

    def collect(self, now: int) -> list[Batch]:
        return []

    def forget(self) -> None:
        self._seen.live[:] = 0

    def fault(self, i: int, result: int) -> str:
        """What is wrong with what was seen of function ``i``, which returned ``result``."""
        seen = self._seen.live[i]
        if seen["entries"] != 1:
            return f"{seen['entries']} entries of one call were seen"
        if seen["registers"].tolist() != ARGUMENTS[:6]:
            return "the arguments in registers are no longer the caller's there"
        if seen["stack"].tolist() != ARGUMENTS[6:]:
            return "the arguments on the stack are not where they should be there"
        if seen["returns"] != 1:
            return f"{seen['returns']} returns of one call were seen"
        if int(seen["result"]) & 0xFFFFFFFF != result & 0xFFFFFFFF:
            return "the result was not seen"
        return ""


@dataclass(frozen=True)
class Verdict:
    """``entries``: where each function may be probed; ``refused``: why a function may not be probed
    at all; ``untried``: those that cannot be called without a device, and so are to be probed at
    their first instruction."""

    entries: dict[str, Placement]
    refused: dict[str, str]
    untried: frozenset[str]


def needed(driver: Driver, names: Sequence[str]) -> bool:
    """Whether ``driver`` is to be tried: of a build that was not verified, and with probes that do
    not sit at the very start of a function."""
    if driver.build_id in VERIFIED:
        return False
    return any(driver.entries[n].offset for n in names if n in driver.entries)


class Bench:
    """Where trials are made; raises OSError if the programs for it cannot be loaded."""

    def __init__(self) -> None:
        self._trial = Trial()
        self._tracer = Tracer([self._trial])
        found = [c for c in self._tracer.load() if not c.program]
        if not self._tracer.probes:
            self._tracer.close()
            raise OSError(f"probes cannot be tried: {found[0].reason if found else 'no programs'}")

    def close(self) -> None:
        self._tracer.close()

    def try_out(self, fd: int, driver: Driver, names: Sequence[str]) -> Verdict:
        """Try the placements of ``names`` in the library behind ``fd``.

        Those that fail are tried at the function's first instruction, and refused where that fails
        too.  Raises OSError where the library cannot be copied or loaded at all.
        """
        self._until = time.monotonic() + ALTOGETHER
        wanted = [n for n in names if n in driver.entries][:MAX_FUNCTIONS]
        with library_in_memory(fd) as copy:
            untried = self._deaths(copy, wanted)
            placed = {n: driver.entries[n] for n in wanted if n not in untried}
            faults = self._faults(copy, driver, placed)
            again = {n: at_start(placed[n], why) for n, why in faults.items()}
            refused = self._faults(copy, driver, again) if again else {}
        tried = {n: p for n, p in (placed | again).items() if n not in refused}
        bare = {n: at_start(driver.entries[n], _UNTRIED) for n in untried}
        return Verdict(tried | bare, refused, frozenset(untried))

    def _deaths(self, copy: int, names: Sequence[str]) -> set[str]:
        """Functions that kill a process without any probe."""
        left, dead = list(names), set[str]()
        for _ in range(DEATHS):
            try:
                with process(copy) as target:
                    target.ask("call", names=left, **_CALL)
                return dead
            except Died as e:
                if not e.calling:
                    raise OSError("the library cannot be loaded outside its process") from None
                self._hurry()
                dead.add(e.calling)
                left.remove(e.calling)
        return dead | set(left)

    def _hurry(self) -> None:
        if time.monotonic() > self._until:
            raise OSError(f"its trial took over {ALTOGETHER:g} s")

    def _faults(self, copy: int, driver: Driver, placed: Mapping[str, Placement]) -> dict[str, str]:
        """What is wrong with each of the placements that do not work."""
        left, faults = dict(placed), dict[str, str]()
        for _ in range(DEATHS):
            try:
                return faults | self._round(copy, driver, left)
            except Died as e:
                if not e.calling:
                    raise OSError("the process that tries probes died of itself") from None
                self._hurry()
                faults[e.calling] = "a probe there kills the process"
                del left[e.calling]
        return faults | dict.fromkeys(left, "too many probes killed the process that tried them")

    def _round(self, copy: int, driver: Driver, placed: Mapping[str, Placement]) -> dict[str, str]:
        names = list(placed)
        with process(copy) as target:
            bare = _results(target.ask("call", names=names, **_CALL))
            probes = []
            for i, name in enumerate(names):
                at = driver.functions[name].offset + placed[name].offset
                probes.append(Uprobe("trial_enter", at, i))
                probes.append(Uprobe("trial_leave", at, i, returns=True))
            self._trial.forget()
            errors = self._tracer.attach_library("trial", copy, probes)
            try:
                if errors:
                    raise OSError(f"probes cannot be attached to a copy of it: {errors[0]}")
                results = _results(target.ask("call", names=names, **_CALL))
            finally:
                self._tracer.detach_library("trial")
        faults = {n: self._trial.fault(i, results[n]) for i, n in enumerate(names)}
        changed = {n: "a probe changes its result" for n in names if results[n] != bare[n]}
        return {n: why for n, why in (faults | changed).items() if why}


def _results(answers: list[dict[str, Any]]) -> dict[str, int]:
    return {str(a["name"]): int(a["result"]) for a in answers if "name" in a}


def at_start(placed: Placement, why: str) -> Placement:
    """The place at the function's first instruction instead, for the reason ``why``."""
    text = placed.skipped[0] if placed.skipped else placed.instruction
    if not placed.offset:
        return replace(placed, why=why)
    return replace(placed, offset=0, emulated=False, instruction=text, skipped=(), why=why)


def executable_memory(name: str) -> int:
    """A file in memory whose content may be run.  Raises OSError where a host forbids that."""
    flags = os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING
    try:
        return os.memfd_create(name, flags | _MFD_EXEC)
    except OSError:  # before Linux 6.3 there is no such flag, and all may be run
        return os.memfd_create(name, flags)


@contextmanager
def library_in_memory(fd: int) -> Iterator[int]:
    """A copy of a file that others may read and nobody may change.  Raises OSError."""
    copy = _copy(fd)
    try:
        yield copy
    finally:
        os.close(copy)


def _copy(fd: int) -> int:
    size = os.fstat(fd).st_size
    if size > MAX_LIBRARY:
        raise OSError(f"it is larger than {MAX_LIBRARY >> 20} MB")
    copy = executable_memory("libcuda")
    try:
        at = 0
        while at < size and (n := os.sendfile(copy, fd, at, size - at)):
            at += n
        os.fchmod(copy, 0o555)
        seals = fcntl.F_SEAL_WRITE | fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL
        fcntl.fcntl(copy, fcntl.F_ADD_SEALS, seals)
    except OSError:
        os.close(copy)
        raise
    return copy
