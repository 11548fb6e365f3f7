"""What it costs to know which processes use CUDA, on a host with many."""

from __future__ import annotations

import selectors
import statistics
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from benchlib.model import Context, Row
from dsprobe.agent.agent import DRAIN_NS, QUIET_NS
from dsprobe.agent.discovery import Discovery
from dsprobe.agent.search import Found, Scanned
from dsprobe.probes import driver
from tests.support.native import program
from tests.support.wait import until

_PROCESSES = 2000
_STARTED = 200
"""Programs started a second."""
_SPANS = 5


def discovery(ctx: Context) -> Iterator[Row]:
    """CPU time of this process, all its threads: processes that start and end are not in it."""
    seconds = 5 if ctx.quick else 20
    with _sleepers(_PROCESSES):
        ctx.say(f"bench: {_PROCESSES:,} processes, a scan every second")
        scans = _share(seconds, 1.0, lambda: list(driver.users()))
        ctx.say(f"bench: {_PROCESSES:,} processes, discovery")
        with _discovery() as look:
            told = _share(seconds, QUIET_NS / 1e9, look)
            with _sleepers(0, _STARTED):
                busy = _share(seconds, DRAIN_NS / 1e9, look)
    many = f"{_PROCESSES:,} idle processes"
    yield Row(f"scan of all maps every second, {many}", "% of a core", 100 * scans)
    yield Row(f"discovery, {many}", "% of a core", 100 * told, 1)
    note = "small processes; to scan one with thousands of mappings takes several times as long"
    yield Row("scan every second over discovery", "times", scans / told, 5, True, note)
    yield Row(f"discovery, and {_STARTED} programs started a second", "% of a core", 100 * busy, 2)


def _share(seconds: float, every: float, act: Callable[[], object]) -> float:
    """CPU time over time while ``act`` is called every so often: the median of several spans, as a
    library that comes by meanwhile is read and tried out."""
    shares = []
    for _ in range(_SPANS):
        began, before = time.monotonic(), time.process_time()
        due = began
        while due < began + seconds / _SPANS:
            act()
            due += every
            time.sleep(max(0.0, due - time.monotonic()))
        shares.append((time.process_time() - before) / (time.monotonic() - began))
    return statistics.median(shares)


@contextmanager
def _discovery() -> Iterator[Callable[[], bool]]:
    """Discovery after its first scan; what is called as often as the agent calls it, and says
    whether a scan has ended."""
    with selectors.DefaultSelector() as selector:
        d = Discovery(selector, "bench")
        d.begin()

        def look() -> bool:
            for key, mask in selector.select(0):
                key.data(mask)
            given, _ = d.tick(time.monotonic_ns())
            for g in given:
                if isinstance(g, Found):
                    g.close()
            return any(isinstance(g, Scanned) for g in given)

        try:
            until(look, "the first scan ends", 60)
            yield look
        finally:
            d.close()


@contextmanager
def _sleepers(n: int, rate: int = 0) -> Iterator[None]:
    """So many idle processes, and so many programs started a second."""
    command = [str(program("sleepers")), str(n), *([str(rate)] if rate else [])]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as p:
        try:
            if not p.stdout or p.stdout.readline() != b"up\n":
                raise RuntimeError(f"{n:,} processes could not be started")
            yield
        finally:
            if p.stdin:
                p.stdin.close()
            p.wait(20)
