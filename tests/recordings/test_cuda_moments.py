"""Memory, launches and calls between two moments: records in, tables out."""

from __future__ import annotations

import math

import numpy as np
import pytest

from dsprobe.recordings import cudastreams as cuda
from dsprobe.recordings import streams as st
from dsprobe.recordings.blocked import calls, open_calls, slowest_calls
from dsprobe.recordings.launches import by_stream, by_thread, kernels, longest_gaps
from dsprobe.recordings.leaks import Thresholds
from dsprobe.recordings.memory import AgeMemory, memory_at
from dsprobe.recordings.peaks import peaks
from dsprobe.recordings.report import report
from dsprobe.recordings.stacks import Stacks
from tests.recordings.cudahost import BOOT, CALL, COPY, KIND, MIB, SECOND, CudaHost, hist
from tests.recordings.sample import random_rows


@pytest.fixture
def host() -> CudaHost:
    made = CudaHost()
    made.process(1, 41)
    return made


def test_memory_at_a_moment_and_what_grew(host: CudaHost) -> None:
    old = host.stack(1, ["load@w.py:1"])
    new = host.stack(2, ["grow@c.py:2"])
    gone = host.stack(3, ["gone@c.py:3"])
    pinned = host.stack(4, ["pin@c.py:4"], kind="host")
    old.alloc(host.now, 64 * MIB)
    pinned.alloc(host.now, MIB)
    gone.alloc(host.now, 3 * MIB)

    def act(second: int, t: int) -> None:
        if second >= 40:
            new.alloc(t, MIB)
        if second == 50:
            gone.free()

    host.run(60, act)
    at = memory_at(host.session, BOOT + 60 * SECOND, BOOT + 30 * SECOND)
    assert [(s.stack, s.live, s.grown, s.blocks, s.grown_blocks) for s in at.stacks] == [
        (1, 64 * MIB, 0, 1, 0),
        (2, 20 * MIB, 20 * MIB, 20, 20),
        (4, MIB, 0, 1, 0),
        (3, 0, -3 * MIB, 0, -1),
    ]
    ages = {s.stack: s.age for s in at.stacks}
    assert ages[1] == 60 * SECOND
    assert ages[2] == pytest.approx(10 * SECOND, abs=SECOND)
    assert ages[3] == 0
    (device, other) = at.kinds
    assert (device.kind, device.device, device.live, device.grown) == (
        "device", True, 84 * MIB, 17 * MIB,
    )  # fmt: skip
    assert (device.allocs, device.frees, device.reclaimed, other.allocs) == (20, 1, 0, 0)
    assert (other.kind, other.device, other.live) == ("host", False, MIB)
    assert at.live == 84 * MIB
    assert at.whole


def test_a_state_needs_the_last_seconds_only(host: CudaHost) -> None:
    """What is stable has a row every ten seconds."""
    stack = host.stack(1, ["load@w.py:1"])
    stack.alloc(host.now, MIB)
    host.run(300)
    host.session.reads.clear()
    for t in range(20, 300, 7):
        (found,) = memory_at(host.session, BOOT + t * SECOND, BOOT + (t - 5) * SECOND).stacks
        assert (found.live, found.grown) == (MIB, 0), t
    reads = [r for r in host.session.reads if not r[0].startswith("meta.")]
    assert all(end - start <= 13 * SECOND for _, start, end, _ in reads)


def test_memory_of_a_process_that_ended_is_gone(host: CudaHost) -> None:
    stack = host.stack(1, ["load@w.py:1"])
    stack.alloc(host.now, MIB)
    host.run(20)
    host.end(1)
    host.run(3)
    at = memory_at(host.session, host.now, BOOT + 15 * SECOND)
    assert at.live == 0
    assert [(s.live, s.grown) for s in at.stacks] == [(0, -MIB)]


