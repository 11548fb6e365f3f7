"""What one hit of a probe costs a process: by where it sits, and by what our programs do."""

from __future__ import annotations

import os
import statistics
import subprocess
from collections.abc import Iterator
from pathlib import Path

from benchlib.model import Context, Row, failed
from dsprobe.probes import driver, hitcost, trial
from dsprobe.probes.probe import Uprobe
from dsprobe.probes.tracer import Tracer

_PLACED, _STEPPED = 200_000, 5_000  # calls of one measurement
_SYMBOL = "cuMemFree_v2"


def hits(ctx: Context) -> Iterator[Row]:
    """The genuine driver library, called without a device: every entry then returns at once."""
    tracer = Tracer([trial.Trial()])
    try:
        said = [c.reason for c in tracer.load() if c.status != "attached"]
        if said:
            raise RuntimeError(said[0])
        cost = hitcost.measure(tracer)
        yield Row("probe hit, instruction that is emulated", "ns", cost.emulated)
        yield Row("probe hit, instruction that is stepped", "ns", cost.stepped)
        yield Row("probe hits, entry and return", "ns", cost.with_return)
        yield from _genuine(ctx, tracer)
    finally:
        tracer.close()


def _genuine(ctx: Context, tracer: Tracer) -> Iterator[Row]:
    name = "driver library, probe at the first byte over ours"
    done = subprocess.run(
        [ctx.root / "scripts" / "fetch-driver"], capture_output=True, text=True, timeout=300
    )
    if done.returncode:
        yield failed(name, "times", done.stderr.strip())
        return
    fd = os.open(Path(done.stdout.strip()) / "libcuda.so.1", os.O_RDONLY | os.O_CLOEXEC)
    try:
        found = driver.read(fd, "libcuda.so.1")
        with trial.library_in_memory(fd) as copy, trial.process(copy) as target:

            def ns(times: int, *probes: Uprobe) -> float:
                errors = tracer.attach_library("bench", copy, list(probes))
                try:
                    if errors:
                        raise RuntimeError(errors[0])
                    runs = [hitcost.repeat(target, _SYMBOL, times) for _ in range(ctx.rounds)]
                    return statistics.median(runs) / times
                finally:
                    tracer.detach_library("bench")

            start = found.functions[_SYMBOL].offset
            at = start + found.entries[_SYMBOL].offset
            bare = ns(_PLACED)
            first = ns(_STEPPED, Uprobe("trial_nothing", start, 0)) - bare
            placed = ns(_PLACED, Uprobe("trial_nothing", at, 0)) - bare
            both = (
                ns(
                    _PLACED,
                    Uprobe("trial_nothing", at, 0),
                    Uprobe("trial_nothing_back", at, 0, True),
                )
                - bare
            )
            pair = (
                ns(
                    _STEPPED,
                    Uprobe("trial_nothing", start, 0),
                    Uprobe("trial_nothing_back", start, 0, True),
                )
                - bare
            )
    finally:
        os.close(fd)
    yield Row(f"driver library {_SYMBOL}, probe at its first byte", "ns", first)
    yield Row(f"driver library {_SYMBOL}, probe where we place it", "ns", placed)
    yield Row(name, "times", first / placed, 20, at_least=True)
    yield Row("driver library, entry and return, first byte over ours", "times", pair / both)
