"""The probe in an agent, with its worker and its watchdog, read as any viewer reads one."""

from __future__ import annotations

import os
import time
from pathlib import Path

from dsprobe.probes.nvml import Nvml
from dsprobe.recordings.gpus import gpus, xids
from dsprobe.recordings.session import FOREVER
from tests.nvml.bench import SLOW
from tests.simgpu.nvml import State
from tests.support.agents import Watched, watched
from tests.support.wait import until


def probe(library: str) -> Nvml:
    return Nvml(library, again=1, slow=SLOW)


def says(it: Watched, status: str) -> str:
    """Wait until coverage says ``status``; the reason."""
    until(lambda: it.coverage()["nvml", ""].status == status, status)
    return it.coverage()["nvml", ""].reason


def test_a_hang_holds_up_neither_the_agent_nor_its_end(state: State, library: str) -> None:
    state.set({"gpus": 2})
    made = probe(library)
    with watched(made, "cpu") as it:
        assert says(it, "attached") == ""
        assert made._child
        child = made._child.pid
        state.set({"hang": 1})
        begun = time.monotonic_ns()
        state.xid(119, gpu=1)
        until(lambda: len(it.rows("nvml.xid")), "an Xid error is told meanwhile")
        assert "has not answered" in says(it, "stalled")
        t = it.rows("cpu.load")["t"].astype("int64")
        assert (t > begun).sum() >= 2
        stopping = time.monotonic_ns()
        it.stop()
        assert time.monotonic_ns() - stopping < 5 * 10**9
    until(lambda: not Path(f"/proc/{child}").exists(), "its process has ended")
    (error,) = xids(it.session, 0, FOREVER - 1)
    assert (error.xid, error.gpu) == (119, 2)


def test_a_hang_that_ends_a_lost_gpu_and_a_reload(state: State, library: str) -> None:
    state.set({"gpus": 2, "0.pids": f"{os.getpid()}:4096:7"})
    with watched(probe(library)) as it:
        says(it, "attached")
        state.set({"1.lost": 1})
        assert "GPU 1 is lost" in says(it, "shed")
        state.set({}, "1.lost")
        assert says(it, "attached") == "answers again"
        state.set({"not_loaded": 1})
        assert "modprobe nvidia" in says(it, "missing")
        state.set({"0.sm": 99}, "not_loaded")
        says(it, "attached")
        until(lambda: (it.rows("nvml.device")["sm"] == 99).any(), "values are new")
        now = time.monotonic_ns()
        until(lambda: (it.rows("nvml.process")["t"] > now).any(), "processes, too")
        first, second = gpus(it.session, 0, time.monotonic_ns())
        assert (first.values["sm"], first.state, second.state) == (99, "ok", "ok")
        (process,) = first.processes
        assert (process.pid, process.known, process.sm) == (os.getpid(), True, 7)
        assert len(it.rows("meta.loss")) == 0


def test_without_a_driver_it_is_off_and_nothing_comes() -> None:
    with watched(Nvml(lambda: None), "cpu") as it:
        assert "no libnvidia-ml.so.1" in says(it, "off")
        until(lambda: len(it.rows("cpu.load")) >= 2, "time goes by")
        rows = it.rows("meta.coverage")
        assert rows["probe"].tolist().count("nvml") == 1
        assert len(it.rows("nvml.device")) == 0
