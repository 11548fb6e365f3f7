"""The hunt as a user goes about it: two servers run, one of them leaks in one Python function,
beside larger allocators that are stable and one that breathes."""

from __future__ import annotations

import contextlib
import functools
import json
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from dsprobe.recordings.filesession import open_file
from dsprobe.recordings.leaks import Thresholds, find_leaks
from dsprobe.tui.text import once
from tests.simgpu.run import environment, workload
from tests.simgpu.scenario import parse
from tests.simgpu.target import Target
from tests.support.agents import watched
from tests.support.wait import until

pytestmark = [pytest.mark.bpf, pytest.mark.tools("gcc")]

DSPROBE = str(Path(sys.executable).with_name("dsprobe"))
FAST = {"gpu": {"memory": "16GiB"}, "kernels": {"prefill": {"us": 20}, "decode_layer": {"us": 5}}}
QPS, LEAK = 25, 256 << 10
SECONDS = 30
SECOND = 10**9
QUICK = ("--warmup", "4s", "--window", "2s", "--min-growth", "1M")
"""A server would be watched for minutes; this one lives faster."""


@contextlib.contextmanager
def server(folder: Path, **options: Any) -> Iterator[subprocess.Popen[str]]:
    """A sample server with a client of its own that waits for a line on stdin."""
    folder.mkdir()
    process = subprocess.Popen(
        workload("server", gate=1, qps=QPS, seconds=SECONDS + 30, prompt=40, tokens=4, layers=4,
                 weights_mib=1024, breath=20, **options),
        env=environment(folder, parse(FAST)), stdin=subprocess.PIPE, stdout=subprocess.PIPE,
        text=True,
    )  # fmt: skip
    try:
        assert process.stdout
        assert process.stdout.readline() == "begun\n"
        yield process
    finally:
        process.kill()
        process.wait()
        process.stdout.close()


@dataclass
class Hunt:
    """What the verbs printed of both servers, by verb."""

    path: Path
    leaking: int
    healthy: int
    file: dict[str, Any]
    memory: dict[str, Any]
    text: str
    once: str
    gate: int


def run(*words: object) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [DSPROBE, *map(str, words)], capture_output=True, text=True, timeout=SECONDS + 60
    )


@pytest.fixture(scope="module")
def hunt(tmp_path_factory: pytest.TempPathFactory) -> Hunt:
    folder = tmp_path_factory.mktemp("hunt")
    out = folder / "run.mcap"
    with contextlib.ExitStack() as stack:
        # It holds the library, so that the probes are there when the servers begin.
        first = stack.enter_context(Target(folder / "first"))
        leaking = stack.enter_context(server(folder / "leaking", leak=LEAK))
        healthy = stack.enter_context(server(folder / "healthy", leak=0))
        pids = (first.pid, leaking.pid, healthy.pid)
        agent = stack.enter_context(watched("memory", "launches", "calls", pids=pids))
        first.start()
        until(lambda: len(agent.rows("meta.placement")), "the library has its probes")
        for process in (leaking, healthy):
            assert process.stdin
            process.stdin.write("\n")
            process.stdin.flush()
        socket = agent.session.name
        done = run("record", "-o", out, "--duration", f"{SECONDS}s", "--socket", socket)
        assert done.returncode == 0, done.stderr
        top = run("top", "--once", "--socket", socket, "--width", 200)
        assert top.returncode == 0, top.stderr
        live = run("report", "--socket", socket, "--json", *QUICK)
        assert live.returncode == 0, live.stderr
        assert leaking.poll() is None
        assert healthy.poll() is None
    file = run("report", out, "--json", *QUICK)
    assert file.returncode == 0, file.stderr
    text = run("report", out, "--fail-on", "leak", *QUICK)
    said = (json.loads(done.stdout) for done in (file, live))
    return Hunt(out, leaking.pid, healthy.pid, *said, text.stdout, top.stdout, text.returncode)


