"""A viewer that stops reading costs the agent nothing, and is told exactly what it missed."""

from __future__ import annotations

import os
import socket
import tempfile
import threading
import time
from collections import Counter
from pathlib import Path

import pytest

from dsprobe.agent.agent import Agent, Settings
from dsprobe.probes.cpu import Cpu
from dsprobe.probes.softirq import Softirq
from dsprobe.recordings.connection import Connection
from tests.support import loads, netns
from tests.support.wait import until

pytestmark = [pytest.mark.bpf, pytest.mark.netns, pytest.mark.tools("gcc")]

QUEUE = 64 << 10
SECONDS = 4.0


def rss() -> int:
    with open("/proc/self/statm") as f:
        return int(f.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


class Taking:
    """What one viewer was given and told it lost, in rows by stream, and up to which frame."""

    def __init__(self, path: str, queue: int) -> None:
        self.connection = Connection(path, queue=queue)
        self.given: Counter[str] = Counter()
        self.lost: Counter[str] = Counter()

    def take(self, seconds: float = 0.0) -> None:
        for message in self.connection.receive(seconds):
            if message["m"] == "frame":
                self.given[message["s"]] += message["n"]
            elif message["m"] == "lost":
                for stream, (_, rows) in message["streams"].items():
                    self.lost[stream] += rows


def test_a_viewer_that_stops_reading_changes_nothing_and_misses_what_it_is_told() -> None:
    with tempfile.TemporaryDirectory(prefix="dsprobe-slow-") as folder, netns.pair() as pair:
        path = str(Path(folder, "socket"))
        # Every softirq run is "slow", so that events come by the thousand.
        agent = Agent([Softirq(slow_ns=1), Cpu()], Settings(socket=path))
        thread = threading.Thread(target=agent.run, daemon=True)
        thread.start()
        try:
            until(lambda: Path(path).exists(), "the agent listens")
            reader = Taking(path, 64 << 20)
            sleeper = Taking(path, QUEUE)
            sleeper.connection._sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            until(lambda: reader.take(0.05) or reader.given["softirq.cpu"], "softirqs are counted")

            flood = threading.Thread(
                target=loads.udp_flood, args=(pair, SECONDS), kwargs={"per_second": 5003}
            )
            ticks, began, memory = reader.given["cpu.load"], time.monotonic(), rss()
            flood.start()
            while flood.is_alive():
                reader.take(0.05)
            took = time.monotonic() - began
            # Four ticks a second, whoever sleeps; the sleeper's queue is all that it costs, beside
            # the flight ring, which the agent keeps for everybody.
            assert reader.given["cpu.load"] - ticks >= 0.8 * 4 * took
            grown = rss() - memory - agent.hub.flight.bytes
            assert grown < 16 << 20
            assert reader.given["softirq.slow"] > 5003
            assert not reader.lost

            agent.stop()
            until(lambda: reader.take(0.05) or reader.connection.ended, "the reader has it all")
            until(lambda: sleeper.take(0.05) or sleeper.connection.ended, "the sleeper woke up")
            thread.join(10)
            assert not thread.is_alive()
        finally:
            agent.stop()
            thread.join(10)
    assert sleeper.lost["softirq.slow"] > 0
    for stream, produced in agent.hub.produced.items():
        if not stream.startswith("meta."):
            assert reader.given[stream] == produced
            assert sleeper.given[stream] + sleeper.lost[stream] == produced, stream
