"""What the agent costs: CPU and memory, on an idle host and under load."""

from __future__ import annotations

import contextlib
import os
import subprocess
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from benchlib.model import Context, Row
from benchlib.processes import cpu_seconds, family, pss
from benchlib.tracers import Tracer, running
from tests.support import drops, loads
from tests.support.netns import Pair, pair


@contextmanager
def agent(ctx: Context) -> Iterator[tuple[int, str]]:
    """A ``dsprobe agent`` with all probes attached: (PID, socket)."""
    path = str(ctx.folder / "agent.sock")
    with running(Tracer("dsprobe agent", (ctx.dsprobe, "agent", "--socket", path))) as pid:
        yield pid, path


@contextmanager
def busy_network(p: Pair, per_second: float = 0, loss: float = 1) -> Iterator[None]:
    """Until the block ends: datagrams, as fast as they go or so many per second, and a TCP stream
    that loses ``loss`` %."""
    over = threading.Event()

    def run(load: str) -> None:
        while not over.is_set():
            if load == "udp":
                loads.udp_flood(p, 1, per_second=per_second)
            else:
                # Its server may still be busy with the run before.
                with contextlib.suppress(RuntimeError):
                    loads.iperf(p.left, p.right.ipv6, 2, "-b", "200M")

    with drops.loss(p.right, loss, "meta l4proto tcp"), loads.iperf_server(p.right):
        threads = [threading.Thread(target=run, args=(load,)) for load in ("udp", "tcp")]
        for thread in threads:
            thread.start()
        try:
            yield
        finally:
            over.set()
            for thread in threads:
                thread.join()


@dataclass(frozen=True)
class Use:
    """``cpu`` is a share of one core, ``memory`` is PSS in bytes; children included."""

    cpu: float
    memory: int


def use(pid: int, seconds: float) -> Use:
    """What ``pid`` and its children use over the next ``seconds``."""
    members = family(pid)
    start, before = time.monotonic(), sum(map(cpu_seconds, members))
    time.sleep(seconds)
    spent = sum(map(cpu_seconds, members)) - before
    return Use(spent / (time.monotonic() - start), sum(map(pss, members)))


def cost(ctx: Context) -> Iterator[Row]:
    """After it has settled; the loaded figures include what the flight ring then holds."""
    seconds = 4 if ctx.quick else 20
    cpus = os.cpu_count() or 1
    with agent(ctx) as (pid, _), pair() as p:
        idle = use(pid, seconds)
        yield Row("agent CPU, idle host", "% of a core", 100 * idle.cpu, 1)
        yield Row("agent PSS, idle host", "MB", idle.memory / 1e6, 110)
        with busy_network(p):
            loaded = use(pid, seconds)
        share = 100 * loaded.cpu / cpus
        yield Row("agent CPU, UDP flood and TCP loss", "% of the machine", share, 2)
        yield Row("agent PSS, UDP flood and TCP loss", "MB", loaded.memory / 1e6, 200)
    start = time.perf_counter()
    for _ in range(ctx.rounds):
        subprocess.run([ctx.dsprobe, "--help"], stdout=subprocess.DEVNULL, check=True)
    took = (time.perf_counter() - start) / ctx.rounds
    yield Row("dsprobe --help", "ms", 1000 * took, 150)