@pytest.mark.parametrize("source", ["file", "memory"])
def test_report_names_the_leak_and_nothing_else(hunt: Hunt, source: str) -> None:
    said = getattr(hunt, source)
    (leak,) = said["leaks"]
    assert leak["process"].endswith(f":{hunt.leaking}")
    assert leak["where"].startswith("Engine._remember_prefix (")
    assert leak["kind"] == "device"
    assert leak["bytes_per_minute"] == pytest.approx(60 * QPS * LEAK, rel=0.3)
    assert leak["blocks_per_minute"] == pytest.approx(60 * QPS, rel=0.3)
    assert leak["live"] == leak["blocks"] * LEAK
    functions = [f["function"] for f in leak["frames"] if f["kind"] == "python"]
    at = functions.index("Engine._remember_prefix")
    assert functions[at : at + 3] == ["Engine._remember_prefix", "Engine._prefill", "Engine._admit"]


def test_the_healthy_server_was_judged_and_found_well(hunt: Hunt) -> None:
    names = [name for name in hunt.file["judged"] if name.endswith(f":{hunt.healthy}")]
    assert len(names) == 1
    assert not [leak for leak in hunt.file["leaks"] if leak["process"] == names[0]]


def test_larger_allocators_were_there(hunt: Hunt) -> None:
    """Else there were nothing to tell the leak from."""
    by_pid = {p["pid"]: p for p in hunt.file["processes"]}
    for pid in (hunt.leaking, hunt.healthy):
        (device,) = (k for k in by_pid[pid]["memory"]["kinds"] if k["kind"] == "device")
        assert device["live"] > 1 << 30
        assert device["frees"] > QPS * SECONDS // 2
    grown = [g for g in hunt.file["growing"] if g["live"] > 1 << 30]
    assert len({g["process_id"] for g in grown}) == 2
    breathing = {g["process_id"] for g in hunt.file["growing"] if "_keep_prompt" in g["where"]}
    assert breathing <= {g["process_id"] for g in grown}


def test_the_words(hunt: Hunt) -> None:
    lines = hunt.text.splitlines()
    assert lines[2] == "1 stack leaks GPU memory, fastest first:"
    assert lines[3].startswith("  1. Engine._remember_prefix (")
    assert hunt.gate == 6


def test_top_shows_both_servers_and_the_stacks_of_the_leak(hunt: Hunt) -> None:
    assert "GPU memory live" in hunt.once
    assert "Engine._remember_prefix" in hunt.once
    for pid in (hunt.leaking, hunt.healthy):
        assert f":{pid}: " in hunt.once


def test_top_names_the_leak_first(hunt: Hunt, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same text, of the file; and as for report, leaks are told sooner than usual."""
    # The screen looks every ten seconds only, so less is left of the time.
    quick = Thresholds(warmup=3 * SECOND, window=SECOND * 3 // 2)
    found = functools.partial(find_leaks, thresholds=quick)
    monkeypatch.setattr("dsprobe.tui.memoryrows.find_leaks", found)
    with open_file(hunt.path) as session:
        lines = once(session, 200).splitlines()
    at = next(i for i, line in enumerate(lines) if line.startswith("GPU memory: "))
    assert "1 LEAK " in lines[at]
    assert "LEAK " in lines[at + 1]
    assert "Engine._remember_prefix" in lines[at + 1]
    assert not [line for line in lines[at + 2 :] if "LEAK" in line]


def test_launches_and_waits_are_told(hunt: Hunt) -> None:
    by_pid = {p["pid"]: p for p in hunt.file["processes"]}
    for pid in (hunt.leaking, hunt.healthy):
        (thread,) = by_pid[pid]["threads"]
        assert thread["launches"] > QPS * 4 * (SECONDS - 5)
        assert by_pid[pid]["blocked"]["sync"]["count"] > QPS * (SECONDS - 5)
    assert hunt.file["gaps"]
    assert not hunt.file["problems"]
