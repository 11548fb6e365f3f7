"""However the agent ends, what it traced goes on, as it was before."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from dsprobe.probes import driver
from dsprobe.recordings.connection import Connection
from dsprobe.recordings.live import LiveSession
from dsprobe.recordings.session import FOREVER
from tests.cuda.test_targets import CALLS, at, work
from tests.simgpu import build
from tests.simgpu.target import Target
from tests.support import programs
from tests.support.wait import until

pytestmark = [pytest.mark.bpf, pytest.mark.tools("gcc")]


def code_of(pid: int) -> bytes:
    """The library's machine code as the process has it in memory."""
    [mapped] = driver.libraries_of(pid)
    start, end = (int(x, 16) for x in mapped.area.split("-"))
    with open(f"/proc/{pid}/mem", "rb", 0) as memory:
        memory.seek(start)
        return memory.read(end - start)


def code_in(path: Path) -> bytes:
    """The same as it is in the file."""
    fd = os.open(path, os.O_RDONLY)
    try:
        begin, end = driver.read(fd, str(path)).text
        return os.pread(fd, end - begin, begin)
    finally:
        os.close(fd)


@pytest.mark.parametrize("end", [signal.SIGTERM, signal.SIGKILL])
def test_after_the_agent_the_target_is_as_before(tmp_path: Path, end: signal.Signals) -> None:
    """``other`` has a copy of the library that this agent leaves alone.  Whatever else on this host
    puts probes into driver libraries puts them into both."""
    library, copy, socket = tmp_path / "library", tmp_path / "copy", str(tmp_path / "socket")
    for x in (library, copy):
        shutil.copytree(build.libcuda(), x, symlinks=True)
    other = Target(tmp_path / "other", prefix=at(copy))
    with Target(tmp_path / "truth", prefix=at(library)) as t, other:
        t.start()
        other.start()
        command = [sys.executable, "-I", "-m", "dsprobe.agent.commands.main", "agent"]
        command += ["--socket", socket, "--probes", "calls,launches,memory", "--pid", str(t.pid)]
        with subprocess.Popen(command, stderr=subprocess.PIPE) as agent:
            try:
                until(lambda: Path(socket).exists(), "it listens")
                session = LiveSession(Connection(socket))
                until(lambda: rows(session, "meta.placement"), "probes are put")
                work(t)
                assert code_of(t.pid).count(0xCC) > code_in(library / "libcuda.so.1").count(0xCC)
                until(lambda: rows(session, "cuda.calls"), "calls are seen")
                held = programs.held_by(agent.pid)
                assert held
                assert held <= programs.loaded()
            finally:
                agent.send_signal(end)
                agent.wait(20)
            session.close()
        # It runs on as fast as before: no breakpoint of ours is left to be hit, nor what it would
        # run.
        work(t)
        until(lambda: code_of(t.pid) == code_of(other.pid), "its code is what it was")
        until(lambda: not held & programs.loaded(), "our programs are gone")
        work(t)
        counts = t.truth.counts["cuMemAlloc_v2"]
        assert (counts.calls, counts.returned, counts.failed) == (3 * CALLS, 3 * CALLS, 0)


def rows(session: LiveSession, stream: str) -> int:
    session.refresh()
    return len(session.read(stream, 0, FOREVER))
