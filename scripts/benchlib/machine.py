"""The machine the figures belong to."""

from __future__ import annotations

import os
import platform
import time
from pathlib import Path


def describe() -> dict[str, str]:
    """What somebody needs to know to judge a figure: ``{"CPU": ..., "kernel": ...}``."""
    return {
        "date": time.strftime("%Y-%m-%d"),
        "CPU": f"{_cpu()}, {os.cpu_count()} CPUs{_virtual()}",
        "memory": f"{os.sysconf('SC_PAGE_SIZE') * os.sysconf('SC_PHYS_PAGES') / 2**30:.0f} GiB",
        "kernel": platform.release(),
        "system": platform.freedesktop_os_release().get("PRETTY_NAME", "?"),
        "Python": platform.python_version(),
    }


def cpu(n: int) -> int:
    """A CPU to pin the ``n``-th party to; parties share CPUs where there are too few."""
    usable = sorted(os.sched_getaffinity(0))
    return usable[n % len(usable)]


def _cpu() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.machine()


def _virtual() -> str:
    flags = Path("/proc/cpuinfo").read_text()
    return " of a virtual machine" if " hypervisor" in flags else ""
