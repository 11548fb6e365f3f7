"""Processes and threads that come and go, each with calls of its own."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from pathlib import Path

import numpy as np
import pytest

from dsprobe.probes import cuda
from dsprobe.probes.calls import Calls
from dsprobe.probes.functions import of_symbol
from dsprobe.probes.launches import Launches
from tests.cuda.test_launches import work
from tests.cuda.tracing import Tracing, last, tracing
from tests.simgpu import truth
from tests.simgpu.run import environment, workload
from tests.simgpu.scenario import Scenario
from tests.simgpu.target import Target
from tests.support.wait import until

pytestmark = [pytest.mark.bpf, pytest.mark.tools("gcc")]


def expected(tr: Tracing, process: truth.Process) -> dict[str, int]:
    """Calls of a process that the probes that run are there for."""
    counts = {n: c.calls for n, c in process.counts.items()}
    return {n: c for n, c in counts.items() if (f := of_symbol(n)) and f.cls in tr.cuda.serves}


def assert_nothing_is_left(tr: Tracing) -> None:
    """Every place that was taken has been given back."""
    for _ in range(3):
        tr.step()
    assert not tr.cuda.processes
    assert not tr.cuda.threads.live["id"].any()
    for map in ("cuda_procs_of", "cuda_threads_of", "cuda_cells_of"):
        assert entries(tr, map) == 0, map
    launches = next(p for p in tr.tracer.probes if isinstance(p, Launches))
    assert not launches._streams.live["process"].any()
    assert len(launches._kernels.read()[0]) == 0
    assert len(launches._stream_of.read()[0]) == 0


def entries(tr: Tracing, map: str) -> int:
    from dsprobe.probes.hashmap import HashMap

    made = tr.tracer._made.loaded["cuda"].maps[map]
    return len(HashMap(made, f"V{made.key_size}", f"V{made.leaf_size}").read()[0])


def test_children_that_are_forked_executed_and_killed(tmp_path: Path) -> None:
    with tracing(Launches, Calls) as tr:
        work(tmp_path, "forks", Scenario(), tr, children=9, count=200, kill=3, exec=2)
        children = truth.read_all(tmp_path)
        assert len(children) == 9
        for child in children:
            assert tr.calls(child.pid) == expected(tr, child)
        rows = tr.rows("meta.process")
        ended = rows[rows["ended"] > 0]
        assert len(set(ended["id"].tolist())) == 9
        assert set(ended["pid"].tolist()) == {c.pid for c in children}
        assert set(ended["comm"].tolist()) <= {"forks", "exe"}
        threads = tr.rows("meta.thread")
        assert len(set(threads["id"].tolist()) | set(ended["id"].tolist())) == 18
        assert (tr.rows("cuda.thread")["count"].sum()) == 9 * 200
        assert_nothing_is_left(tr)


def test_more_processes_than_there_is_time_for_have_their_turn(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cuda, "AT_ONCE", 0)
    monkeypatch.setattr(cuda, "FREED", 1)
    with tracing(Launches, Calls) as tr:
        command, env = workload("forks", children=8, count=20), environment(tmp_path, Scenario())
        subprocess.run(command, env=env, check=True, timeout=60, stdout=subprocess.DEVNULL)
        children = truth.read_all(tmp_path)
        assert len(children) == 8
        met = []
        for _ in range(12):
            before = len(set(tr.rows("meta.process")["id"].tolist()))
            tr.step()
            met.append(len(set(tr.rows("meta.process")["id"].tolist())) - before)
        assert sum(met) == 8
        assert max(met) <= 2  # a step looks when the bell rings, and when it collects
        for child in children:
            assert tr.calls(child.pid) == expected(tr, child)
        ended = tr.rows("meta.process")
        assert len(set(ended["id"][ended["ended"] > 0].tolist())) == 8
        assert_nothing_is_left(tr)


def test_who_had_begun_before_is_told_from_who_is_seen_from_the_start(tmp_path: Path) -> None:
    with Target(tmp_path / "before") as before:
        before.start()
        began = time.monotonic_ns()
        with tracing(Calls) as tr, Target(tmp_path / "after") as after:
            tr.step()
            after.start()
            tr.step()
            before.ok("cuCtxSynchronize")
            calls = [["cuCtxSynchronize"]] * 20_000
            child = threading.Thread(target=after.fork, args=calls, kwargs={"start": False})
            child.start()

            def known() -> bool:
                tr.step()
                return len(set(tr.rows("meta.process")["pid"].tolist())) == 3

            until(known, "the child is seen while it lives")
            child.join()
            rows = tr.rows("meta.process")
            late = {int(r["pid"]): int(r["late"]) for r in rows}
            assert began < late.pop(before.pid) < time.monotonic_ns()
            assert len(late) == 2
            assert set(late.values()) == {0}
            for t in (before, after):
                t.close()
            tr.settle()


@pytest.mark.parametrize("method", ["fork", "spawn", "forkserver"])
def test_worker_processes(tmp_path: Path, method: str) -> None:
    with tracing(Launches, Calls) as tr:
        command = [sys.executable, "-m", "tests.simgpu.workloads.workers", f"method={method}",
                   "workers=2", "count=20", "keep=3"]  # fmt: skip
        env = environment(tmp_path, Scenario())
        subprocess.run(command, env=env, check=True, timeout=60, stdout=subprocess.DEVNULL)
        tr.settle()
        for worker in truth.read_all(tmp_path):
            assert tr.calls(worker.pid) == expected(tr, worker)
        assert_nothing_is_left(tr)


def test_parent_and_child_are_told_apart(tmp_path: Path) -> None:
    with tracing(Launches, Calls) as tr:
        with Target(tmp_path) as t:
            t.start()
            t.ok("cuCtxSynchronize")
            child, results = t.fork(*[["cuCtxSynchronize"]] * 5, start=False)
            assert all(results)  # the driver does not survive a fork
            t.ok("cuCtxSynchronize")
            tr.step()
            assert tr.calls(t.own_pid) == {"cuInit": 1, "cuCtxSynchronize": 2}
            assert tr.calls(child) == tr.calls(child, "failed") == {"cuCtxSynchronize": 5}
            assert int(last(tr.rows("meta.process"), pid=t.pid)["ended"]) == 0
        tr.settle()
        assert_nothing_is_left(tr)


EXECUTING = """
import ctypes, os, sys
d = ctypes.CDLL("libcuda.so.1")
for _ in range(int(sys.argv[1])):
    d.cuInit(0)
