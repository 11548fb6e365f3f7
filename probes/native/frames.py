"""What is asked about native stacks, and what is answered."""

from __future__ import annotations

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
