"""``dsprobe report`` as it is typed: sentences, JSON, exit codes."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from dsprobe.recordings import cudastreams as cuda
from dsprobe.recordings import streams as st
from dsprobe.recordings.session import FOREVER
from dsprobe.recordings.writer import Writer
from tests.recordings.cudahost import BOOT, MIB, SECOND, CudaHost, hist
from tests.recordings.sample import random_rows


def write(host: CudaHost, path: Path, end: bool = True) -> Path:
    host.session.refresh()
    writer = Writer(path)
    for name, stream in host.session.streams.items():
        writer.append(stream, host.session.read(name, 0, FOREVER))
    if end:
        writer.close()
    else:
        writer.flush()
        writer.abandon()
    return path


def server(leaks: bool, seconds: int = 100) -> CudaHost:
    host = CudaHost()
    host.process(1, 4242, command="python3 serve.py", driver="550.54.14", python="3.11.2")
    host.thread(1, 1, 4243)
    sync = host.string(1, "cuStreamSynchronize")
    leak = host.stack(1, ["Engine.remember@serve.py:20", "Engine.step@serve.py:9"])
    weights = host.stack(2, ["load@serve.py:3"])
    for _ in range(40):
        weights.alloc(host.now, 100 * MIB)

    def act(second: int, t: int) -> None:
        leak.alloc(t, MIB)
        if not leaks and second % 7 == 6:
            while leak.held:
                leak.free()
        s, now = host.session, host.now + SECOND
        s.append("cuda.thread", t=now, dt=SECOND, process=1, thread=1, count=100, shed=25,
                 hist=[hist(s20=100)], longest=9_000_000, longest_end=now, within=sync,
                 within_time=8_000_000)  # fmt: skip
        s.append("cuda.calls", t=now, dt=SECOND, process=1, function=sync, kind=1, count=4,
                 busy=SECOND // 4, hist=[hist(s25=4)])  # fmt: skip

    host.run(seconds, act)
    s = host.session
    s.append("cuda.open", t=host.now, process=1, thread=1, function=sync,
             since=host.now - 3 * SECOND)  # fmt: skip
    s.append("cuda.call", t=host.now - 9 * SECOND, process=1, thread=1, function=sync, kind=1,
             stack=2, duration=400_000_000, result=700)  # fmt: skip
    s.append("meta.loss", t=host.now, stream="gpu.alloc", reason="ring full", lost=12)
    return host


def run(*words: object) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "dsprobe.agent.commands.main", "report", *map(str, words)],
        capture_output=True, text=True, timeout=60,
    )  # fmt: skip


def test_a_leak_comes_first_with_its_numbers(tmp_path: Path) -> None:
    file = write(server(leaks=True), tmp_path / "a.mcap")
    done = run(file)
    assert (done.returncode, done.stderr) == (0, "")
    lines = done.stdout.splitlines()
    assert lines[2] == "1 stack leaks GPU memory, fastest first:"
    assert lines[3] == "  1. Engine.remember (serve.py:20)"
    assert "python3:4242 grows by 60.0M/min (60.0 blocks/min) of device memory" in lines[4]
    assert "over 8 windows of 11.0 s" in lines[4]
    assert "<- Engine.step (serve.py:9)" in lines[6]
    for text in (
        "3.91G of device memory live in 40 blocks",
        "driver 550.54.14, Python 3.11.2",
        "in sync         0.25 threads on average: 25.0s in 400 calls",
        "engine:4243 launches 101/s, 10,000 in all",
        "25.0% without a row of their own",
        "python3:4242 engine:4243 in cuStreamSynchronize for 3.00s",
        "9.00ms python3:4242 engine:4243",
        "8.00ms of it in cuStreamSynchronize",
        "400ms cuStreamSynchronize by python3:4242 engine:4243 at load (serve.py:3), error 700",
        "Rows lost: 12 of gpu.alloc.",
    ):
        assert text in done.stdout, text


def test_what_went_with_its_process_is_no_free(tmp_path: Path) -> None:
    host = server(leaks=True)
    host.session.append("gpu.memory", t=host.now + SECOND, dt=SECOND, process=1, kind=0, frees=140,
                        freed=4100 * MIB, reclaimed=139, reclaimed_bytes=4000 * MIB)  # fmt: skip
    host.process(1, 4242, ended=host.now + SECOND)
    said = run(write(host, tmp_path / "a.mcap")).stdout
    assert "140 allocations, 1 free, 139 never freed (3.91G): gone with the process" in said
    assert "peak 4.00G" in said


def test_a_healthy_one_is_said_to_be_and_gates_pass(tmp_path: Path) -> None:
    file = write(server(leaks=False), tmp_path / "a.mcap")
    done = run(file, "--fail-on", "leak")
    assert done.returncode == 0
    assert done.stdout.splitlines()[2] == "No stack leaks GPU memory in python3:4242."


def test_a_process_that_was_there_before_is_said_to_be(tmp_path: Path) -> None:
    host = server(leaks=False)
    host.process(1, 4242, late=BOOT + SECOND)
    host.process(2, 4300, "idle", late=BOOT + 2 * SECOND)
    file = write(host, tmp_path / "late.mcap")
    said = run(file).stdout
    assert said.count("was there before: what it had allocated by 1970-01-01T00:16:4") == 2
    assert "no GPU memory allocated in this time since it was first seen" in said
    found = json.loads(run(file, "--json").stdout)["processes"]
    assert [p["late"] for p in found if p["pid"] == 4242] == ["1970-01-01T00:16:41.000000+00:00"]
    assert "was there before" not in run(write(server(leaks=False), tmp_path / "b.mcap")).stdout


def test_gates_and_json(tmp_path: Path) -> None:
    file = write(server(leaks=True), tmp_path / "a.mcap")
    done = run(file, "--fail-on", "leak", "--json", "--top", 1)
    assert done.returncode == 6
    said = json.loads(done.stdout)
    (leak,) = said["leaks"]
    assert leak["where"] == "Engine.remember (serve.py:20)"
    assert leak["frames"][0] | {"id": 0} == {
        "id": 0, "kind": "python", "function": "Engine.remember", "file": "serve.py", "line": 20,
        "module": "", "offset": 0, "build_id": "", "text": "Engine.remember (serve.py:20)",
    }  # fmt: skip
    assert leak["bytes_per_minute"] == pytest.approx(60 * MIB)
    assert said["lost"] == {"gpu.alloc": 12}
    assert len(said["gaps"]) == 1
    (process,) = said["processes"]
    assert process["blocked"]["sync"]["threads"] == pytest.approx(0.25, rel=0.02)


def test_thresholds_and_the_interval(tmp_path: Path) -> None:
    file = write(server(leaks=True), tmp_path / "a.mcap")
    done = run(file, "--fail-on", "leak", "--min-growth", "1G")
    assert done.returncode == 0
    done = run(file, "--fail-on", "leak", "--to", "40s")
    assert done.returncode == 0
    assert "Not enough time yet to tell of leaks in python3:4242: seen for 40.0 s of 90.0 s." in (
        done.stdout
    )
    done = run(file, "--fail-on", "leak", "--to", "40s", "--window", "3s", "--warmup", "5s")
    assert done.returncode == 6


def test_what_was_cut_off_is_said(tmp_path: Path) -> None:
    file = write(server(leaks=False), tmp_path / "a.mcap", end=False)
    assert run(file).returncode == 3


def test_where_nobody_used_cuda(tmp_path: Path) -> None:
    host = CudaHost()
    for second in range(9):
        host.session.append("cpu.load", t=BOOT + second * SECOND, dt=SECOND)
    done = run(write(host, tmp_path / "a.mcap"))
    assert done.returncode == 0
    assert "No process used CUDA in this time." in done.stdout


def test_a_caching_allocator_is_named(tmp_path: Path) -> None:
    host = server(leaks=True)
    host.session.append("meta.frame", t=BOOT, id=500, kind=1, module="libc10_cuda.so",
                        function="c10::CUDACachingAllocator::malloc(unsigned long)")  # fmt: skip
    host.session.append("meta.stack", t=BOOT, id=1, depth=2, frame=500)
    done = run(write(host, tmp_path / "a.mcap"))
    assert "growing segments mean tensors that stay" in done.stdout


def test_a_file_of_an_enemy_gets_no_control_of_the_terminal(tmp_path: Path) -> None:
    host = CudaHost()
    for stream in cuda.CUDA_STREAMS:
        rows = random_rows(stream, 100, 3, BOOT, 20 * SECOND)
        for f in stream.fields:
            if f.ref or f.name == "id":
                rows[f.name] %= 5
            if f.is_text:
                rows[f.name] = "\x1b[2J\r\n\x07\u202e" + rows[f.name]
        host.session.append_rows(stream, rows[np.argsort(rows["t"], kind="stable")])
    host.session.append("meta.string", t=BOOT, id=1, text="\x1b]0;x\x07")
    file = write(host, tmp_path / "a.mcap")
    for words in ((file,), (file, "--json")):
        done = run(*words)
        assert done.returncode in (0, 3), done.stderr
        assert all(ch.isprintable() or ch == "\n" for ch in done.stdout)
    assert st.META_STRING.name in cuda.GPU_ALLOC.by_name["function"].ref