def test_bytes_of_no_stack_are_told(host: CudaHost) -> None:
    stack = host.stack(1, ["load@w.py:1"])
    stack.alloc(host.now, MIB)
    host.run(20)
    t = host.now
    host.session.append("gpu.memory", t=t + 1, dt=1, process=1, live=3 * MIB)
    host.session.refresh()
    # Stacks are told once a second: what was allocated since is no riddle.
    assert memory_at(host.session, t + 1).whole
    host.session.append("gpu.stack", t=t + 2, dt=1, process=1, stack=1, live=MIB, blocks=1)
    host.session.refresh()
    at = memory_at(host.session, t + 2)
    assert at.unexplained == 2 * MIB
    assert not at.whole


def test_stacks_that_are_yet_to_be_looked_at_are_not_missing() -> None:
    """Memory has rows four times a second, its stacks one: those of a process that has just come
    are to come, and what has just been freed is not live."""
    host = CudaHost()
    quarter = SECOND // 4

    def memory(t: int, live: int, kind: str = "device") -> None:
        host.session.append("gpu.memory", t=t, dt=quarter, process=1, kind=KIND[kind], live=live,
                            blocks=live // MIB)  # fmt: skip

    def stack(t: int, stack: int, live: int, kind: str = "device") -> None:
        host.session.append("gpu.stack", t=t, dt=SECOND, process=1, stack=stack, kind=KIND[kind],
                            live=live, blocks=live // MIB)  # fmt: skip

    for i in range(1, 4):
        memory(BOOT + i * quarter, i * MIB)
        memory(BOOT + i * quarter, 9 * MIB, "reserved")
        host.session.refresh()
        assert memory_at(host.session, BOOT + i * quarter).whole
    memory(BOOT + SECOND, 4 * MIB)
    memory(BOOT + SECOND, 9 * MIB, "reserved")
    stack(BOOT + SECOND, 1, 4 * MIB)
    stack(BOOT + SECOND, 2, 9 * MIB, "reserved")
    memory(BOOT + 5 * quarter, 5 * MIB)
    memory(BOOT + 5 * quarter, 0, "reserved")
    host.session.refresh()
    found = memory_at(host.session, BOOT + 5 * quarter)
    assert (found.unexplained, found.whole) == (0, True)
    # Where the stacks do not come, that is said.
    alone = CudaHost()
    alone.session.append("gpu.memory", t=BOOT + np.arange(1, 20) * quarter, dt=quarter, process=1,
                         live=7 * MIB, blocks=7)  # fmt: skip
    alone.session.refresh()
    assert memory_at(alone.session, BOOT + 19 * quarter).unexplained == 7 * MIB


def test_ages(host: CudaHost) -> None:
    for t, live in ((1, 5), (11, 7)):
        host.session.append("gpu.age", t=BOOT + t * SECOND, dt=SECOND, process=1,
                            age=[0, 3, 255], live=live, blocks=1)  # fmt: skip
    host.session.refresh()
    found = memory_at(host.session, BOOT + 12 * SECOND).ages
    assert [(a.youngest, a.oldest, a.live) for a in found] == [
        (0, 2, 7), (8, 16, 7), (1 << 255, 1 << 256, 7),
    ]  # fmt: skip
    assert isinstance(found[0], AgeMemory)


def thread_rows(host: CudaHost, seconds: int) -> None:
    for second in range(1, seconds + 1):
        t = BOOT + second * SECOND
        host.session.append(
            "cuda.thread", t=t, dt=SECOND, process=1, thread=[1, 2], count=[1000, 10],
            shed=[900, 0], hist=[hist(s12=990, s20=10), hist(s26=10)],
            longest=[2_000_000 + second, 90_000_000], longest_end=t - 5, within=[3, 0],
            within_time=[1_500_000, 0],
        )  # fmt: skip
        host.session.append("cuda.stream", t=t, dt=SECOND, process=1, thread=[0, 1], stream=[77, 2],
                            count=[600, 400], hist=[hist(s12=600), hist(s13=400)])  # fmt: skip
    host.session.refresh()


@pytest.mark.parametrize("seconds", [10, 200])
def test_launches_by_thread_and_stream(host: CudaHost, seconds: int) -> None:
    thread_rows(host, seconds)
    start, end = BOOT + 2 * SECOND, BOOT + seconds * SECOND
    first, second = by_thread(host.session, start, end)
    n = seconds - 2
    assert (first.thread, first.stream, first.count, first.rate) == (1, None, 1000 * n, 1000)
    assert (first.p50, first.p99, first.longest) == (2.0**13, 2.0**13, 2_000_000 + seconds)
    assert first.shed == pytest.approx(0.9)
    assert first.hist[12] == 990 * n
    assert (second.thread, second.shed, second.p99, second.quiet) == (2, 0, 2.0**27, 0)
    shared, own = by_stream(host.session, start, end)
    assert (shared.thread, shared.stream, shared.count) == (0, 77, 600 * n)
    assert (own.thread, own.stream) == (1, 2)
    assert math.isnan(own.shed)
    later = by_thread(host.session, start, end + 5 * SECOND)
    assert later[0].quiet == 5 * SECOND
    assert by_thread(host.session, end, end + SECOND) == ()


def test_blocks_that_went_with_their_process_are_no_frees(host: CudaHost) -> None:
    m = {"process": 1, "kind": 0, "dt": SECOND}
    host.session.append("gpu.memory", t=BOOT + SECOND, live=60, blocks=6, allocs=10, frees=4,
                        allocated=100, freed=40, **m)  # fmt: skip
    host.session.append("gpu.memory", t=BOOT + 2 * SECOND, frees=6, freed=60, reclaimed=5,
                        reclaimed_bytes=50, **m)  # fmt: skip
    host.session.refresh()
    (kind,) = memory_at(host.session, BOOT + 3 * SECOND, BOOT).kinds
    assert (kind.allocs, kind.frees, kind.reclaimed, kind.reclaimed_bytes) == (10, 5, 5, 50)


def test_the_peak_is_between_rows_where_calls_tell(host: CudaHost) -> None:
    """Three storms that leave nothing: all allocated before any is freed; one after the other; and
    one of which single calls are not known."""
    for second, order in enumerate(("aaaaffff", "afafafaf", "")):
        t = BOOT + second * SECOND
        host.session.append("gpu.memory", t=t + SECOND, dt=SECOND, process=second + 1, kind=0,
                            allocs=4, frees=4, allocated=400, freed=400,
                            shed=0 if order else 8)  # fmt: skip
        if order:
            host.session.append("gpu.alloc", t=t + 1 + np.arange(8), process=second + 1, kind=0,
                                bytes=100, op=[op == "f" for op in order])  # fmt: skip
    for process, frees, freed in ((8, 0, 0), (9, 1, 20)):
        host.session.append("gpu.memory", t=BOOT + 3 * SECOND, dt=SECOND, process=process, kind=0,
                            live=70 + 30 - freed, allocs=3, frees=frees, allocated=30,
                            freed=freed, shed=4)  # fmt: skip
    host.session.refresh()
    assert peaks(host.session, BOOT, BOOT + 3 * SECOND) == {
        (1, "device"): 400, (2, "device"): 100, (3, "device"): 100,
        (8, "device"): 100, (9, "device"): 80,
    }  # fmt: skip


def test_rates_are_of_the_time_in_which_a_process_was_seen(host: CudaHost) -> None:
    """One was there all the time, one came and went, one came late."""
    for second in range(60):
        host.session.append("cpu.load", t=BOOT + second * SECOND, dt=SECOND)
    times = {1: (0, 60), 2: (10, 30), 3: (50, 60)}
    for id, (first, last) in times.items():
        seen = BOOT + first * SECOND
        host.session.append("meta.process", t=seen + SECOND // 4, id=id, pid=40 + id, seen=seen,
                            ended=BOOT + last * SECOND if last < 60 else 0)  # fmt: skip
        t = BOOT + np.arange(first + 1, last + 1) * SECOND
        host.session.append("cuda.thread", t=t, dt=SECOND, process=id, thread=id, count=1000)
        host.session.append("cuda.stream", t=t, dt=SECOND, process=id, stream=id, count=1000,
                            hist=[hist(s12=1000)] * len(t))  # fmt: skip
        host.session.append("cuda.calls", t=t, dt=SECOND, process=id, function=1, count=200,
                            kind=CALL["sync"], busy=SECOND // 4,
                            hist=[hist(s12=200)] * len(t))  # fmt: skip
        host.session.append("gpu.memory", t=t, dt=SECOND, process=id, kind=0, allocs=50, frees=50)
    host.session.refresh()
    end = BOOT + 60 * SECOND
    for start in (BOOT, BOOT - 300 * SECOND, BOOT + 5 * SECOND):
        assert {r.process: r.rate for r in by_thread(host.session, start, end)} == {
            1: 1000, 2: 1000, 3: 1000,
        }  # fmt: skip
        assert {r.rate for r in by_stream(host.session, start, end)} == {1000}
        found = calls(host.session, start, end)
        assert {(r.process, r.threads, r.rate) for r in found} == {
            (id, 0.25, 200) for id in times
        }  # fmt: skip
        kinds = memory_at(host.session, end, start).kinds
        assert {(k.process, k.allocs * SECOND / k.seen) for k in kinds} == {
            (id, 50) for id in times
        }  # fmt: skip


def test_calls_that_are_not_timed_are_apart(host: CudaHost) -> None:
    names = {"cuCtxSynchronize": 1, "cuMemFree_v2": 2, "cuLaunchKernel": 3}
    for name, id in names.items():
        host.string(id, name)
    for id, kind, count, busy, slots in (
        (1, "sync", 4, SECOND, hist(s28=4)), (2, "other", 11, 3_580_000, hist(s18=11)),
        (3, "other", 2_000_000, 0, hist()),
    ):  # fmt: skip
        host.session.append("cuda.calls", t=BOOT + SECOND, dt=SECOND, process=1, function=id,
                            kind=CALL[kind], count=count, busy=busy, hist=[slots])  # fmt: skip
    host.session.refresh()
    (process,) = report(host.session, BOOT, BOOT + SECOND, Thresholds(), 5)["processes"]
    blocked = process["blocked"]
    assert {name: b["count"] for name, b in blocked.items()} == {
        "sync": 4, "other": 11, "other, not timed": 2_000_000,
    }  # fmt: skip
    assert {c["function"]: c["timed"] for c in process["calls"]} == {
        "cuCtxSynchronize": True, "cuMemFree_v2": True, "cuLaunchKernel": False,
    }  # fmt: skip


def test_the_longest_gaps_say_what_the_thread_was_in(host: CudaHost) -> None:
    thread_rows(host, 200)
    gaps = longest_gaps(host.session, BOOT, BOOT + 200 * SECOND, 202)
    assert [g.duration for g in gaps[:200]] == [90_000_000] * 200
    assert gaps[0].t == BOOT + 200 * SECOND - 5
    assert (gaps[0].function, gaps[0].within) == (0, 0)
    assert (gaps[200].duration, gaps[200].function, gaps[200].within) == (
        2_000_200, 3, 1_500_000,
    )  # fmt: skip


def test_kernels_by_what_was_kept(host: CudaHost) -> None:
    host.session.append("cuda.launch", t=BOOT + np.arange(10), process=1, kernel=[1] * 7 + [2] * 3,
                        grid=[[8, 1, 1]] * 9 + [[9, 2, 1]], block=[[32, 1, 1]] * 10)  # fmt: skip
    host.session.refresh()
    first, second = kernels(host.session, BOOT - 1, BOOT + 100, 5)
    assert (first.kernel, first.seen, first.share, first.grid) == (1, 7, 0.7, (8, 1, 1))
    assert (second.kernel, second.grid, second.block) == (2, (9, 2, 1), (32, 1, 1))


def test_calls_by_function(host: CudaHost) -> None:
    for second in range(1, 101):
        host.session.append(
            "cuda.calls", t=BOOT + second * SECOND, dt=SECOND, process=1, function=[1, 2, 2],
            kind=[CALL["sync"], CALL["copy"], CALL["copy"]],
            copy=[0, COPY["HtoD"], COPY["DtoH"]], count=[10, 5, 1], failed=[0, 0, 1],
            busy=[500_000_000, 1_000_000, 2_000_000], bytes=[0, 4096, 8192],
            hist=[hist(s25=10), hist(s17=5), hist(s20=1)],
        )  # fmt: skip
    host.session.refresh()
    sync, back, to = calls(host.session, BOOT, BOOT + 100 * SECOND)
    assert (sync.function, sync.kind, sync.copy, sync.count) == (1, "sync", "none", 1000)
    assert (sync.threads, sync.p50) == (0.5, 2.0**26)
    assert (back.copy, back.failed, back.bytes) == ("DtoH", 100, 819200)
    assert (to.copy, to.busy) == ("HtoD", 100_000_000)


def test_a_call_is_open_until_its_thread_returns(host: CudaHost) -> None:
    since = BOOT + SECOND
    for t in (2, 3):
        host.session.append("cuda.open", t=BOOT + t * SECOND, process=1, thread=[1, 2],
                            function=[5, 6], since=[since, since - 9])  # fmt: skip
    host.session.append("cuda.call", t=BOOT + 3 * SECOND + 7, process=1, thread=1, function=5,
                        duration=2 * SECOND + 7)  # fmt: skip
    host.session.refresh()
    both = open_calls(host.session, BOOT + 3 * SECOND)
    assert [(c.thread, c.duration) for c in both] == [(2, 2 * SECOND + 9), (1, 2 * SECOND)]
    (left,) = open_calls(host.session, BOOT + 4 * SECOND)
    assert (left.thread, left.function) == (2, 6)
    assert open_calls(host.session, BOOT + 9 * SECOND) == ()


def test_the_slowest_calls(host: CudaHost) -> None:
    t = BOOT + np.arange(1, 301) * SECOND
    host.session.append("cuda.call", t=t, duration=np.arange(300) % 150, process=1, stack=4, kind=1)
    host.session.refresh()
    found = slowest_calls(host.session, BOOT, BOOT + 300 * SECOND, 3)
    assert [(c.duration, c.t) for c in found] == [
        (149, BOOT + 300 * SECOND), (149, BOOT + 150 * SECOND), (148, BOOT + 299 * SECOND),
    ]  # fmt: skip
    assert found[0].stack == 4


def test_any_rows_are_borne(host: CudaHost) -> None:
    """What a hostile file may hold, under every stream at once."""
    for stream in cuda.CUDA_STREAMS:
        for seed in range(3):
            rows = random_rows(stream, 200, seed, BOOT, 20 * SECOND)
            if seed == 2:
                for f in stream.fields:
                    if f.ref or f.name == "id":
                        rows[f.name] %= 5
            host.session.append_rows(stream, rows[np.argsort(rows["t"], kind="stable")])
    host.session.append_rows(st.META_STRING, random_rows(st.META_STRING, 50, 1, BOOT, SECOND))
    host.session.refresh()
    end = BOOT + 20 * SECOND
    with np.errstate(all="ignore"):
        said = report(host.session, BOOT, end, Thresholds(SECOND, SECOND), 5)
        stacks = Stacks(host.session)
        stacks.refresh()
        held = memory_at(host.session, end, BOOT).stacks
    assert said["processes"]
    assert held
    assert KIND["device"] == 0
