"""Network namespaces that live on this host, and a way to read their /proc/net files.

A namespace is read through a process that lives in it (/proc/PID/net), or, where only a name under
/run/netns holds it, by a thread that enters it for the moment.  No descriptor is kept: that would
keep a namespace alive which its owner has removed.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

NAMED = Path("/run/netns")
RESCAN_NS = 2_000_000_000
"""How often probes look for new namespaces."""
MAX_FILE = 4 << 20
_CLONE_NEWNET = 0x40000000
_libc = ctypes.CDLL(None, use_errno=True)


@dataclass(frozen=True)
class Namespace:
    """``pids`` are a few processes that live in it; ``path`` is a name that holds it, or ""."""

    inode: int
    name: str
    pids: tuple[int, ...]
    path: str


def discover(proc: Path = Path("/proc"), named: Path = NAMED) -> dict[int, Namespace]:
    """All namespaces by inode number.  Costs about 5 us a process (one readlink each)."""
    pids: dict[int, list[int]] = {}
    for entry in os.listdir(proc):
        if entry.isdigit():
            with contextlib.suppress(OSError, ValueError):
                inode = int(os.readlink(proc / entry / "ns" / "net")[5:-1])
                pids.setdefault(inode, []).append(int(entry))
    paths: dict[int, str] = {}
    ours = os.stat(proc / "self/ns/net")
    with contextlib.suppress(OSError):
        for entry in os.listdir(named):
            with contextlib.suppress(OSError):
                found = os.stat(named / entry)
                if found.st_dev == ours.st_dev:  # else a plain file, left behind by its owner
                    paths[found.st_ino] = str(named / entry)
    host = ours.st_ino
    with contextlib.suppress(OSError):
        host = os.stat(proc / "1/ns/net").st_ino
    return {
        inode: Namespace(inode, _name(proc, inode, host, pids, paths),
                         tuple(pids.get(inode, ())[:4]), paths.get(inode, ""))
        for inode in pids.keys() | paths.keys()
    }  # fmt: skip


def _name(
    proc: Path, inode: int, host: int, pids: dict[int, list[int]], paths: dict[int, str]
) -> str:
    if inode == host:
        return "host"
    if inode in paths:
        return os.path.basename(paths[inode])
    pid = min(pids[inode])
    with contextlib.suppress(OSError):
        comm = (proc / str(pid) / "comm").read_bytes()[:64].decode(errors="replace").strip()
        return f"{comm}/{pid}"
    return f"pid {pid}"


def read(ns: Namespace, *files: str, proc: Path = Path("/proc")) -> list[str] | None:
    """The text of files of /proc/net in ``ns``; None when the namespace has gone.

    Bytes that are not UTF-8 are kept as surrogates: names of interfaces may be any bytes.

    Each process is checked to live in the namespace still, through one open directory, so that a
    PID used again cannot pass off another namespace's numbers.
    """
    for pid in ns.pids:
        with contextlib.suppress(OSError, ValueError), _directory(proc / str(pid)) as d:
            if int(os.readlink("ns/net", dir_fd=d)[5:-1]) == ns.inode:
                return [_text(f"net/{f}", d) for f in files]
    if ns.path:
        with contextlib.suppress(OSError):
            return _inside(ns, files)
    return None


@contextlib.contextmanager
def _directory(path: Path) -> Iterator[int]:
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        yield fd
    finally:
        os.close(fd)


def _text(path: str, directory: int | None = None) -> str:
    fd = os.open(path, os.O_RDONLY, dir_fd=directory)
    with open(fd, "rb") as f:
        data = f.read(MAX_FILE)
    if len(data) == MAX_FILE:
        data = data[: data.rfind(b"\n") + 1]  # whole lines only
    return data.decode(errors="surrogateescape")


def _inside(ns: Namespace, files: tuple[str, ...]) -> list[str] | None:
    """Read in a thread that ends inside the namespace, so that no other code ever runs there."""
    out: list[str] = []

    def work() -> None:
        with contextlib.suppress(OSError), open(ns.path, "rb") as f:
            if os.fstat(f.fileno()).st_ino != ns.inode:
                return
            if _libc.setns(f.fileno(), _CLONE_NEWNET) == 0:
                out.extend(_text(f"/proc/thread-self/net/{name}") for name in files)

    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    thread.join()
    return out if len(out) == len(files) else None
