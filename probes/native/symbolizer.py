"""Native frames for the agent: names of addresses, and stacks from copies of their tops.

ELF files of any process are hostile input, so nothing of them is read here.  The agent opens the
files that a process maps (/proc/PID/map_files) and hands them to a child without privileges
(:mod:`dsprobe.probes.native.child`), which parses them.  A thread talks to the child; nothing that
the agent's loop calls ever waits.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class NativeFrame:
    """One frame, as ``meta.frame`` keeps it.

    ``function`` is the (demangled) symbol, "" where none covers the address.  ``module`` is the
    file as its process sees it, "[vdso]", or "" for memory without a file.  ``offset`` is the
    address as in the file's program headers (what addr2line and objdump take); in memory without
    a file it is the address itself.  ``build_id`` is hexadecimal, "" where there is none.
    """

    function: str
    module: str
    offset: int
    build_id: str


@dataclass(frozen=True)
class Answer:
    """To the question ``key``: frames, innermost first, and why they end early ("" where not)."""

    key: Hashable
    frames: tuple[NativeFrame, ...]
    note: str = ""


@dataclass(frozen=True)
class Registers:
    """Registers of a user thread at the bottom of its stack copy: what the ABI preserves.

    ``ip`` is the first address to name; where the walk begins at the return of a call, it is the
    return address, and ``sp`` is already past it.
    """

    ip: int
    sp: int
    bp: int
    bx: int = 0
    r12: int = 0
    r13: int = 0
    r14: int = 0
    r15: int = 0


class Symbolizer:
    """Ask with :meth:`ask` and :meth:`unwind`, take what came with :meth:`answers`.

    ``process`` is the session's number of the process (one program of one process: a new one
    after exec), ``pid`` its PID on the host, ``t`` when the stack was taken (CLOCK_MONOTONIC ns):
    a process that began later is another one with the same PID, and is not looked into.
    """

    def __init__(self) -> None:
        self.refused = 0
        """Questions not taken because too many were waiting."""

    def ask(self, key: Hashable, process: int, pid: int, t: int, addresses: Sequence[int]) -> bool:
        """Name ``addresses``, which are return addresses.  False where the queue is full.

        The answer has a frame for each address, in the same order.
        """
        raise NotImplementedError

    def unwind(
        self, key: Hashable, process: int, pid: int, t: int, registers: Registers, copy: bytes
    ) -> bool:
        """Walk and name the stack whose bytes from ``registers.sp`` on are ``copy``.

        ``registers.ip`` is taken for a return address (the walk begins at the return of the
        probed call).  False where the queue is full.
        """
        raise NotImplementedError

    def answers(self) -> list[Answer]:
        """What came since the last call; never waits."""
        raise NotImplementedError

    def seen(self, process: int, pid: int, t: int) -> None:
        """Look at a process early, so that its files are open should it end soon."""
        raise NotImplementedError

    def gone(self, process: int) -> None:
        """The process ended: its questions are still answered, then it is forgotten."""
        raise NotImplementedError

    def close(self) -> None:
        """End the child and the thread."""
        raise NotImplementedError
