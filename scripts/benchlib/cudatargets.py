"""What tracing costs a process that launches kernels, and how soon it is traced."""

from __future__ import annotations

import contextlib
import json
import os
import pty
import shutil
import statistics
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

from benchlib.model import Context, Row
from dsprobe.probes import driver
from dsprobe.probes.launches import Launches
from dsprobe.probes.probe import Uprobe
from dsprobe.probes.tracer import Tracer
from dsprobe.probes.trial import Trial
from dsprobe.recordings.connection import Connection, Refused
from dsprobe.recordings.cudastreams import META_PLACEMENT
from dsprobe.recordings.live import LiveSession
from tests.cuda.tracing import tracing
from tests.simgpu.build import libcuda
from tests.simgpu.run import environment, workload
from tests.simgpu.scenario import Scenario, parse
from tests.support.wait import until

_LAUNCH = "cuLaunchKernel"
_FAST = {"gpu": {"kernel_us": 0.01}, "library": {"log_launches": False}}


def launches(ctx: Context) -> Iterator[Row]:
    """A thread that does nothing but launch, on the simulated driver: the worst there is."""
    count = 300_000 if ctx.quick else 1_000_000
    folder = ctx.folder / "launches"
    scenario = parse(_FAST)
    _rate(folder, scenario, count)  # builds what has to be built
    library = libcuda(scenario.flavour) / "libcuda.so.1"
    alone, empty, ours, told = [], [], [], 0
    for _ in range(ctx.rounds):
        alone.append(_rate(folder, scenario, count))
        with _empty_probe(library):
            empty.append(_rate(folder, scenario, count))
        with tracing(Launches, flavour=scenario.flavour) as tr:
            ours.append(_rate(folder, scenario, count, tr.step))
            tr.settle()
            told += int(tr.rows("cuda.thread")["count"].sum())
    if told != count * ctx.rounds:
        raise RuntimeError(f"{told} of {count * ctx.rounds} launches were counted")
    a, e, o = (statistics.median(x) for x in (alone, empty, ours))
    ns = [1e9 / o - 1e9 / a, 1e9 / e - 1e9 / a]
    yield Row("launches, one thread flat out, untraced", "per s", a)
    yield Row("launches, one thread flat out, traced (all counted)", "per s", o)
    yield Row("launches, times as long as untraced", "times", a / o)
    yield Row("launch, what tracing adds", "ns", ns[0])
    yield Row("launch, what a probe that does nothing adds there", "ns", ns[1])
    yield Row("launch, ours over one that does nothing", "times", ns[0] / ns[1], 1.15)


def _rate(folder: Path, scenario: Scenario, count: int, step: object = None) -> float:
    """Launches per second of one run of the workload, by its own clock."""
    child = subprocess.Popen(
        workload("launches", count=count), env=environment(folder, scenario),
        stdout=subprocess.PIPE, text=True,
    )  # fmt: skip
    while True:
        try:
            out, _ = child.communicate(timeout=0.1)
            break
        except subprocess.TimeoutExpired:
            if callable(step):
                step()
    if child.returncode:
        raise RuntimeError(f"the workload ended with {child.returncode}")
    return float(json.loads(out)["per_second"])


@contextlib.contextmanager
def _empty_probe(library: Path) -> Iterator[None]:
    """A probe that does nothing, where ours would sit."""
    tracer = Tracer([Trial()])
    fd = os.open(library, os.O_RDONLY | os.O_CLOEXEC)
    try:
        tracer.load()
        found = driver.read(fd, str(library))
        at = found.functions[_LAUNCH].offset + found.entries[_LAUNCH].offset
        errors = tracer.attach_library("bench", fd, [Uprobe("trial_nothing", at, 0)])
        if errors:
            raise RuntimeError(errors[0])
        yield
    finally:
        os.close(fd)
        tracer.close()


def attaching(ctx: Context) -> Iterator[Row]:
    """From the command to the first probe in a server that runs, on a terminal."""
    folder = ctx.folder / "attaching"
    cache = folder / "cache"
    cold, warm = [], []
    server = subprocess.Popen(
        workload("launches", count=1 << 40, rate=1000),
        env=environment(folder / "truth", parse(_FAST)), stdout=subprocess.DEVNULL,
    )  # fmt: skip
    try:
        until(lambda: driver.mapped_by(server.pid), "the server has started")
        for _ in range(3):
            shutil.rmtree(cache, ignore_errors=True)
            cold.append(_attach(ctx, folder, cache, server.pid))
            warm += [_attach(ctx, folder, cache, server.pid) for _ in range(2)]
    finally:
        server.kill()
        server.wait()
    yield Row("dsprobe top to a running server traced", "s", statistics.median(warm), 1)
    yield Row("dsprobe top to a running server traced, first time", "s", statistics.median(cold))


def _attach(ctx: Context, folder: Path, cache: Path, pid: int) -> float:
    """Seconds until the first probe sat in the library, by the record that says so."""
    path = folder / "socket"
    ours, theirs = pty.openpty()
    begin = time.monotonic_ns()
    top = subprocess.Popen(
        [ctx.dsprobe, "top", "--socket", str(path)],
        stdin=theirs, stdout=theirs, stderr=subprocess.DEVNULL,
        env={**os.environ, "DSPROBE_CACHE": str(cache), "TERM": "xterm"},
    )  # fmt: skip
    os.close(theirs)
    try:
        session = LiveSession(until(lambda: _connect(path), "the agent listens"))

        def placed() -> int:
            session.refresh()
            rows = session.read(META_PLACEMENT.name, 0, 1 << 63)
            return int(rows["t"].min()) if len(rows) else 0

        took = until(placed, "probes are attached") - begin
        session.close()
        time.sleep(0.2)  # an agent ends with its last viewer, so that must be the screen
        until(lambda: top.poll() is not None or _told_to_end(ours), "the screen has ended")
        until(lambda: not path.exists(), "the agent has ended")
        return took / 1e9
    finally:
        top.kill()
        top.wait()
        os.close(ours)


def _told_to_end(terminal: int) -> bool:
    """Press q, which a screen that is not up yet does not hear, and take what it writes, or it
    would wait; always False."""
    with contextlib.suppress(OSError):
        os.set_blocking(terminal, False)
        os.write(terminal, b"q")
        os.read(terminal, 1 << 16)
    return False


def _connect(path: Path) -> Connection | None:
    try:
        return Connection(str(path))
    except Refused:
        return None
