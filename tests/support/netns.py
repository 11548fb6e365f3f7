"""Two network namespaces joined by a veth pair: traffic that touches nothing else.

Everything made here is removed again on every way out.  What a killed run left behind is removed
by the next one: the names carry the process that made them.
"""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

T = TypeVar("T")

_PREFIX = "dsp-t"
_RUN = Path("/run/netns")
_CLONE_NEWNET = 0x40000000
_libc = ctypes.CDLL(None, use_errno=True)


def _ip(*args: str, netns: str = "") -> None:
    where = ("-n", netns) if netns else ()
    done = subprocess.run(["ip", *where, *args], capture_output=True, text=True, timeout=20)
    if done.returncode:
        raise RuntimeError(f"ip {' '.join((*where, *args))}: {done.stderr.strip()}")


@dataclass(frozen=True)
class Namespace:
    """A network namespace with one veth device; ``ipv4`` and ``ipv6`` are its addresses."""

    name: str
    device: str
    ipv4: str
    ipv6: str

    @property
    def inode(self) -> int:
        """What dsprobe calls ``netns``: the inode number of the namespace."""
        return (_RUN / self.name).stat().st_ino

    def argv(self, *command: str) -> list[str]:
        """``command``, to be run inside (a plain setns and exec: the PID stays the same)."""
        return ["nsenter", f"--net={_RUN / self.name}", "--", *command]

    def run(self, *command: str, timeout: float = 60, check: bool = True) -> str:
        """Run ``command`` inside to its end; its stdout."""
        done = subprocess.run(self.argv(*command), capture_output=True, text=True, timeout=timeout)
        if check and done.returncode:
            raise RuntimeError(f"{' '.join(command)}: {done.stderr.strip() or done.stdout}")
        return done.stdout

    def popen(self, *command: str, **options: Any) -> subprocess.Popen[str]:
        """Start ``command`` inside; text pipes for stdout and stderr unless told otherwise."""
        options = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True} | options
        process: subprocess.Popen[str] = subprocess.Popen(self.argv(*command), **options)
        return process

    def call(self, function: Callable[[], T]) -> T:
        """``function()`` in a thread that is inside: sockets it makes stay in the namespace."""
        result: list[T] = []
        error: list[BaseException] = []

        def inside() -> None:
            try:
                fd = os.open(_RUN / self.name, os.O_RDONLY | os.O_CLOEXEC)
                try:
                    if _libc.setns(fd, _CLONE_NEWNET):
                        raise OSError(ctypes.get_errno(), f"setns {self.name}")
                finally:
                    os.close(fd)
                result.append(function())
            except BaseException as e:
                error.append(e)

        # A thread of its own, since the change of namespace stays with the thread.
        thread = threading.Thread(target=inside)
        thread.start()
        thread.join()
        if error:
            raise error[0]
        return result[0]

    def proc(self, path: str) -> str:
        """Contents of ``/proc/net/<path>`` as seen inside."""
        return self.call(lambda: Path("/proc/thread-self/net", path).read_text())


@dataclass(frozen=True)
class Pair:
    """``left`` and ``right`` see each other and nothing else."""

    left: Namespace
    right: Namespace

    @property
    def reversed(self) -> Pair:
        """The same pair, seen from the other side."""
        return Pair(self.right, self.left)


@contextmanager
def pair(*, segmentation: bool = True) -> Iterator[Pair]:
    """A fresh pair.  Without ``segmentation`` no packet is larger than the MTU (no GSO/TSO), so a
    packet lost is one segment lost.  Needs root (CAP_SYS_ADMIN, CAP_NET_ADMIN)."""
    sweep()
    with _serial_lock:
        global _serial
        _serial += 1
        stem = f"{_PREFIX}-{os.getpid()}-{_started(os.getpid())}-{_serial}"
    made = Pair(
        Namespace(f"{stem}-l", "veth0", "10.77.0.1", "fd77::1"),
        Namespace(f"{stem}-r", "veth0", "10.77.0.2", "fd77::2"),
    )
    try:
        for side in (made.left, made.right):
            _ip("netns", "add", side.name)
        peer = ("peer", "name", made.right.device, "netns", made.right.name)
        _ip("link", "add", made.left.device, "type", "veth", *peer, netns=made.left.name)
        for side in (made.left, made.right):
            # nodad: an address under duplicate detection cannot be used for a second.
            _ip("addr", "add", f"{side.ipv4}/24", "dev", side.device, netns=side.name)
            _ip("addr", "add", f"{side.ipv6}/64", "dev", side.device, "nodad", netns=side.name)
            if not segmentation:
                _ip("link", "set", side.device, "gso_max_segs", "1", netns=side.name)
            _ip("link", "set", "lo", "up", netns=side.name)
            _ip("link", "set", side.device, "up", netns=side.name)
        yield made
    finally:
        for side in (made.left, made.right):
            _remove(side.name)


_serial = 0
_serial_lock = threading.Lock()


def sweep() -> None:
    """Remove namespaces whose maker is gone."""
    for path in _RUN.glob(f"{_PREFIX}-*-*-*-?") if _RUN.is_dir() else ():
        pid, started = path.name.removeprefix(_PREFIX + "-").split("-")[:2]
        if not pid.isdigit() or str(_started(int(pid))) != started:
            _remove(path.name)


def _remove(name: str) -> None:
    path = _RUN / name
    if not path.exists():
        return
    # Whoever lives in a namespace of ours was started by us; a survivor would keep it alive.
    inside = subprocess.run(["ip", "netns", "pids", name], capture_output=True, text=True)
    for pid in inside.stdout.split():
        try:
            os.kill(int(pid), signal.SIGKILL)
        except ProcessLookupError:
            pass
    subprocess.run(["ip", "netns", "delete", name], capture_output=True)


def _started(pid: int) -> int:
    """Start time of ``pid`` in clock ticks since boot (proc_pid_stat(5), field 22); 0 if gone."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return 0
    return int(stat.rpartition(")")[2].split()[19])
