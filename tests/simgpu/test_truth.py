"""The truth is true: threads, forks, kills, a full log, nested calls, stacks."""

from __future__ import annotations

import json
import os
import signal
import subprocess
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.simgpu import truth
from tests.simgpu.build import gcc
from tests.simgpu.conftest import MakeTarget, Script
from tests.simgpu.run import environment, workload
from tests.simgpu.scenario import Scenario, parse
from tests.simgpu.target import OUT, Target
from tests.support.wait import until


def work(folder: Path, name: str, scenario: Scenario | None = None, **options: Any) -> Any:
    """Run a workload to its end; what it says."""
    done = subprocess.run(
        workload(name, **options), env=environment(folder, scenario),
        capture_output=True, text=True, timeout=60,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout) if done.stdout else None


def test_launches_of_threads_are_counted_exactly(tmp_path: Path) -> None:
    few = parse({"kernels": {f"kernel_{i}": {"us": 0} for i in range(7)}})
    work(tmp_path, "launches", few, threads=4, count=20011, streams=2, sync=1000)
    (process,) = truth.read_all(tmp_path)
    assert process.calls("cuLaunchKernel") == 4 * 20011
    assert process.calls("cuStreamSynchronize") == 4 * 20
    events = process.of("cuLaunchKernel")
    assert process.lost == 0
    assert sorted(Counter(events["tid"].tolist()).values()) == [20011] * 4
    assert Counter(events["args"][:, 0].tolist()).most_common()[0][1] == 4 * -(-20011 // 7)
    assert (events["ended"] >= events["begun"]).all()


def test_one_thread_launches_a_million_times_a_second(tmp_path: Path) -> None:
    fast = parse({"gpu": {"kernel_us": 0.01}, "library": {"log_launches": False}})
    told = work(tmp_path, "launches", fast, count=1_000_003)
    (process,) = truth.read_all(tmp_path)
    assert process.calls("cuLaunchKernel") == 1_000_003
    assert told["per_second"] > 1e6


def test_launches_come_at_the_rate_that_is_asked_for(tmp_path: Path) -> None:
    work(tmp_path, "launches", rate=2000, count=600)
    (process,) = truth.read_all(tmp_path)
    before, launches = process.of("cuStreamCreate")[0], process.of("cuLaunchKernel")
    due = np.arange(600) / 2000 * 1e9
    assert (launches["begun"] - before["ended"] >= due - 1000).all()  # none before its time


def test_a_full_log_loses_calls_and_says_so_but_counts_them(tmp_path: Path) -> None:
    small = parse({"library": {"events": 100}})
    work(tmp_path, "storm", small, count=500, kinds=1)
    (process,) = truth.read_all(tmp_path)
    assert len(process.events) == 100
    assert process.lost == process.begun - 100 > 800
    assert process.calls("cuMemAlloc_v2") == 500


@pytest.mark.parametrize("cross", [0, 1])
def test_a_storm_of_allocations_is_counted_exactly(tmp_path: Path, cross: int) -> None:
    n, count, keep = 3, 701, 14
    options: dict[str, Any] = {
        "threads": n,
        "count": count,
        "live": 70,
        "keep": keep,
        "wrong": 7,
        "cross": cross,
    }
    work(tmp_path, "storm", **options, size=4096)
    (process,) = truth.read_all(tmp_path)
    page, each = 2 << 20, n * keep // 7
    live = {k: v.bytes for k, v in process.live.items() if v.bytes}
    assert live == {
        "device": each * 4096, "async": each * 4096, "pool": each * 4096, "managed": each * 4096,
        "pitch": each * 64 * 512, "host": each * 4096,
        "physical": each * page, "mapped": each * page, "reserved": each * page,
    }  # fmt: skip
    kinds = Counter(i % 7 for i in range(count))
    names = ("cuMemAlloc_v2", "cuMemAllocAsync", "cuMemAllocFromPoolAsync", "cuMemAllocPitch_v2",
             "cuMemAllocManaged", "cuMemHostAlloc", "cuMemCreate")  # fmt: skip
    assert [process.calls(x) for x in names] == [n * kinds[k] for k in range(7)]
    wrong = -(-count // 7)
    assert process.counts["cuMemFree_v2"].failed == n * wrong
    freed = n * (kinds[0] + kinds[3] + kinds[4]) - 3 * each
    assert process.calls("cuMemFree_v2") == freed + n * 2 * wrong
    assert process.counts["cuMemRelease"].returned == n * kinds[6] - each


def test_the_log_gives_the_live_bytes_again(tmp_path: Path) -> None:
    """Events alone, replayed, come to the same as the counters: addresses are reused a lot."""
    work(tmp_path, "storm", threads=4, count=700, live=35, keep=7, wrong=5, cross=1)
    (process,) = truth.read_all(tmp_path)
    live: dict[int, int] = {}
    sizes = {"cuMemAlloc_v2": 1, "cuMemAllocAsync": 1, "cuMemAllocFromPoolAsync": 1,
             "cuMemAllocManaged": 1, "cuMemCreate": 1}  # fmt: skip
    frees = ("cuMemFree_v2", "cuMemFreeAsync", "cuMemRelease")
    moments = []  # an allocation is there when it returns, a free may show once it has begun
    for e in process.events[process.events["result"] == 0]:
        name, args = process.symbols[e["symbol"]], e["args"].tolist()
        if name in sizes:
            moments.append((int(e["ended"]), int(e["out"]), args[sizes[name]]))
        elif name == "cuMemAllocPitch_v2":
            moments.append((int(e["ended"]), int(e["out"]), 512 * args[3]))
        elif name in frees and args[0]:
            moments.append((int(e["begun"]), args[0], 0))
    for _, address, size in sorted(moments):
        assert (address in live) == (size == 0)
        if size:
            live[address] = size
        else:
            del live[address]
    assert sum(live.values()) == process.bytes()


def test_children_that_are_forked_executed_and_killed(tmp_path: Path) -> None:
    options: dict[str, Any] = {"children": 6, "count": 50, "keep": 4, "kill": 3, "exec": 2}
    assert work(tmp_path, "forks", **options) == {"children": 6, "failed": 0}
    processes = truth.read_all(tmp_path)
    assert len({p.pid for p in processes}) == 6
    for p in processes:
        assert p.calls("cuMemAlloc_v2") == p.calls("cuLaunchKernel") == 50
        assert p.calls("cuMemFree_v2") == 46
        assert p.bytes() == 4 * 4096 + 0 + 1 + 2 + 3
        assert (p.of("cuLaunchKernel")["tid"] == p.pid).all()


@pytest.mark.parametrize("method", ["fork", "spawn", "forkserver"])
def test_worker_processes(tmp_path: Path, method: str) -> None:
    work(tmp_path, "workers", method=method, workers=2, count=20, keep=3)
    processes = truth.read_all(tmp_path)
    assert [p.calls("cuMemAlloc_v2") for p in processes] == [20, 20]
    assert [p.calls("cuMemFree_v2") for p in processes] == [17, 17]
    assert sorted(p.bytes() for p in processes) == [3 << 12, 3 << 13]


def test_threads_of_python(tmp_path: Path) -> None:
    work(tmp_path, "threads", threads=3, count=40)
    (process,) = truth.read_all(tmp_path)
    for name in ("cuMemAllocAsync", "cuMemFreeAsync", "cuLaunchKernel", "cuStreamSynchronize"):
        by_thread = Counter(process.of(name)["tid"].tolist())
        assert list(by_thread.values()) == [40, 40, 40]
    assert process.bytes() == 0


def test_a_forked_child_cannot_use_the_parents_driver(target: Target) -> None:
    target.ok("cuMemAlloc_v2", OUT, 1000)
    pid, results = target.fork(["cuMemAlloc_v2", OUT, 10], ["cuInit", 0], start=False)
    assert results == [3, 3]
    child = truth.of_pid(target.folder, pid)
    assert child.counts["cuMemAlloc_v2"].failed == 1
    assert child.bytes() == 0
    assert target.truth.bytes() == 1000
    assert target.call("cuMemAlloc_v2", OUT, 10)[0] == 0  # the parent's goes on


def test_a_fork_before_cuinit_is_free_to_use_it(make_target: MakeTarget) -> None:
    target = make_target()
    pid, results = target.fork(["cuMemAlloc_v2", OUT, 10], ["cuMemAlloc_v2", OUT, 20])
    assert results == [0, 0]
    assert truth.of_pid(target.folder, pid).bytes() == 30
    assert {p.pid for p in truth.read_all(target.folder)} == {pid}


def test_a_killed_process_leaves_what_it_was_in(tmp_path: Path) -> None:
    hour = parse({"kernels": {"k": {"us": 3.6e9}}})
    text = (
        "from tests.simgpu.driver import Driver\nd = Driver(); d.start()\n"
        "d.get('cuMemAlloc_v2', 100); s = d.get('cuStreamCreate', 1)\n"
        "d.launch(d.kernel('k'), s); d.ok('cuStreamSynchronize', s)"
    )
    words = [*workload("console")[:1], "-c", text]
    process = subprocess.Popen(words, env=environment(tmp_path, hour))

    def waiting() -> bool:
        found = truth.read_all(tmp_path)
        return bool(found) and len(found[0].of("cuStreamSynchronize")) > 0

    until(waiting, "it waits for the stream")
    assert process.poll() is None
    process.send_signal(signal.SIGKILL)
    process.wait(10)
    (left,) = truth.read_all(tmp_path)
    (event,) = left.of("cuStreamSynchronize")
    assert event["ended"] == 0
    assert vars(left.counts["cuStreamSynchronize"]) == {"calls": 1, "returned": 0, "failed": 0}
    assert left.bytes() == 100


def test_calls_inside_calls_are_told_apart(make_target: MakeTarget) -> None:
    target = make_target(library={"nested": True})
    target.start()
    address = target.ok("cuMemAllocPitch_v2", OUT, OUT, 512, 2, 4)
    target.ok("cuMemcpyHtoD_v2", address, {"buffer": 1024}, 1024)
    found = target.truth
    inner = found.of("cuMemAlloc_v2", "cuStreamSynchronize")
    outer = found.of("cuMemAllocPitch_v2", "cuMemcpyHtoD_v2")
    assert inner["depth"].tolist() == [2, 2]
    assert outer["depth"].tolist() == [1, 1]
    assert (outer["begun"] <= inner["begun"]).all()
    assert (inner["ended"] <= outer["ended"]).all()
    assert found.bytes() == 1024


def test_stacks_are_those_of_the_calls_in_the_log(tmp_path: Path) -> None:
    work(tmp_path, "stacks", repeat=2, depth=40, functions=5)
    main, *children = truth.read_all(tmp_path)
    assert len(children) == 2
    for process in (main, *children):
        text = (tmp_path / f"{process.pid}.stacks").read_text()
        rows = [json.loads(line) for line in text.splitlines()]
        told = {(r["begun"], r["tid"], r["symbol"], r["bytes"]) for r in rows}
        logged = {
            (int(e["begun"]), int(e["tid"]), process.symbols[e["symbol"]], int(e["args"][1]))
            for e in process.of("cuMemAlloc_v2")
        }
        assert {t for t in told if t[2] == "cuMemAlloc_v2"} == logged
        assert len(rows) > 0
    rows = [json.loads(x) for x in (tmp_path / f"{main.pid}.stacks").read_text().splitlines()]
    sizes = [r["bytes"] for r in rows if r["bytes"]]
    assert len(set(sizes)) == len(sizes)
    names = {r["shape"]: [f[0] for f in r["frames"]] for r in rows if r["bytes"]}
    assert {"plain", "deep", "generator", "coroutine", "named", "thread", "distinct"} <= set(names)
    assert names["plain"][:6] == ["call", "ok", "get", "allocate", "inner", "plain"]
    assert names["deep"][4:45] == ["deep"] * 41
    assert names["distinct"][4] == "made_4"


def test_the_injected_library_is_started_once(tmp_path: Path, script: Script) -> None:
    source, library = tmp_path / "inject.c", tmp_path / "inject.so"
    source.write_text(
        "#include <unistd.h>\n"
        'int InitializeInjection(void) { return write(2, "started\\n", 8) > 0; }'
    )
    gcc("-shared", "-fPIC", "-o", str(library), str(source))
    text = (
        "from tests.simgpu.driver import Driver\nd = Driver()\n"
        "d.ok('cuDriverGetVersion', (__import__('ctypes').c_int * 1)())\n"
        "import sys; print('before', file=sys.stderr, flush=True)\n"
        "d.ok('cuInit', 0); d.ok('cuInit', 0)"
    )
    env = environment(tmp_path, base=os.environ | {"CUDA_INJECTION64_PATH": str(library)})
    words = [*workload("console")[:1], "-c", text]
    done = subprocess.run(words, env=env, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "before\nstarted\n")


def test_without_a_folder_it_works_and_keeps_nothing(tmp_path: Path, script: Script) -> None:
    script(
        """
        import os
        del os.environ["SIMGPU_TRUTH"]
        from tests.simgpu.driver import Driver
        driver = Driver()
        driver.start()
        driver.get("cuMemAlloc_v2", 100)
        """
    )
    assert truth.read_all(tmp_path) == []


@pytest.mark.parametrize("octets", [b"", b"SIMTRUTH", b"x" * 100_000])
def test_a_file_that_holds_no_truth_is_refused(tmp_path: Path, octets: bytes) -> None:
    path = tmp_path / "1-1-0.truth"
    path.write_bytes(octets)
    with pytest.raises(ValueError, match="holds no truth"):
        truth.read(path)
