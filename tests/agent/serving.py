"""A hub and its socket, served by a thread, with a clock that the test sets."""

from __future__ import annotations

import selectors
import socket
import tempfile
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from queue import SimpleQueue
from typing import Any

from dsprobe.agent.flight import Flight
from dsprobe.agent.hub import Hub
from dsprobe.agent.server import Server
from dsprobe.recordings import wire
from dsprobe.recordings.streams import SOFTIRQ_SLOW
from tests.support.wait import until

SECOND = 10**9


class Serving:
    """``now`` is the server's clock (ns); ``marks`` and ``stops`` are what viewers asked for."""

    def __init__(self, path: str, span: int, limit: int) -> None:
        self.path, self.now = path, 1000 * SECOND
        self.marks: list[str] = []
        self.stops = 0
        self._selector = selectors.DefaultSelector()
        self.hub = Hub(Flight(span, limit))
        self.server = Server(
            path, self.hub, self._selector, lambda: self.now, self.marks.append, self._stop
        )
        self._jobs: SimpleQueue[Callable[[], None]] = SimpleQueue()
        self._over = False
        self.turns = 0
        self._thread = threading.Thread(target=self._serve, daemon=True)
        self._thread.start()

    def _stop(self) -> None:
        self.stops += 1

    def _serve(self) -> None:
        while not self._over:
            for key, mask in self._selector.select(0.005):
                key.data(mask)
            while not self._jobs.empty():
                self._jobs.get()()
            self.server.flush()
            self.turns += 1

    def do(self, job: Callable[[], None]) -> None:
        """Run a job in the thread that serves, and wait for it."""
        done = threading.Event()
        self._jobs.put(lambda: (job(), done.set())[0])
        assert done.wait(20), "the server stands still"

    def publish(self, rows: int = 1, times: int = 1) -> None:
        """Frames of softirq.slow, 10 ms apart on our clock."""

        def job() -> None:
            for _ in range(times):
                self.now += SECOND // 100
                self.hub.publish(SOFTIRQ_SLOW, SOFTIRQ_SLOW.rows(t=[self.now] * rows))

        self.do(job)

    def turn(self) -> None:
        """Wait for the server to have gone round twice."""
        turns = self.turns
        until(lambda: self.turns > turns + 1, "the server goes round")

    def raw(self) -> socket.socket:
        """A connection that has said nothing."""
        s = socket.socket(socket.AF_UNIX)
        s.settimeout(10)
        s.connect(self.path)
        return s

    def end(self) -> None:
        self._over = True
        self._thread.join(20)
        assert not self._thread.is_alive()
        self.server.close("over")
        self._selector.close()


@contextmanager
def serving(span: int = 600 * SECOND, limit: int = 256 << 20) -> Iterator[Serving]:
    with tempfile.TemporaryDirectory(prefix="dsprobe-") as folder:
        it = Serving(str(Path(folder, "socket")), span, limit)
        try:
            yield it
        finally:
            it.end()


def read_all(s: socket.socket) -> list[dict[str, Any]]:
    """All messages until the other side ends the connection."""
    receiver = wire.Receiver(wire.MAX_MESSAGE)
    messages: list[dict[str, Any]] = []
    while True:
        try:
            data = s.recv(1 << 20)
        except ConnectionResetError:
            return messages
        if not data:
            return messages
        messages += receiver.feed(data)
