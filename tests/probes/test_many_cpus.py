"""Machines with many CPUs, and CPUs that come and go."""

from __future__ import annotations

import mmap
import os
import sys
import time
from types import FrameType

import numpy as np
import pytest

from dsprobe.probes import napi, runq, softirq, tracer
from dsprobe.probes.maps import MappedArray
from dsprobe.probes.napi import Napi
from dsprobe.probes.probe import Map, online_cpus
from dsprobe.probes.runq import Runq
from dsprobe.probes.softirq import Softirq
from dsprobe.probes.tracer import Tracer
from dsprobe.recordings.streams import HIST_SLOTS, VECTORS
from tests.support.wait import until

CPUS = 192
MINUTE = 60 * 10**9


def crafted(leaf: np.dtype[np.void], entries: int) -> tuple[Map, MappedArray]:
    """A map of memory alone, and the side of it that BPF programs write."""
    fd = os.memfd_create("map")
    os.ftruncate(fd, -(-leaf.itemsize * entries // mmap.PAGESIZE) * mmap.PAGESIZE)
    made = Map(fd, 4, leaf.itemsize, entries)
    return made, MappedArray(made, leaf)


def test_softirqs_of_every_cpu_and_vector(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(softirq, "possible_cpus", lambda: CPUS)
    made, side = crafted(softirq._CELL, CPUS * len(VECTORS))
    probe = Softirq()
    probe.open({"softirq_cells": made})
    probe.start()
    assert probe.collect(1) == []
    n = np.arange(len(side.live))
    side.live["count"] += n.astype(np.uint64)
    side.live["busy"] += (n * 1000).astype(np.uint64)
    side.live["run_hist"][:, 5] += n.astype(np.uint32)
    ((_, rows),) = probe.collect(2)
    assert len(rows) == len(n) - 1  # the first had none
    cell = rows["cpu"].astype(int) * len(VECTORS) + rows["vec"]
    assert (cell == n[1:]).all()
    assert (rows["count"] == cell).all()
    assert (rows["busy"] == cell * 1000).all()
    assert (rows["run_hist"].sum(axis=1) == cell).all()
    assert rows["run_hist"].shape == (len(rows), HIST_SLOTS)
    assert int(rows["cpu"].max()) == CPUS - 1


def calls_to_collect(monkeypatch: pytest.MonkeyPatch, cpus: int) -> int:
    """How many functions, of Python or C, one reading calls in which every cell has moved."""
    monkeypatch.setattr(softirq, "possible_cpus", lambda: cpus)
    made, side = crafted(softirq._CELL, cpus * len(VECTORS))
    probe = Softirq()
    probe.open({"softirq_cells": made})
    probe.start()
    side.live["count"] += np.uint64(1)
    calls = [0]

    def note(frame: FrameType, event: str, arg: object) -> None:
        calls[0] += event in ("call", "c_call")

    sys.setprofile(note)
    try:
        ((_, rows),) = probe.collect(1)
    finally:
        sys.setprofile(None)
    assert len(rows) == cpus * len(VECTORS)
    return calls[0]


def test_reading_many_cpus_is_no_more_work_for_python(monkeypatch: pytest.MonkeyPatch) -> None:
    few, many = (calls_to_collect(monkeypatch, cpus) for cpus in (2, CPUS))
    assert few == many > 10


def test_run_queues(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runq, "possible_cpus", lambda: CPUS)
    made, side = crafted(runq._CELL, CPUS)
    probe = Runq()
    probe.open({"runq_cells": made})
    probe.start()
    side.live["samples"][[3, 191]] += np.uint64(2)
    side.live["total"][[3, 191]] += np.array([5, 9], np.uint64)
    side.live["longest"][[3, 191]] = [4, 7]
    ((_, rows),) = probe.collect(1)
    assert rows[["cpu", "samples", "total", "longest"]].tolist() == [(3, 2, 5, 4), (191, 2, 9, 7)]
    assert not side.live["longest"].any()  # counts from anew
    assert probe.collect(2) == []


# -- devices that come and go ------------------------------------------------------------------


@pytest.fixture
def devices() -> tuple[Napi, MappedArray]:
    cells, side = crafted(napi._CELL, 2 * napi._CELLS)
    count, _ = crafted(napi._COUNT, 2)
    probe = Napi()
    probe.open({"napi_cells": cells, "napi_count": count})
    probe.start()
    return probe, side


def poll(side: MappedArray, at: int, ifindex: int, n: int = 1) -> None:
    for f, value in (("dev", 0xFF00 + ifindex), ("net", 0xAA), ("ifindex", ifindex), ("netns", 7)):
        side.live[f][at] = value
    side.live["device"][at] = b"eth%d" % ifindex
    side.live["polls"][at] += np.uint64(n)
    side.live["work"][at] += np.uint64(n * 10)


def test_a_device_is_one_row_over_all_cpus(devices: tuple[Napi, MappedArray]) -> None:
    probe, side = devices
    poll(side, 0, 3, 2)
    poll(side, napi._CELLS + 5, 3, 4)
    poll(side, 1, 9)
    ((_, rows),) = probe.collect(1)
    got = rows[["ifindex", "device", "polls", "work"]].tolist()
    assert got == [(3, b"eth3", 6, 60), (9, b"eth9", 1, 10)]


def test_cells_of_devices_long_gone_are_given_back(devices: tuple[Napi, MappedArray]) -> None:
    probe, side = devices
    poll(side, 0, 3)
    poll(side, 1, 9)
    probe.collect(MINUTE)
    for minute in range(2, 12):
        poll(side, 1, 9)
        probe.collect(minute * MINUTE)
    assert side.live["polls"][0] == 1
    poll(side, 1, 9)
    ((_, rows),) = probe.collect(12 * MINUTE)
    assert rows["ifindex"].tolist() == [9]
    assert side.live[0] == np.zeros((), napi._CELL)
    # Another one takes its place and counts from nothing.
    poll(side, 0, 44, 5)
    ((_, rows),) = probe.collect(13 * MINUTE)
    assert rows[["ifindex", "polls", "work"]].tolist() == [(44, 5, 50)]


# -- CPUs that come and go ---------------------------------------------------------------------


def spin() -> None:
    """Be busy for a little longer than it takes until a CPU is sampled."""
    end = time.monotonic_ns() + 2 * runq.PERIOD_NS
    while time.monotonic_ns() < end:
        pass


@pytest.mark.bpf
def test_a_cpu_that_comes_online_is_sampled(monkeypatch: pytest.MonkeyPatch) -> None:
    here = sorted(os.sched_getaffinity(0))
    if len(here) < 2:
        pytest.skip("needs two CPUs")
    online = {here[0]}
    monkeypatch.setattr(tracer, "online_cpus", lambda: online)
    probe = Runq()
    t = Tracer([probe])
    t.load()

    def sampled() -> set[int]:
        return {int(c) for _, rows in probe.collect(1) for c in rows["cpu"]}

    until(sampled, "the first CPU is sampled")
    assert sampled() <= {here[0]}
    online = {here[0], here[1], 10**6}  # and one that is gone before we get there
    t.follow_cpus()
    os.sched_setaffinity(0, {here[1]})  # some kernels of sandboxes do not sample an idle CPU
    try:
        until(lambda: spin() or here[1] in sampled(), "the new one is sampled")
    finally:
        os.sched_setaffinity(0, here)
    fds = len(os.listdir("/proc/self/fd"))
    t.follow_cpus()
    assert len(os.listdir("/proc/self/fd")) == fds
    t.close()
    monkeypatch.undo()
    assert online_cpus() >= set(here)