if sys.argv[2:]:
    import threading
    run = lambda: os.execv(sys.executable, [sys.executable, sys.argv[2], "4"])
    threading.Thread(target=run).start() if sys.argv[3] == "thread" else run()
"""


@pytest.mark.parametrize("who", ["main", "thread"])
def test_another_program_in_the_same_process_is_another(tmp_path: Path, who: str) -> None:
    script = tmp_path / "script.py"
    script.write_text(EXECUTING)
    with tracing(Launches, Calls) as tr:
        child = subprocess.Popen(
            [sys.executable, script, "3", script, who], env=environment(tmp_path, Scenario())
        )
        assert child.wait(30) == 0
        tr.settle()
        rows = tr.rows("meta.process")
        ids = sorted(set(rows["id"].tolist()))
        assert len(ids) == 2
        assert set(rows["pid"].tolist()) == {child.pid}
        calls = tr.rows("cuda.calls")
        assert [int(calls["count"][calls["process"] == i].sum()) for i in ids] == [3, 4]
        assert_nothing_is_left(tr)


@pytest.mark.root
@pytest.mark.tools("unshare")
def test_a_process_in_its_own_pid_namespace(tmp_path: Path) -> None:
    with (
        tracing(Launches, Calls) as tr,
        Target(tmp_path, prefix=["unshare", "-pf", "--mount-proc", "--kill-child"]) as t,
    ):
        assert t.own_pid == 1
        t.start()
        t.call("cuCtxSynchronize", thread="other")
        tr.step()
        row = last(tr.rows("meta.process"), ns_pid=1)
        children = Path(f"/proc/{t.pid}/task/{t.pid}/children").read_text().split()
        assert [str(row["pid"])] == children
        assert row["comm"].startswith("python")
        assert "console" in row["command"]
        assert row["parent"] == t.pid
        assert row["uid"] == os.getuid()
        threads = tr.rows("meta.thread")
        assert threads["ns_tid"].min() == 1
        assert 1 < threads["ns_tid"].max() < 100 < threads["tid"].min()
        assert tr.calls(1) == {"cuInit": 1, "cuCtxSynchronize": 1}


THREADS = """
import ctypes, threading
d = ctypes.CDLL("libcuda.so.1")
for i in range(300):
    t = threading.Thread(target=lambda: [d.cuInit(0) for _ in range(1 + i % 3)])
    t.start()
    t.join()
