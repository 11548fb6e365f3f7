"""The agent's side of the child that reads ELF files: start, ask, watch, end.

A file that kills the child, or keeps it from answering, is named by the page they share.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import select
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from typing import Any

import msgpack

from dsprobe.probes.native.child import MAX_FDS, MAX_MESSAGE

_BUFFER = 2 << 20


class ChildLost(Exception):
    """The child ended or was ended; ``file`` is the number of the one it was reading, or 0."""

    def __init__(self, reason: str, file: int) -> None:
        super().__init__(reason)
        self.file = file


class Link:
    """One child.  ``wall_s`` and ``cpu_s`` are how long one answer may take it.

    Raises OSError where it cannot be started.
    """

    def __init__(self, wall_s: float, cpu_s: float) -> None:
        self._wall_s, self._cpu_s = wall_s, cpu_s
        page = os.memfd_create("page", os.MFD_CLOEXEC)
        try:
            os.ftruncate(page, mmap.PAGESIZE)
            self._page = mmap.mmap(page, mmap.PAGESIZE)
            self._sock, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            for s in (self._sock, theirs):
                s.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _BUFFER)
            isolated = ["-I"] if sys.flags.isolated else []
            with theirs:
                self._process = subprocess.Popen(
                    [sys.executable, *isolated, "-m", "dsprobe.probes.native.child",
                     str(theirs.fileno()), str(page), str(os.getpid())],
                    pass_fds=[theirs.fileno(), page],
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.DEVNULL,
                    stderr=subprocess.DEVNULL,
                    cwd="/",
                )  # fmt: skip
        finally:
            os.close(page)
        # The clock of the CPU time of another process (clock_getcpuclockid(3)).
        self._clock = (~self._process.pid << 3) | 2

    @property
    def pid(self) -> int:
        return self._process.pid

    def files(self, files: Sequence[tuple[int, int]]) -> None:
        """Hand over (number, descriptor) pairs; the descriptors stay the caller's too."""
        for i in range(0, len(files), MAX_FDS):
            part = files[i : i + MAX_FDS]
            message = msgpack.packb(("files", [number for number, _ in part]))
            self._send(message, [fd for _, fd in part])

    def tell(self, *message: Any) -> None:
        """Say what has no answer."""
        self._send(msgpack.packb(message), [])

    def ask(self, *message: Any) -> Any:
        """Its answer, which is not to be trusted."""
        self._send(msgpack.packb(message), [])
        self._wait(select.POLLIN)
        try:
            data = self._sock.recv(MAX_MESSAGE)
        except OSError:
            data = b""
        if not data:
            raise self._lost("it ended")
        self._page[:8] = bytes(8)  # what it does next is no fault of this file
        try:
            return msgpack.unpackb(data, strict_map_key=False)
        except (ValueError, msgpack.UnpackException):
            raise self._lost("it spoke nonsense") from None

    def _send(self, message: bytes, fds: list[int]) -> None:
        while True:
            try:
                socket.send_fds(self._sock, [message], fds, socket.MSG_DONTWAIT)
                return
            except BlockingIOError:
                self._wait(select.POLLOUT)
            except OSError as e:
                raise self._lost(f"it cannot be told: {e.strerror}") from None

    def _wait(self, event: int) -> None:
        """Until the socket is ready; a child that takes too long is ended."""
        poll = select.poll()
        poll.register(self._sock, event)
        start, cpu = time.monotonic(), self.cpu()
        while not poll.poll(100):
            if time.monotonic() - start > self._wall_s or self.cpu() - cpu > self._cpu_s:
                raise self._lost("it took too long")

    def cpu(self) -> float:
        """CPU time it has used, s."""
        try:
            return time.clock_gettime(self._clock)
        except OSError:
            return 0.0  # it has ended, which the socket tells

    def _lost(self, reason: str) -> ChildLost:
        file = int.from_bytes(self._page[:8], "little")
        self.end()
        return ChildLost(reason, file)

    def kill(self) -> None:
        """Without waiting for it to end."""
        self._process.send_signal(signal.SIGKILL)

    def end(self) -> None:
        self.kill()
        self._sock.close()
        # One that hangs in a file system ends when that lets go; subprocess reaps it later.
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(1)
