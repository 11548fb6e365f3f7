"""What the screen costs: CPU, bytes to the terminal, time to the first frame."""

from __future__ import annotations

import fcntl
import os
import pty
import select
import signal
import struct
import termios
import time
from collections.abc import Iterator
from contextlib import contextmanager

from benchlib.cost import agent, busy_network
from benchlib.model import Context, Row
from benchlib.processes import cpu_seconds
from tests.support.netns import pair

_BUDGETS = {(80, 24): 20_000.0, (160, 50): 60_000.0}  # bytes/s
_A_LANE = b"net_rx"  # every frame that shows anything has this lane's name


class Terminal:
    """A program in a terminal of its own; ``took`` is the time to its first frame in s."""

    def __init__(self, argv: list[str], columns: int, lines: int) -> None:
        self._began = time.perf_counter()
        self.pid, self._fd = pty.fork()
        if self.pid == 0:
            size = struct.pack("HHHH", lines, columns, 0, 0)
            fcntl.ioctl(0, termios.TIOCSWINSZ, size)
            os.execve(argv[0], argv, os.environ | {"TERM": "xterm-256color", "LANG": "C.UTF-8"})

    def first_frame(self, timeout: float = 20) -> float:
        """Seconds from the start of the program until a lane is on the screen."""
        seen = b""
        while _A_LANE not in seen:
            if time.perf_counter() - self._began > timeout:
                raise RuntimeError(f"no frame within {timeout:g} s, only {seen[-200:]!r}")
            seen += self._read(0.1)
        return time.perf_counter() - self._began

    def bytes_within(self, seconds: float) -> int:
        """How many bytes it writes in the next ``seconds``."""
        end, n = time.monotonic() + seconds, 0
        while (left := end - time.monotonic()) > 0:
            n += len(self._read(left))
        return n

    def _read(self, timeout: float) -> bytes:
        if not select.select([self._fd], [], [], timeout)[0]:
            return b""
        try:
            return os.read(self._fd, 65536)
        except OSError:
            raise RuntimeError("the program has ended") from None

    def close(self) -> None:
        """End it, and take what it writes meanwhile."""
        os.kill(self.pid, signal.SIGTERM)
        deadline = time.monotonic() + 5
        while os.waitpid(self.pid, os.WNOHANG)[0] == 0:
            try:
                self._read(0.05)
            except RuntimeError:
                time.sleep(0.02)
            if time.monotonic() > deadline:
                os.kill(self.pid, signal.SIGKILL)
        os.close(self._fd)


@contextmanager
def terminal(argv: list[str], columns: int, lines: int) -> Iterator[Terminal]:
    t = Terminal(argv, columns, lines)
    try:
        yield t
    finally:
        t.close()


def screen(ctx: Context) -> Iterator[Row]:
    """``dsprobe top`` on a running agent, under a load that moves all lanes."""
    seconds = 5 if ctx.quick else 20
    with agent(ctx) as (_, path), pair() as p, busy_network(p):
        for (columns, lines), budget in _BUDGETS.items():
            where = f"at {columns}x{lines}"
            argv = [ctx.dsprobe, "top", "--socket", path]
            with terminal(argv, columns, lines) as t:
                first = t.first_frame()
                t.bytes_within(2)  # the start draws everything once
                before = cpu_seconds(t.pid)
                written = t.bytes_within(seconds)
                spent = cpu_seconds(t.pid) - before
            yield Row(f"screen, first frame {where}", "s", first, 1)
            yield Row(f"screen CPU {where}", "% of a core", 100 * spent / seconds, 4)
            yield Row(f"screen to terminal {where}", "bytes/s", written / seconds, budget)
