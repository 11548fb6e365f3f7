"""The agent is killed at any moment, with calls in flight: the target never notices."""

from __future__ import annotations

import json
import random
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.cuda.test_targets import at
from tests.cuda.test_ways_out import code_of
from tests.simgpu import build, truth
from tests.simgpu.run import environment
from tests.simgpu.scenario import parse
from tests.simgpu.target import Target
from tests.support import programs
from tests.support.wait import until

pytestmark = [pytest.mark.bpf, pytest.mark.tools("gcc")]

SEED = 20_261
THREADS = 3
NAMES = ("cuMemAlloc_v2", "cuLaunchKernel", "cuCtxSynchronize", "cuMemFree_v2")
BUSY = f"""
import json, os, sys, threading
from tests.simgpu.driver import Driver
driver, over, done = Driver(), threading.Event(), []
context = driver.start()
kernel = driver.kernel("k")

def go():
    driver.ok("cuCtxSetCurrent", context)
    rounds = 0
    while not over.is_set():
        address = driver.get("cuMemAlloc_v2", 4096)
        driver.launch(kernel)
        driver.ok("cuCtxSynchronize")
        driver.ok("cuMemFree_v2", address)
        rounds += 1
    done.append(rounds)

threads = [threading.Thread(target=go) for _ in range({THREADS})]
for t in threads:
    t.start()
print("up", flush=True)
children = 0
while sys.stdin.readline().strip() == "fork":
    child = os.fork()
    if not child:
        os._exit(driver.call("cuCtxSetCurrent", 0) and 0)
    children += os.waitpid(child, 0)[1] == 0
    print(children, flush=True)
over.set()
for t in threads:
    t.join()
print(json.dumps([sum(done), len(done), children]), flush=True)
"""


def test_a_target_outlives_every_kill(tmp_path: Path) -> None:
    """While probes are put in, sit there, and are taken out.  ``other`` is as in test_ways_out."""
    library, copy, folder = (tmp_path / n for n in ("library", "copy", "truth"))
    for x in (library, copy):
        shutil.copytree(build.libcuda(), x, symlinks=True)
    other = Target(tmp_path / "other", prefix=at(copy))
    other.start()
    quick = parse({"kernels": {"k": {"us": 500}}, "library": {"log_launches": False}})
    chance = random.Random(SEED)
    busy = subprocess.Popen(
        [*at(library), sys.executable, "-c", BUSY], env=environment(folder, quick), text=True,
        stdin=subprocess.PIPE, stdout=subprocess.PIPE,
    )  # fmt: skip
    try:
        assert busy.stdin
        assert busy.stdout
        assert busy.stdout.readline() == "up\n"
        ends: list[Callable[[subprocess.Popen[bytes]], None]] = [
            lambda agent: _kill_after(agent, chance.uniform(0, 0.05)),  # soon after the first
            lambda agent: _kill_after(agent, chance.uniform(0.05, 1)),  # all sit there
            lambda agent: _kill_while_it_ends(agent, chance.uniform(0, 0.2)),
        ]
        for i in range(6):
            with _agent(tmp_path, busy.pid) as agent:
                _wait_for_probes(agent.pid)
                held = programs.held_by(agent.pid)
                ends[i % len(ends)](agent)
                agent.wait(20)
            busy.stdin.write("fork\n")
            busy.stdin.flush()
            assert busy.stdout.readline() == f"{i + 1}\n"
            until(lambda h=held: h and not h & programs.loaded(), "our programs are gone")  # type: ignore[misc]
            until(lambda: code_of(busy.pid) == code_of(other.pid), "its code is what it was")
        busy.stdin.write("end\n")
        busy.stdin.flush()
        rounds, threads, children = json.loads(busy.stdout.readline())
        assert busy.wait(20) == 0
    finally:
        busy.kill()
        busy.communicate()
        other.close()
    assert (threads, children) == (THREADS, 6)
    counts = truth.of_pid(folder, busy.pid).counts
    for name in NAMES:
        c = counts[name]
        assert (c.calls, c.returned, c.failed) == (rounds, rounds, 0), name
    assert rounds > 1000


def _agent(folder: Path, pid: int) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-I", "-m", "dsprobe.agent.commands.main", "agent"]
    command += ["--socket", str(folder / "socket"), "--probes", "calls,launches,memory"]
    return subprocess.Popen([*command, "--pid", str(pid)], stderr=subprocess.DEVNULL)


def _wait_for_probes(pid: int) -> None:
    """Until the first of them sit in it: others follow in the next milliseconds."""
    deadline = time.monotonic() + 20
    while not programs.in_libraries(pid):
        assert time.monotonic() < deadline
        time.sleep(0.002)


def _kill_after(agent: subprocess.Popen[bytes], seconds: float) -> None:
    time.sleep(seconds)  # the moment is what is tried
    agent.kill()


def _kill_while_it_ends(agent: subprocess.Popen[bytes], seconds: float) -> None:
    agent.send_signal(signal.SIGTERM)
    _kill_after(agent, seconds)
