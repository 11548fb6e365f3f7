"""Lines of /proc/PID/maps, read in pieces: a process may have 65,530 mappings and more.

Source: proc_pid_maps(5); vm.max_map_count in Documentation/admin-guide/sysctl/vm.rst.
"""

from __future__ import annotations

import errno
from collections.abc import Iterator
from pathlib import Path

_PIECE = 1 << 20
MAX_BYTES = 64 << 20


def lines(pid: int, proc: Path = Path("/proc")) -> Iterator[bytes]:
    """Each line, without its end.  Raises OSError, also (EFBIG) where there is too much."""
    rest, size = b"", 0
    with open(proc / str(pid) / "maps", "rb", buffering=0) as f:
        while piece := f.read(_PIECE):
            size += len(piece)
            if size > MAX_BYTES:
                raise OSError(errno.EFBIG, f"its mappings fill more than {MAX_BYTES >> 20} MB")
            *whole, rest = (rest + piece).split(b"\n")
            yield from whole
    if rest:
        yield rest
