"""What running processes use, and what BPF they have attached."""

from __future__ import annotations

import os
import time
from pathlib import Path


def family(pid: int) -> list[int]:
    """``pid`` and all its descendants."""
    parents: dict[int, list[int]] = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            ppid = int(stat.read_text().rpartition(")")[2].split()[1])
        except OSError:
            continue
        parents.setdefault(ppid, []).append(int(stat.parent.name))
    out = [pid]
    for p in out:
        out += parents.get(p, [])
    return out


def cpu_seconds(pid: int) -> float:
    """CPU time ``pid`` has used, children not included."""
    # The CPU clock of another process, in ns where /proc/PID/stat counts ticks: CPUCLOCK_SCHED
    # is 2 (include/linux/posix-timers_types.h).
    return time.clock_gettime((~pid << 3) | 2)


def pss(pid: int) -> int:
    """Proportional set size of ``pid`` in bytes."""
    for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines():
        if line.startswith("Pss:"):
            return int(line.split()[1]) * 1024
    raise RuntimeError(f"no Pss of {pid}")


def attachments(pid: int) -> int:
    """How many BPF links and perf events the family of ``pid`` holds."""
    n = 0
    for p in family(pid):
        try:
            for fd in os.scandir(f"/proc/{p}/fd"):
                target = os.readlink(fd.path)
                n += "bpf_link" in target or "bpf-link" in target or "[perf_event]" in target
        except OSError:
            continue
    return n
