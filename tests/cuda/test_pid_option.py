"""``--pid`` as typed: who is recorded, and what is said where it cannot be."""

from __future__ import annotations

import json
import os
import shutil
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.cuda.test_targets import CALLS, at, work
from tests.simgpu import build
from tests.simgpu.target import Target
from tests.support.box import Box, box, end

pytestmark = [pytest.mark.bpf, pytest.mark.tools("gcc", "unshare", "nsenter")]


@pytest.fixture(scope="module")
def here() -> Iterator[Box]:
    with box() as b:
        yield b


@pytest.mark.parametrize("verb", ["top --once", "record -o x.mcap", "agent"])
def test_a_process_that_is_none(here: Box, verb: str) -> None:
    code, out, err = here.run(*verb.split(), "--pid", f"{os.getpid()},4194305")
    assert (code, out) == (1, "")
    assert err == "dsprobe: there is no process 4194305: pgrep -af NAME finds some\n"


def test_a_thread_is_not_a_process(here: Box) -> None:
    over = threading.Event()
    thread = threading.Thread(target=over.wait)
    thread.start()
    try:
        tid, pid = thread.native_id, os.getpid()
        code, _, err = here.run("top", "--once", "--pid", str(tid))
        assert code == 1
        assert err == f"dsprobe: {tid} is a thread of process {pid}: use --pid {pid}\n"
    finally:
        over.set()
        thread.join()


@pytest.mark.parametrize("text", ["", "x", "0", "-1", "1,,2", "1.5", "99999999999"])
def test_what_is_no_list_of_processes(here: Box, text: str) -> None:
    code, _, err = here.run("top", "--once", f"--pid={text}")
    assert code == 2
    assert f"argument --pid: '{text}' is not a list of process ids" in err


def test_an_agent_that_runs_keeps_its_targets(here: Box) -> None:
    agent = here.agent("--probes", "tcp")
    try:
        here.connect().close()
        code, _, err = here.run("top", "--once", "--pid", str(os.getpid()))
        assert code == 2
        assert "with targets of its own: leave --pid out, or name another --socket" in err
    finally:
        end(agent)


def test_a_recording_of_one_process_and_its_children(here: Box, tmp_path: Path) -> None:
    library, out = tmp_path / "library", tmp_path / "run.mcap"
    shutil.copytree(build.libcuda(), library, symlinks=True)
    wanted, other = (Target(tmp_path / n, prefix=at(library)) for n in ("wanted", "other"))
    with wanted, other:
        wanted.start()
        other.start()
        recorder = here.popen(
            "record", "-o", str(out), "--probes", "calls,memory,launches", "--pid", str(wanted.pid)
        )
        try:
            assert recorder.stderr
            assert recorder.stderr.readline().startswith(f"recording into {out}")
            for t in (wanted, other):
                work(t)
                t.fork(["cuMemGetInfo_v2", "out", "out"], ["cuMemFree_v2", 4096], start=False)
            # Children by fork are wanted too; a free of what is no address fails, and counts.
        finally:
            code, err = end(recorder)
        assert code == 0, err
    lines = here.run("dump", str(out), "--stream", "cuda.calls")[1].splitlines()
    calls = [json.loads(x) for x in lines]
    frees = sum(c["count"] for c in calls if c["function"] == "cuMemFree_v2")
    assert frees == CALLS + 1
    rows = here.run("dump", str(out), "--stream", "meta.process")[1].splitlines()
    pids = {json.loads(x)["pid"] for x in rows}
    assert wanted.pid in pids
    assert other.pid not in pids
    assert len(pids) == 2
