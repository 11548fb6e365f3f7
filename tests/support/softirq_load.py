"""Work that raises many kinds of softirq, bounded by the ``with`` block it runs in."""

from __future__ import annotations

import mmap
import os
import socket
import tempfile
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from tests.support.loads import iperf_server, udp_sink
from tests.support.netns import Pair

Step = Callable[[], None]

_PORT = 10


@contextmanager
def churn(pair: Pair, folder: Path) -> Iterator[None]:
    """Until the block ends: NET_RX (datagrams), BLOCK (direct writes to a file in ``folder``, which
    must lie on a block device), RCU (files and sockets opened and closed), NET_TX (a shaper that
    runs dry, on the way from left to right), HRTIMER (a paced TCP stream); TIMER and SCHED come
    with the CPUs being busy.
    """
    steps: list[Step] = []
    with udp_sink(pair.right, _PORT), tempfile.TemporaryDirectory(dir=folder) as scratch:
        # tbf wakes its queue by NET_TX when tokens have grown (net/sched/sch_api.c, watchdog).
        tbf = ("rate", "20mbit", "burst", "3000", "latency", "20ms")
        pair.left.run("tc", "qdisc", "add", "dev", pair.left.device, "root", "tbf", *tbf)
        steps.append(_datagrams(pair))
        steps.append(_direct_writes(Path(scratch)))
        steps.append(_openings(Path(scratch)))
        over = threading.Event()

        def loop(step: Step) -> None:
            while not over.is_set():
                step()

        threads = [threading.Thread(target=loop, args=(step,)) for step in steps]
        with iperf_server(pair.right):
            # Without the fq qdisc TCP paces itself with soft hrtimers (net/ipv4/tcp_output.c).
            paced = pair.left.popen("iperf3", "-c", pair.right.ipv4, "-t", "120", "--fq-rate", "2M")
            for thread in threads:
                thread.start()
            try:
                yield
            finally:
                over.set()
                for thread in threads:
                    thread.join()
                paced.kill()
                paced.communicate()
                pair.left.run("tc", "qdisc", "del", "dev", pair.left.device, "root")


def _datagrams(pair: Pair) -> Step:
    sock = pair.left.call(lambda: socket.socket(socket.AF_INET, socket.SOCK_DGRAM))
    to = (pair.right.ipv4, _PORT)

    def step() -> None:
        sock.sendto(b"x" * 800, to)  # blocks when the shaper's queue is full

    return step


def _direct_writes(folder: Path) -> Step:
    fd = os.open(folder / "direct", os.O_RDWR | os.O_CREAT | os.O_DIRECT, 0o600)
    page = mmap.mmap(-1, 4096)

    def step() -> None:
        os.pwrite(fd, page, 0)
        os.fdatasync(fd)

    return step


def _openings(folder: Path) -> Step:
    def step() -> None:
        path = folder / "opened"
        path.write_bytes(b"")
        path.unlink()
        socket.socket().close()
        threading.Event().wait(0.0005)  # leave CPU for the others

    return step
