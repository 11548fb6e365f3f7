"""This host: its facts, and the file systems that tracing wants mounted."""

from __future__ import annotations

import ctypes
import os
import time
from importlib.metadata import version
from pathlib import Path

_libc = ctypes.CDLL(None, use_errno=True)
MOUNTS = (("tracefs", "/sys/kernel/tracing"), ("bpf", "/sys/fs/bpf"))


def facts() -> dict[str, str]:
    """The rows of meta.session."""
    u = os.uname()
    local = time.localtime()
    return {
        "host": u.nodename,
        "kernel": u.release,
        "machine": u.machine,
        "cpus": str(os.cpu_count() or 1),
        "boot_id": Path("/proc/sys/kernel/random/boot_id").read_text().strip(),
        "zone": local.tm_zone,
        "utc_offset_s": str(local.tm_gmtoff),
        "version": version("dsprobe"),
        "agent_pid": str(os.getpid()),
    }


def mounted(kind: str, at: str) -> bool:
    """Whether a file system of ``kind`` is mounted ``at`` (proc_mounts(5))."""
    # As bytes: anybody may have mounted something at a place whose name is not UTF-8.
    lines = Path("/proc/self/mounts").read_bytes().split(b"\n")
    return any(line.split(b" ")[1:3] == [at.encode(), kind.encode()] for line in lines)


def mount_missing() -> list[str]:
    """Mount tracefs and bpffs where they are absent; a sentence for each thing done or refused.

    A fresh machine may have neither.  dsprobe itself pins nothing and reads no trace file, but
    doctor and the tools next to it look there.
    """
    said = []
    for kind, at in MOUNTS:
        if mounted(kind, at):
            continue
        if not os.path.isdir(at):
            said.append(f"{kind} has no place to be mounted: this kernel has no {at}")
        elif _libc.mount(kind.encode(), at.encode(), kind.encode(), 0, None) == 0:
            said.append(f"mounted {kind} at {at}")
        else:
            why = os.strerror(ctypes.get_errno())
            said.append(f"{kind} is not mounted at {at} and cannot be: {why}")
    return said