"""


def test_threads_that_come_and_go(tmp_path: Path) -> None:
    with tracing(Launches, Calls) as tr:
        child = subprocess.Popen(
            [sys.executable, "-c", THREADS], env=environment(tmp_path, Scenario())
        )
        while child.poll() is None:
            tr.step()
        tr.settle()
        assert tr.calls(child.pid) == {"cuInit": 600}
        threads = tr.rows("meta.thread")
        assert len(set(threads["id"].tolist())) == len(threads) == 300
        assert_nothing_is_left(tr)


def test_only_processes_that_are_wanted_and_their_children(tmp_path: Path) -> None:
    with tracing(Launches, Calls, everybody=True) as tr:
        with Target(tmp_path) as wanted, Target(tmp_path) as other:
            tr.cuda.want([wanted.pid])
            assert tr.cuda.wants(wanted.pid)
            assert not tr.cuda.wants(other.pid)
            child, _ = wanted.fork(["cuCtxSynchronize"])
            other_child, _ = other.fork(["cuCtxSynchronize"])
            for t in (wanted, other):
                t.start()
                t.ok("cuCtxSynchronize")
            tr.step()
            pids = set(tr.rows("meta.process")["pid"].tolist())
            assert pids >= {wanted.pid, child}
            assert not pids & {other.pid, other_child}
            assert tr.calls(wanted.pid) == {"cuInit": 1, "cuCtxSynchronize": 1}
            assert tr.calls(child) == {"cuInit": 1, "cuCtxSynchronize": 1}
        assert not tr.cuda.wants(wanted.pid)  # its number may be another's now


def test_more_streams_than_there_is_room_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Streams not used for long give up their places, and nothing that was counted is lost."""
    from dsprobe.probes import launches

    monkeypatch.setattr(launches, "IDLE_NS", 0)
    text = """
import ctypes
from tests.simgpu.driver import Driver
d = Driver()
d.start()
f = d.kernel("k")
for i in range(6000):
    d.call("cuLaunchKernel", f, 1, 1, 1, 1, 1, 1, 0, 0x10000 + 16 * i, 0, 0)  # no such stream
    if i == 5000: input()
"""
    with tracing(Launches) as tr:
        child = subprocess.Popen(
            [sys.executable, "-c", text], env=environment(tmp_path, Scenario()),
            stdin=subprocess.PIPE, text=True,
        )  # fmt: skip
        launched = next(p for p in tr.tracer.probes if isinstance(p, Launches))
        while np.count_nonzero(launched._streams.live["process"]) < 5001:
            assert child.poll() is None
        tr.step()
        tr.step()
        assert not np.count_nonzero(launched._streams.live["process"])
        child.communicate("\n", timeout=30)
        tr.settle()
        assert tr.rows("cuda.stream")["count"].sum() == 6000
        assert_nothing_is_left(tr)
