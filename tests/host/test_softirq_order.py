"""Entries and exits in awkward orders, played to the BPF programs by hand.

The vectors used (HI, TASKLET, IRQ_POLL) hardly ever run by themselves, so the real events that
come in meanwhile do not disturb.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator

import numpy as np
import pytest

from dsprobe.probes.softirq import Softirq
from dsprobe.probes.tracer import Tracer
from dsprobe.recordings.model import Rows
from dsprobe.recordings.streams import SOFTIRQ_CPU, VECTORS
from tests.support.bpfrun import run_raw_tracepoint

pytestmark = pytest.mark.bpf

HI, IRQ_POLL = VECTORS.index("HI"), VECTORS.index("IRQ_POLL")


class Kernel:
    """Plays the kernel's part."""

    def __init__(self, probe: Softirq, tracer: Tracer) -> None:
        self._probe = probe
        self._programs = tracer._attached["softirq"].programs
        self.rows(HI)

    def _run(self, name: str, cpu: int, vec: int) -> int:
        run_raw_tracepoint(self._programs[f"softirq_{name}"], cpu, vec)
        return time.monotonic_ns()

    def raises(self, cpu: int, vec: int) -> int:
        return self._run("raise", cpu, vec)

    def enters(self, cpu: int, vec: int) -> int:
        return self._run("entry", cpu, vec)

    def leaves(self, cpu: int, vec: int) -> int:
        return self._run("exit", cpu, vec)

    def rows(self, vec: int) -> Rows:
        """Rows of ``vec`` since the last call, by CPU."""
        batches = self._probe.collect(time.monotonic_ns())
        rows = batches[0][1] if batches else SOFTIRQ_CPU.empty()
        return np.sort(rows[rows["vec"] == vec], order="cpu")


@pytest.fixture
def kernel() -> Iterator[Kernel]:
    probe = Softirq()
    tracer = Tracer([probe])
    try:
        assert {c.status for c in tracer.load()} == {"attached"}
        yield Kernel(probe, tracer)
    finally:
        tracer.close()


@pytest.fixture
def cpus() -> tuple[int, int]:
    usable = sorted(os.sched_getaffinity(0))
    assert len(usable) >= 2, "needs two CPUs"
    return usable[0], usable[1]


def test_runs_that_interleave_on_two_cpus_are_kept_apart(
    kernel: Kernel, cpus: tuple[int, int]
) -> None:
    """Both CPUs may be idle, in the same task 0: only the CPU tells the runs apart."""
    a, b = cpus
    t0 = time.monotonic_ns()
    t1 = kernel.enters(a, HI)
    t2 = kernel.enters(b, HI)
    t3 = kernel.leaves(a, HI)
    t4 = kernel.leaves(b, HI)
    of_a, of_b = kernel.rows(HI)
    assert (of_a["cpu"], of_a["count"], of_b["cpu"], of_b["count"]) == (a, 1, b, 1)
    assert t2 - t1 <= of_a["busy"] <= t3 - t0
    assert t3 - t2 <= of_b["busy"] <= t4 - t1


def test_two_vectors_of_one_cpu_are_kept_apart(kernel: Kernel, cpus: tuple[int, int]) -> None:
    a, _ = cpus
    kernel.raises(a, HI)
    kernel.raises(a, IRQ_POLL)
    kernel.enters(a, HI)
    kernel.leaves(a, HI)
    kernel.enters(a, IRQ_POLL)
    kernel.leaves(a, IRQ_POLL)
    batches = kernel._probe.collect(time.monotonic_ns())
    rows = batches[0][1]
    hi, poll = rows[rows["vec"] == HI][0], rows[rows["vec"] == IRQ_POLL][0]
    assert hi["count"] == poll["count"] == hi["waits"] == poll["waits"] == 1
    assert poll["wait"] > hi["busy"]  # it stood in line behind the other


def test_a_raise_during_the_run_waits_for_the_next_run(
    kernel: Kernel, cpus: tuple[int, int]
) -> None:
    a, _ = cpus
    t0 = time.monotonic_ns()
    kernel.raises(a, HI)
    kernel.raises(a, HI)  # already pending: the wait began with the first
    t1 = kernel.enters(a, HI)
    t2 = time.monotonic_ns()
    kernel.raises(a, HI)
    kernel.leaves(a, HI)
    t3 = kernel.enters(a, HI)
    kernel.leaves(a, HI)
    (row,) = kernel.rows(HI)
    assert (row["count"], row["waits"]) == (2, 2)
    assert 0 < row["wait"] <= (t1 - t0) + (t3 - t2)
    assert row["wait_hist"].sum() == row["run_hist"].sum() == 2


def test_a_thousand_reraises_never_give_a_negative_time(
    kernel: Kernel, cpus: tuple[int, int]
) -> None:
    """A negative time would be huge, as it is unsigned."""
    start = time.monotonic_ns()
    for n in range(1009):
        cpu = cpus[n % 2]
        kernel.raises(cpu, HI)
        kernel.enters(cpu, HI)
        if n % 3:
            kernel.raises(cpu, HI)
        kernel.leaves(cpu, HI)
    spent = time.monotonic_ns() - start
    rows = kernel.rows(HI)
    assert rows["count"].sum() == rows["waits"].sum() == 1009
    assert rows["busy"].sum() <= spent
    assert rows["wait"].sum() <= 2 * spent


def test_an_exit_without_an_entry_says_nothing(kernel: Kernel, cpus: tuple[int, int]) -> None:
    """A run that was going on when the programs were attached."""
    kernel.leaves(cpus[0], HI)
    assert not len(kernel.rows(HI))


def test_a_vector_that_does_not_exist_is_ignored(kernel: Kernel, cpus: tuple[int, int]) -> None:
    before = kernel._probe._cells.snapshot()
    for vec in (len(VECTORS), 1 << 31, (1 << 64) - 1):
        kernel.raises(cpus[0], vec)
        kernel.enters(cpus[0], vec)
        kernel.leaves(cpus[0], vec)
    after = kernel._probe._cells.snapshot()
    for vec in (HI, IRQ_POLL):
        cells = slice(vec, None, len(VECTORS))
        assert (before["count"][cells] == after["count"][cells]).all()
