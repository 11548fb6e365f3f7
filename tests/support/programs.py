"""Which BPF programs the kernel holds, and whose they are."""

from __future__ import annotations

import contextlib
import errno
import struct
from pathlib import Path

from dsprobe.probes import syscalls

_UPROBES = ("uprobe_multi", "perf_event")
"""Types of links: from Linux 6.6 on, and before."""
_PROG_GET_NEXT_ID = 11  # enum bpf_cmd (include/uapi/linux/bpf.h)


def loaded() -> set[int]:
    """Ids of all BPF programs in the kernel."""
    ids: set[int] = set()
    last = 0
    while True:
        try:
            _, attr = syscalls.bpf(_PROG_GET_NEXT_ID, struct.pack("<III", last, 0, 0))
        except OSError as e:
            if e.errno == errno.ENOENT:
                return ids
            raise
        last = struct.unpack_from("<I", attr, 4)[0]
        ids.add(last)


def held_by(pid: int) -> set[int]:
    """Ids of the programs that a process holds by descriptor, itself or through a link."""
    ids = set()
    for info in Path(f"/proc/{pid}/fdinfo").iterdir():
        try:
            lines = info.read_text().splitlines()
        except OSError:
            continue
        ids |= {int(line.split()[1]) for line in lines if line.startswith("prog_id:")}
    return ids


def in_libraries(pid: int) -> bool:
    """Whether a process holds a link that puts a program into a file."""
    for info in Path(f"/proc/{pid}/fdinfo").iterdir():
        with contextlib.suppress(OSError):
            words = info.read_text().split()
            if "link_type:" in words and words[words.index("link_type:") + 1] in _UPROBES:
                return True
    return False


def pinned() -> set[str]:
    """Everything in the BPF file system, which need not be mounted."""
    return {str(p) for p in Path("/sys/fs/bpf").rglob("*")}
