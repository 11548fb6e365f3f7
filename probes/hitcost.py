"""What a probe's hit costs on this host, and whether one on a return kills a process with seccomp.

Measured on a few bytes of code of our own in a throwaway process: a hit on an instruction that the
kernel emulates, on one that it has to step, and of an entry and its return together.
"""

from __future__ import annotations

import os
import platform
import struct
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from dsprobe.probes.probe import Uprobe
from dsprobe.probes.tracer import Tracer
from dsprobe.probes.trial import Died, Throwaway, executable_memory, process

# x86_64.  Two functions, and a loop that calls the one at rsi rdi times.
_PUSH, _COMPARE, _LOOP = 0, 16, 48
_CODE = {
    _PUSH: "55 5d c3",  # push %rbp; pop %rbp; ret
    _COMPARE: "81 3d 00 00 00 00 00 ba 1c 32 74 00 c3",  # cmpl $0x321cba00, 0(%rip); je 1f; 1: ret
    # push %rbx; push %r12; mov %rdi, %rbx; mov %rsi, %r12
    # 1: call *%r12; dec %rbx; jnz 1b; pop %r12; pop %rbx; ret
    _LOOP: "53 41 54 48 89 fb 49 89 f4 41 ff d4 48 ff cb 75 f8 41 5c 5b c3",
}
_PAGE = 4096
_REPEAT = 5
_URETPROBE_CALL = 335
"""The system call behind return probes since Linux 6.11 (syscall_64.tbl); 336 is uprobe's, 6.18."""


@dataclass(frozen=True)
class Cost:
    """ns per call that a probe adds: on an emulated instruction, on a stepped one, and on an
    emulated one with a probe on the return too."""

    emulated: float
    stepped: float
    with_return: float


@contextmanager
def _code() -> Iterator[int]:
    """A file with the code; no process but those that are given it has it."""
    page = bytearray(b"\xcc" * _PAGE)
    for at, text in _CODE.items():
        page[at : at + len(bytes.fromhex(text))] = bytes.fromhex(text)
    fd = executable_memory("hit")
    try:
        os.write(fd, page)
        yield fd
    finally:
        os.close(fd)


def _supported() -> None:
    if platform.machine() != "x86_64":
        raise OSError(f"what a hit costs is measured on x86_64 only, not on {platform.machine()}")


def repeat(target: Throwaway, name: str, times: int) -> int:
    """ns that ``times`` calls of a function of the target's library take, from a loop of machine
    code."""
    answers = target.ask("repeat", name=name, times=times, code=_CODE[_LOOP])
    return int(answers[0]["took"])


def _per_call(target: Throwaway, function: int, times: int) -> float:
    """ns per call, the fastest of a few loops."""
    runs = (
        int(target.ask("time", loop=_LOOP, function=function, times=times)[0]["took"])
        for _ in range(_REPEAT)
    )
    return min(runs) / times


def measure(tracer: Tracer) -> Cost:
    """With programs that do nothing; takes a tenth of a second.  ``tracer`` has loaded a
    :class:`~dsprobe.probes.trial.Trial`.  Raises OSError where it cannot be done.
    """
    _supported()
    enter, leave = "trial_nothing", "trial_nothing_back"
    with _code() as fd, process(fd, trusted=True) as target:

        def probed(function: int, times: int, *probes: Uprobe) -> float:
            bare = _per_call(target, function, times)
            errors = tracer.attach_library("hit", fd, list(probes))
            try:
                if errors:
                    raise OSError(f"probes cannot be attached: {errors[0]}")
                return max(_per_call(target, function, times) - bare, 0.0)
            finally:
                tracer.detach_library("hit")

        try:
            return Cost(
                emulated=probed(_PUSH, 2000, Uprobe(enter, _PUSH, 0)),
                stepped=probed(_COMPARE, 200, Uprobe(enter, _COMPARE, 0)),
                with_return=probed(
                    _PUSH, 2000, Uprobe(enter, _PUSH, 0), Uprobe(leave, _PUSH, 0, returns=True)
                ),
            )
        except Died as e:
            raise OSError(f"the process that measures it has ended: {e}") from None


def _killing_from(first: int) -> bytes:
    """A seccomp program that kills a process at any system call numbered ``first`` or higher, as
    filters that list what is allowed do at calls newer than they are (seccomp(2))."""
    load, jump_if_at_least, give = 0x20, 0x35, 0x06
    kill, allow = 0x80000000, 0x7FFF0000
    program = [(load, 0, 0, 0), (jump_if_at_least, 0, 1, first), (give, 0, 0, kill),
               (give, 0, 0, allow)]  # fmt: skip
    return b"".join(struct.pack("<HBBI", *line) for line in program)


def returns_survive_seccomp(tracer: Tracer) -> bool:
    """Whether a process whose seccomp filter knows no system call newer than Linux 6.10 survives a
    return probe.  Kernels from 6.11 on made such a call for it, in the process's name, before they
    learnt to let it pass the filter.  Raises OSError where it cannot be tried.
    """
    _supported()
    with _code() as fd, process(fd, trusted=True) as target:
        try:
            target.ask("time", loop=_LOOP, function=_PUSH, times=1)
            target.ask("forbid", filter=_killing_from(_URETPROBE_CALL).hex())
            target.ask("time", loop=_LOOP, function=_PUSH, times=1)
        except Died as e:
            raise OSError(f"it cannot be tried: {e}") from None
        errors = tracer.attach_library("hit", fd, [Uprobe("trial_leave", _PUSH, 0, returns=True)])
        try:
            if errors:
                raise OSError(f"probes cannot be attached: {errors[0]}")
            target.ask("time", loop=_LOOP, function=_PUSH, times=3)
        except Died:
            return False
        finally:
            tracer.detach_library("hit")
    return True
