"""Launches against what the simulated driver was really asked."""

from __future__ import annotations

import ctypes
import json
import subprocess
import time
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from dsprobe.probes.launches import CALM_NS, Launches
from tests.cuda.tracing import Tracing, last, tracing
from tests.simgpu import truth
from tests.simgpu.build import libcuda
from tests.simgpu.run import environment, workload
from tests.simgpu.scenario import Scenario, parse
from tests.simgpu.target import OUT, Target
from tests.support.agents import Watched, watched
from tests.support.wait import until

pytestmark = [pytest.mark.bpf, pytest.mark.tools("gcc")]

INSTANT = {"kernels": {f"kernel_{i}": {"us": 0} for i in range(7)}}


def work(folder: Path, name: str, scenario: Scenario, tr: Tracing, **options: Any) -> Any:
    """Run a workload to its end, looking in between as an agent does; what it says."""
    child = subprocess.Popen(
        workload(name, **options), env=environment(folder, scenario),
        stdout=subprocess.PIPE, text=True,
    )  # fmt: skip
    while True:
        try:
            out, _ = child.communicate(timeout=0.1)
            break
        except subprocess.TimeoutExpired:
            tr.step()
    assert child.returncode == 0
    tr.settle()
    return json.loads(out)


def slots(gaps: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """Slot of each gap in a log2 histogram."""
    return np.minimum(np.log2(np.maximum(gaps, 1)).astype(int), 31)


def test_each_launch_of_each_thread_with_all_its_arguments(tmp_path: Path) -> None:
    with tracing(Launches) as tr:
        tr.cuda.set_budget(1 << 30)
        work(tmp_path, "launches", parse(INSTANT), tr, threads=3, count=1501, streams=2, sync=500)
        (process,) = truth.read_all(tmp_path)
        assert tr.calls(process.pid)["cuLaunchKernel"] == 3 * 1501
        rows, threads, kernels = tr.rows("cuda.launch"), tr.rows("meta.thread"), tr.kernels()
        want = process.of("cuLaunchKernel")
        assert len(rows) == len(want)
        assert not tr.rows("cuda.thread")["shed"].any()
        by_handle = {int(e["out"]): f"kernel_{i}"
                     for i, e in enumerate(process.of("cuModuleGetFunction"))}  # fmt: skip
        for tid in set(want["tid"].tolist()):
            mine = rows[rows["thread"] == last(threads, ns_tid=tid)["id"]]
            args = want[want["tid"] == tid]["args"]
            assert [kernels[k] for k in mine["kernel"].tolist()] == [
                by_handle[h] for h in args[:, 0].tolist()
            ]
            assert (mine["grid"] == args[:, 1:4]).all()
            assert (mine["block"] == args[:, 4:7]).all()
            assert (mine["shared"] == args[:, 7]).all()
            assert (mine["stream"] == args[:, 8]).all()
            assert (np.diff(mine["t"].astype(np.int64)) >= 0).all()
        streams = tr.rows("cuda.stream")
        assert (streams["thread"] == 0).all()
        counted: Counter[int] = Counter()
        for stream, n in zip(streams["stream"].tolist(), streams["count"].tolist(), strict=True):
            counted[stream] += n
        assert counted == Counter(want["args"][:, 8].tolist())


def test_histograms_are_those_of_the_truth_within_a_slot(tmp_path: Path) -> None:
    with tracing(Launches) as tr:
        work(tmp_path, "launches", parse(INSTANT), tr, threads=2, count=400, rate=400, streams=1)
        (process,) = truth.read_all(tmp_path)
        rows, threads = tr.rows("cuda.thread"), tr.rows("meta.thread")
        streams = tr.rows("cuda.stream")
        want = process.of("cuLaunchKernel")
        for tid in set(want["tid"].tolist()):
            mine = want[want["tid"] == tid]
            gaps = np.diff(mine["begun"].astype(np.int64))
            true = np.sort(slots(gaps))
            number = last(threads, ns_tid=tid)["id"]
            of_thread = rows[rows["thread"] == number]
            of_stream = streams[streams["stream"] == mine["args"][0, 8]]
            for got in (of_thread, of_stream):
                assert got["count"].sum() == 400
                seen = np.repeat(np.arange(32), got["hist"].sum(0, np.int64))
                assert len(seen) == 399
                # A thread that loses its CPU between our look at the clock and the driver's
                # moves two gaps; few do.
                assert np.mean(np.abs(seen - true) > 1) <= 0.02
                assert abs(np.log2(got["longest"].max() / gaps.max())) <= 1


def test_every_way_to_launch(tmp_path: Path) -> None:
    with tracing(Launches) as tr, Target(tmp_path) as t:
        t.start()
        module = t.ok("cuModuleLoadData", OUT, "image")
        f = t.ok("cuModuleGetFunction", OUT, module, "plain")
        library = t.ok("cuLibraryLoadData", OUT, "image", 0, 0, 0, 0, 0, 0)
        kernel = t.ok("cuLibraryGetKernel", OUT, library, "of_library")
        g = t.ok("cuKernelGetFunction", OUT, kernel)
        stream = t.ok("cuStreamCreate", OUT, 0)
        dims = (1, 2, 3, 4, 5, 6, 7)
        t.ok("cuLaunchKernel", f, *dims, 0, 0, 0)
        t.ok("cuLaunchKernel", f, *dims, stream, 0, 0)
        t.ok("cuLaunchKernel_ptsz", g, *dims, 0, 0, 0)
        t.ok("cuLaunchCooperativeKernel", kernel, *dims, stream, 0)
        t.ok("cuLaunchCooperativeKernel_ptsz", g, *dims, 2, 0)
        t.ok("cuStreamBeginCapture_v2", stream, 0)
        t.ok("cuLaunchKernel", f, *dims, stream, 0, 0)
        graph = t.ok("cuStreamEndCapture", stream, OUT)
        exe = t.ok("cuGraphInstantiateWithFlags", OUT, graph, 0)
        t.ok("cuGraphLaunch", exe, stream)
        t.ok("cuGraphLaunch_ptsz", exe, 0)
        assert t.call("cuLaunchKernel", 12345, *dims, 0, 0, 0)[0] != 0  # it was begun
        tr.step()
        rows, names, kernels = tr.rows("cuda.launch"), tr.names(), tr.kernels()
        said = [
            (names[r["function"]], kernels.get(r["kernel"], "a graph"), int(r["stream"]),
             (*r["grid"].tolist(), *r["block"].tolist(), int(r["shared"])))
            for r in rows
        ]  # fmt: skip
        none = (0,) * 7
        assert said == [
            ("cuLaunchKernel", "plain", 0, dims),
            ("cuLaunchKernel", "plain", stream, dims),
            ("cuLaunchKernel_ptsz", "of_library", 2, dims),
            ("cuLaunchCooperativeKernel", "of_library", stream, dims),
            ("cuLaunchCooperativeKernel_ptsz", "of_library", 2, dims),
            ("cuLaunchKernel", "plain", stream, dims),
            ("cuGraphLaunch", "a graph", stream, none),
            ("cuGraphLaunch_ptsz", "a graph", 2, none),
            ("cuLaunchKernel", "", 0, dims),
        ]
        thread = int(rows["thread"][0])
        by_stream = {
            (int(r["stream"]), int(r["thread"])): int(r["count"]) for r in tr.rows("cuda.stream")
        }
        assert by_stream == {(0, 0): 2, (stream, 0): 4, (2, thread): 3}
        assert tr.calls(t.own_pid)["cuGraphLaunch"] == 1


class LaunchConfig(ctypes.Structure):
    """CUlaunchConfig (cuda.h)."""

    _fields_ = [
        ("dims", ctypes.c_uint32 * 7), ("stream", ctypes.c_void_p), ("attributes", ctypes.c_void_p),
        ("count", ctypes.c_uint32),
    ]  # fmt: skip


def test_a_launch_by_configuration(tmp_path: Path) -> None:
    config = LaunchConfig((1, 2, 3, 4, 5, 6, 7), 0, 0, 0)
    text = f"""
from tests.simgpu.driver import Driver
import ctypes
d = Driver()
d.start()
f = d.kernel("configured")
config = ctypes.create_string_buffer(bytes.fromhex("{bytes(config).hex()}"))
d.ok("cuLaunchKernelEx", config, f, 0, 0)
d.ok("cuLaunchKernelEx_ptsz", config, f, 0, 0)
"""
    with tracing(Launches) as tr:
        env = environment(tmp_path, Scenario())
        subprocess.run([workload("console")[0], "-c", text], env=env, check=True, timeout=60)
        tr.settle()
        rows, names, kernels = tr.rows("cuda.launch"), tr.names(), tr.kernels()
        assert [names[n] for n in rows["function"].tolist()] == [
            "cuLaunchKernelEx", "cuLaunchKernelEx_ptsz",
        ]  # fmt: skip
        assert [kernels[k] for k in rows["kernel"].tolist()] == ["configured"] * 2
        assert rows["grid"].tolist() == [[1, 2, 3]] * 2
        assert rows["block"].tolist() == [[4, 5, 6]] * 2
        assert rows["shared"].tolist() == [7, 7]
        assert rows["stream"].tolist() == [0, 2]


def test_the_longest_gap_and_the_call_that_took_it(tmp_path: Path) -> None:
    from dsprobe.probes.calls import Calls

    slow = parse({"kernels": {"long": {"us": 80_000}}})
    with tracing(Launches, Calls) as tr, Target(tmp_path, slow) as t:
        t.start()
        module = t.ok("cuModuleLoadData", OUT, "image")
        f = t.ok("cuModuleGetFunction", OUT, module, "long")
        for _ in range(2):
            t.ok("cuLaunchKernel", f, 1, 1, 1, 1, 1, 1, 0, 0, 0, 0)
            t.ok("cuCtxSynchronize")
        t.ok("cuLaunchKernel", f, 1, 1, 1, 1, 1, 1, 0, 0, 0, 0)
        tr.step()
        (row,) = tr.rows("cuda.thread")
        want = t.truth.of("cuLaunchKernel")
        assert row["count"] == 3
        assert row["longest"] >= 80_000_000
        assert tr.names()[row["within"]] == "cuCtxSynchronize"
        assert 60_000_000 < row["within_time"] <= row["longest"]
        gaps = np.diff(want["begun"].astype(np.int64))
        assert abs(int(row["longest"]) - gaps.max()) < 20_000_000
        tr.step()
        t.ok("cuLaunchKernel", f, 1, 1, 1, 1, 1, 1, 0, 0, 0, 0)
        tr.step()
        row = tr.rows("cuda.thread")[-1]
        assert row["count"] == 1
        assert row["longest_end"] > tr.rows("cuda.thread")[0]["longest_end"]


def test_a_kernel_whose_name_was_given_before_has_none_until_it_is_told(tmp_path: Path) -> None:
    with Target(tmp_path, parse({"gpu": {"driver": 13000}})) as t:
        t.start()
        module = t.ok("cuModuleLoadData", OUT, "image")
        f = t.ok("cuModuleGetFunction", OUT, module, "early")
        with tracing(Launches) as tr:
            t.ok("cuLaunchKernel", f, 1, 1, 1, 1, 1, 1, 0, 0, 0, 0)
            tr.step()
            (kernel,) = tr.rows("meta.kernel")
            assert (kernel["name"], int(kernel["handle"])) == ("", f)
            t.ok("cuFuncGetName", OUT, f)
            t.ok("cuLaunchKernel", f, 1, 1, 1, 1, 1, 1, 0, 0, 0, 0)
            tr.step()
            assert tr.kernels() == {kernel["id"]: "early"}
            assert (tr.rows("cuda.launch")["kernel"] == kernel["id"]).all()


def test_naming_a_kernel_over_and_over_is_said_once(tmp_path: Path) -> None:
    with tracing(Launches) as tr, Target(tmp_path) as t:
        t.start()
        module = t.ok("cuModuleLoadData", OUT, "image")
        for name in ("a", "b", "a", "x" * 300):
            for _ in range(3):
                t.ok("cuModuleGetFunction", OUT, module, name)
        tr.step()
        assert tr.rows("meta.kernel")["name"].tolist() == ["a", "b", "x" * 255]


def test_threads_that_share_a_stream_are_all_counted_on_it(tmp_path: Path) -> None:
    fast = parse({"gpu": {"kernel_us": 0.01}, "library": {"log_launches": False}})
    with tracing(Launches) as tr:
        work(tmp_path, "launches", fast, tr, threads=5, count=40_009, streams=0)
        rows, threads = tr.rows("cuda.stream"), tr.rows("cuda.thread")
        assert set(rows["stream"].tolist()) == {0}
        assert rows["count"].sum() == threads["count"].sum() == 5 * 40_009
        assert 5 * 40_009 - 5 <= rows["hist"].sum() < 5 * 40_009
        assert threads["hist"].sum() == 5 * 40_008
        each = [threads["count"][threads["thread"] == t].sum() for t in set(threads["thread"])]
        assert each == [40_009] * 5


def test_a_million_launches_a_second_are_all_counted(tmp_path: Path) -> None:
    n = 1_000_003
    fast = parse({"gpu": {"kernel_us": 0.01}, "library": {"log_launches": False}})
    quiet = subprocess.run(
        workload("launches", count=n), env=environment(tmp_path / "quiet", fast),
        capture_output=True, text=True, check=True, timeout=60,
    )  # fmt: skip
    alone = json.loads(quiet.stdout)
    with tracing(Launches) as tr:
        told = work(tmp_path / "traced", "launches", fast, tr, count=n)
        (process,) = truth.read_all(tmp_path / "traced")
        assert process.calls("cuLaunchKernel") == n
        assert tr.calls(process.pid)["cuLaunchKernel"] == n
        threads, streams, rows = (
            tr.rows("cuda.thread"),
            tr.rows("cuda.stream"),
            tr.rows("cuda.launch"),
        )
        assert threads["count"].sum() == streams["count"].sum() == n
        assert threads["hist"].sum() == streams["hist"].sum() == n - 1
        assert len(rows) + threads["shed"].sum() == n
        windows = told["seconds"] * 1e9 / (1 << 27) + 2
        assert 0 < len(rows) <= windows * int(tr.cuda.config["budget"][0][0])
        assert threads["shed"].sum() > n // 2
        launches = tr.tracer.probes[1]
        assert f"in process {process.pid}:" in launches.shortage
        launches.collect(time.monotonic_ns() + CALM_NS)
        assert not launches.shortage
        slower = told["seconds"] / alone["seconds"]
        rates = f"{alone['per_second']:.0f}/s alone, {told['per_second']:.0f}/s traced"
        print(f"\n{n} launches: {rates}"
              f" ({slower:.2f} times as long)")  # fmt: skip


def found(w: Watched) -> bool:
    """Whether the library is known that every test uses; others may be already."""
    path = str(libcuda() / "libcuda.so.1")
    return any(
        path in program and s.status == "attached" for (_, program), s in w.coverage().items()
    )


def test_an_agent_says_that_it_sheds_and_when_that_is_over(tmp_path: Path) -> None:
    fast = parse({"gpu": {"kernel_us": 0.01}, "library": {"log_launches": False}})
    with watched("launches") as w:
        child = subprocess.Popen(
            workload("launches", count=300_000, gate=1), env=environment(tmp_path, fast),
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
        )  # fmt: skip
        assert child.stdin
        assert child.stdout
        for word in ("begun", "ready"):
            assert child.stdout.readline().strip() == word
            if word == "ready":
                until(lambda: found(w), "it is found")
            child.stdin.write("go\n")
            child.stdin.flush()
        until(lambda: w.coverage()["launches", ""].status == "shed", "shedding is said")
        assert f"process {child.pid}:" in w.coverage()["launches", ""].reason
        until(lambda: w.coverage()["launches", ""].status == "attached", "it is over")
        child.communicate("go\n", timeout=60)
        w.stop()
        (process,) = truth.read_all(tmp_path)
        mine = last(w.rows("meta.process"), pid=process.pid)["id"]
        threads = w.rows("cuda.thread")
        threads = threads[threads["process"] == mine]
        single = w.rows("cuda.launch")
        single = single[single["process"] == mine]
        assert threads["count"].sum() == process.calls("cuLaunchKernel") == 300_000
        assert len(single) + threads["shed"].sum() == 300_000
