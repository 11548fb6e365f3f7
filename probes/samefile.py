"""Whether two descriptors are of one file beneath: an overlay shows a file of the layer below as
one of its own device, while probes go into the file below.

Device and inode do not tell, build ids are those of all copies, and breakpoints may be another
tracer's.  So a mark of our own goes into the one file, at a place where none was, and is looked for
in the other; then it is taken away, and has to be gone there as well.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import random
from collections.abc import Sequence

from dsprobe.probes import syscalls

PLACES = range(9, 15)
"""Padding in the identification of an ELF file: nothing reads it, nothing runs it, and it is zeros,
an instruction that takes a breakpoint (include/uapi/linux/elf.h, EI_PAD)."""
ROUNDS = 3
"""Another tracer may look in the same way at the same time: it would have to choose the same places
at the same moments."""
_BREAKPOINT = 0xCC


def same_file(file: int, others: Sequence[int]) -> int | None:
    """The index of the one of ``others`` that is the same file as ``file``; None where none is.

    Raises OSError where it cannot be told.
    """
    with contextlib.ExitStack() as stack:
        pages = {}
        for i, other in enumerate(others):
            page = mmap.mmap(other, mmap.PAGESIZE, mmap.MAP_PRIVATE, mmap.PROT_READ)
            pages[i] = stack.enter_context(page)
        for _ in range(ROUNDS):
            pages = _marked(file, pages)
            if not pages:
                return None
    return min(pages)


def _marked(file: int, pages: dict[int, mmap.mmap]) -> dict[int, mmap.mmap]:
    """Those in which a mark that is put into ``file`` comes and goes."""
    places = [at for at in PLACES if all(page[at] != _BREAKPOINT for page in pages.values())]
    if not places:
        raise OSError("other tracers' breakpoints are in the way")
    at = random.choice(places)  # noqa: S311
    mark = syscalls.open_mark(file, at)
    try:
        found = {i: page for i, page in pages.items() if page[at] == _BREAKPOINT}
    finally:
        os.close(mark)
    return {i: page for i, page in found.items() if page[at] != _BREAKPOINT}
