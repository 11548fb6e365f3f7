"""Softirq counts and times against /proc/softirqs and arithmetic."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest

from dsprobe.probes.softirq import Softirq
from dsprobe.probes.tracer import Tracer
from dsprobe.recordings.model import Rows
from dsprobe.recordings.streams import SLOW_KINDS, VECTORS
from tests.support import loads, netns
from tests.support.agents import watched
from tests.support.counters import Counts, softirqs
from tests.support.sampler import sampling
from tests.support.softirq_load import churn
from tests.support.unseen import unseen
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


def test_counts_of_every_vector_and_cpu_are_the_kernels(pair: netns.Pair) -> None:
    with unseen() as hidden, sampling() as truth, watched("softirq") as w:
        w.pass_by()  # a first and last interval without load: moments are known to some ms
        with churn(pair, Path("/var/tmp")):
            for cpu in os.sched_getaffinity(0):
                loads.udp_flood(pair.reversed, 0.7, cpu=cpu)
        w.pass_by()
        w.stop()
        unheard = hidden()
    rows = w.rows("softirq.cpu")
    # From the end of the first interval to the end of the last.
    start, end = int(rows["t"].min()), int(rows["t"].max())
    counted = by_vector_and_cpu(rows[rows["t"] > start], "count")
    low = truth.at_least(end) - truth.at_most(start)
    high = truth.at_most(end) - truth.at_least(start)
    assert_between(counted, low - unheard, high)
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


def test_a_prime_number_of_packets_is_that_many_runs(pair: netns.Pair) -> None:
    """One CPU sends 7919 datagrams, each handled by a NET_RX run of its own on that CPU."""
    cpu, probe = min(os.sched_getaffinity(0)), Softirq()
    tracer = Tracer([probe])
    try:
        assert {c.status for c in tracer.load()} == {"attached"}
        with (
            pinned(cpu),
            loads.udp_sink(pair.right),
            loads.udp_socket(pair.left, (pair.right.ipv4, 9)) as sock,
        ):
            sock.send(b"x")  # from now on the neighbour is known
            probe.collect(time.monotonic_ns())
            before = softirqs()
            for _ in range(7919):
                sock.send(b"x")
            ((_, rows),) = probe.collect(time.monotonic_ns())
            after = softirqs()
    finally:
        tracer.close()
    assert_between(by_vector_and_cpu(rows, "count"), after - before, after - before)
    mine = rows[(rows["vec"] == NET_RX) & (rows["cpu"] == cpu)]
    # Other traffic may add a run, or share one.
    assert abs(int(mine["count"][0]) - 7919) <= 20
    assert int(mine["waits"][0]) == int(mine["count"][0])


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
