"""Softirq counts and times against /proc/softirqs and arithmetic."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest

from dsprobe.probes.softirq import UNSEEN, Softirq
from dsprobe.probes.tracer import Tracer
from dsprobe.recordings.model import Rows
from dsprobe.recordings.streams import SLOW_KINDS, VECTORS
from tests.support import loads, netns
from tests.support.agents import watched
from tests.support.counters import Counts, softirqs
from tests.support.sampler import sampling
from tests.support.softirq_load import churn
from tests.support.wait import until

pytestmark = [
    pytest.mark.bpf,
    pytest.mark.netns,
    pytest.mark.tools("ip", "nsenter", "gcc", "iperf3", "tc"),
]

NET_RX = VECTORS.index("NET_RX")


@contextmanager
def pinned(cpu: int) -> Iterator[None]:
    """This thread runs on ``cpu`` alone."""
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {cpu})
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)


def by_vector_and_cpu(rows: Rows, field: str) -> Counts:
    out = np.zeros_like(softirqs())
    np.add.at(out, (rows["vec"], rows["cpu"]), rows[field].astype(np.int64))
    return out


def assert_between(ours: Counts, low: Counts, high: Counts) -> None:
    """Within 0.5 % or 2, whichever is more, of what the kernel counted (``low`` to ``high``)."""
    slack = np.maximum(2, 0.005 * high)
    wrong = (ours < low - slack) | (ours > high + slack)
    assert not wrong.any(), "\n".join(
        f"{VECTORS[v]} on CPU {c}: {ours[v, c]}, /proc/softirqs {low[v, c]} to {high[v, c]}"
        for v, c in np.argwhere(wrong)
    )


def assert_all_told(counted: Counts, lost: int, low: Counts, high: Counts) -> None:
    """Each cell within what the kernel counted, but for ``lost`` that may be anywhere; and all
    cells together with those."""
    assert_between(counted, low - lost, high)
    slack = max(2, 0.005 * high.sum())
    assert low.sum() - slack <= counted.sum() + lost <= high.sum() + slack


def unseen_after(losses: Rows, start: int) -> int:
    """How many softirqs no program was run for, by the losses after ``start``."""
    ours = (losses["stream"] == "softirq.cpu") & (losses["reason"] == UNSEEN)
    return int(losses["lost"][ours & (losses["t"] > start)].sum())


def test_counts_of_every_vector_and_cpu_are_the_kernels(pair: netns.Pair) -> None:
    with sampling() as truth, watched(Softirq(compare_ns=0)) as w:
        w.pass_by()  # a first and last interval without load: moments are known to some ms
        with churn(pair, Path("/var/tmp")):
            for cpu in os.sched_getaffinity(0):
                loads.udp_flood(pair.reversed, 0.7, cpu=cpu)
        w.pass_by()
        w.stop()
    rows = w.rows("softirq.cpu")
    # From the end of the first interval to the end of the last.
    start, end = int(rows["t"].min()), int(rows["t"].max())
    counted = by_vector_and_cpu(rows[rows["t"] > start], "count")
    low = truth.at_least(end) - truth.at_most(start)
    high = truth.at_most(end) - truth.at_least(start)
    assert_all_told(counted, unseen_after(w.rows("meta.loss"), start), low, high)
    busy = by_vector_and_cpu(rows[rows["t"] > start], "busy").sum(axis=0)
    assert (busy <= end - start).all(), f"{busy} ns of softirqs in {end - start} ns"
    # The load did what this test is about: many vectors, and every CPU.
    seen = {VECTORS[v] for v in np.flatnonzero(low.sum(axis=1) > 10)}
    assert seen >= {"TIMER", "NET_TX", "NET_RX", "BLOCK", "SCHED", "RCU"}
    assert (low[NET_RX] > 1000).all()


def test_histograms_agree_with_the_sums(pair: netns.Pair) -> None:
    with watched("softirq") as w:
        loads.udp_flood(pair, 1)
    rows = w.rows("softirq.cpu")
    assert rows["count"].sum() > 1000
    # Over all intervals, as an interval's edge may cut through a run.
    vectors = np.unique(rows["vec"])
    of = {v: rows[rows["vec"] == v] for v in vectors}
    for v in vectors:
        count, waits = int(of[v]["count"].sum()), int(of[v]["waits"].sum())
        assert abs(int(of[v]["run_hist"].sum()) - count) <= len(os.sched_getaffinity(0))
        assert abs(int(of[v]["wait_hist"].sum()) - waits) <= len(os.sched_getaffinity(0))
        assert waits <= count
    for total, hist in (("busy", "run_hist"), ("wait", "wait_hist")):
        slots = rows[hist].sum(axis=0).astype(float)
        least = 2.0 ** np.arange(len(slots))
        assert slots[-1] == 0  # the open-ended one: nothing took minutes
        assert slots @ least - slots[0] <= rows[total].sum() <= 2 * (slots @ least)


@contextmanager
def loaded(probe: Softirq) -> Iterator[Tracer]:
    """``probe`` attached, to be collected by the test itself."""
    tracer = Tracer([probe])
    try:
        assert {c.status for c in tracer.load()} == {"attached"}
        yield tracer
    finally:
        tracer.close()


def test_a_prime_number_of_packets_is_that_many_runs(pair: netns.Pair) -> None:
    """One CPU sends 7919 datagrams, each handled by a NET_RX run of its own on that CPU."""
    cpu, probe = min(os.sched_getaffinity(0)), Softirq(compare_ns=0)
    with (
        loaded(probe),
        pinned(cpu),
        loads.udp_sink(pair.right),
        loads.udp_socket(pair.left, (pair.right.ipv4, 9)) as sock,
    ):
        sock.send(b"x")  # from now on the neighbour is known
        outer = softirqs()
        probe.collect(time.monotonic_ns())
        probe.losses()
        inner = softirqs()
        for _ in range(7919):
            sock.send(b"x")
        low = softirqs() - inner
        ((_, rows),) = probe.collect(time.monotonic_ns())
        high = softirqs() - outer
        losses = probe.losses()
    lost = sum(x.lost for x in losses if x.reason == UNSEEN)
    assert_all_told(by_vector_and_cpu(rows, "count"), lost, low, high)
    mine = rows[(rows["vec"] == NET_RX) & (rows["cpu"] == cpu)]
    count = int(mine["count"][0])
    # Other traffic of the machine adds runs, and a busy ksoftirqd makes one of several: what the
    # kernel counted meanwhile is the truth.
    assert high[NET_RX, cpu] >= 7919 // 2
    assert low[NET_RX, cpu] - lost <= count <= high[NET_RX, cpu]
    assert abs(int(mine["waits"][0]) - count) <= 1 + sum(x.lost for x in losses)


@pytest.mark.parametrize("program", ["softirq_entry", "softirq_raise"])
def test_what_no_program_was_run_for_is_lost(pair: netns.Pair, program: str) -> None:
    """Programs that rest see nothing, as on kernels that do not run them in every task."""
    cpus, probe = len(os.sched_getaffinity(0)), Softirq(compare_ns=0)
    with loaded(probe) as tracer:
        outer = softirqs()
        probe.collect(time.monotonic_ns())
        probe.losses()
        tracer.rest(program)
        inner = softirqs()
        loads.udp_flood(pair, 0.3)
        missed = (softirqs() - inner).sum()
        assert tracer.resume(program)
        least = missed if program == "softirq_entry" else 0
        assert missed > 1000
        # What runs between two readings hides some, until it is quiet.
        found = [0, 0]

        def told() -> bool:
            for _, rows in probe.collect(time.monotonic_ns()):
                found[0] += int(rows["count"].sum())
            found[1] += sum(x.lost for x in probe.losses() if x.reason == UNSEEN)
            return found[1] >= least - cpus

        until(told, "it is told")
        all_ = (softirqs() - outer).sum()
    # One on each CPU may be under way, and so not yet be known to be lost.
    assert sum(found) <= all_ + cpus
    if program == "softirq_raise":
        assert found[0] >= 0.99 * missed, "counting needs it not"


def test_every_run_over_the_threshold_is_a_row(pair: netns.Pair) -> None:
    """With a power of two for threshold, the histogram says how many slow rows there must be."""
    slot = 13
    with watched(Softirq(slow_ns=1 << slot)) as w:
        with churn(pair, Path("/var/tmp")):
            flood = loads.udp_flood(pair.reversed, 0.5, cpu=0)
            until(lambda: len(w.rows("softirq.slow")) > 100, "slow runs")
        w.pass_by()
    assert flood.sent > 1000
    slow, all_ = w.rows("softirq.slow"), w.rows("softirq.cpu")
    for kind, hist in (("run", "run_hist"), ("wait", "wait_hist")):
        of_kind = slow[slow["kind"] == SLOW_KINDS.index(kind)]
        assert (of_kind["duration"] >= 1 << slot).all()
        ours = np.bincount(of_kind["vec"], minlength=len(VECTORS))
        theirs = np.zeros(len(VECTORS), int)
        np.add.at(theirs, all_["vec"], all_[hist][:, slot:].sum(axis=1).astype(int))
        assert ours.sum() > 0
        # The ring is drained beside the tables, so an interval's edge may cut between the two.
        assert abs(ours - theirs).max() <= w.session.lost().get("softirq.slow", 0) + 2
    # Whoever was interrupted is named: the idle task is 0.
    assert (slow["comm"][slow["pid"] == 0] != b"").all()
    assert b"flood" in slow["comm"]
