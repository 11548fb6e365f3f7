"""``dsprobe top`` on a terminal, for a server that is running already."""

from __future__ import annotations

import contextlib
import os
import pty
import subprocess
import sys
import time
from pathlib import Path

import pytest

from dsprobe.probes import driver
from dsprobe.recordings.connection import Connection, Refused
from dsprobe.recordings.live import LiveSession
from dsprobe.recordings.model import Rows
from dsprobe.recordings.session import FOREVER
from tests.simgpu.run import environment, workload
from tests.simgpu.scenario import parse
from tests.support.wait import until

pytestmark = [pytest.mark.bpf, pytest.mark.tools("gcc")]

SOON_NS = 10_000_000_000
"""Generous: with what was compiled kept, a machine at rest takes one second."""


def test_a_running_server_is_traced_soon_after_the_start(tmp_path: Path) -> None:
    fast = parse({"library": {"log_launches": False}})
    server = subprocess.Popen(
        workload("launches", count=1 << 40, rate=1000), env=environment(tmp_path / "truth", fast),
        stdout=subprocess.DEVNULL,
    )  # fmt: skip
    try:
        until(lambda: driver.mapped_by(server.pid), "the server has started")
        _top(tmp_path / "socket", server.pid)  # so that what it compiles is kept
        began, placed, processes, launches = _top(tmp_path / "socket", server.pid)
        assert (placed["attached"] == 1).any()
        assert began < int(placed["t"].min()) < began + SOON_NS
        [number] = set(processes["id"][processes["pid"] == server.pid].tolist())
        assert launches["count"][launches["process"] == number].sum()
    finally:
        server.kill()
        server.wait()


def _top(socket: Path, pid: int) -> tuple[int, Rows, Rows, Rows]:
    """When it was started, and what its agent had said by the time it saw the first launches."""
    ours, theirs = pty.openpty()
    os.set_blocking(ours, False)
    command = [sys.executable, "-I", "-m", "dsprobe.agent.commands.main", "top"]
    began = time.monotonic_ns()
    top = subprocess.Popen(
        [*command, "--socket", str(socket), "--pid", str(pid)], stdin=theirs, stdout=theirs,
        stderr=subprocess.DEVNULL, env={**os.environ, "TERM": "xterm"},
    )  # fmt: skip
    os.close(theirs)

    def drawn() -> None:
        """Take what the screen writes, or it would wait."""
        with contextlib.suppress(OSError):
            while os.read(ours, 1 << 16):
                pass

    def connect() -> Connection | None:
        drawn()
        try:
            return Connection(str(socket))
        except Refused:
            return None

    try:
        session = LiveSession(until(connect, "the agent listens"))

        def traced() -> int:
            drawn()
            session.refresh()
            return len(session.read("cuda.thread", 0, FOREVER))

        def ended() -> bool:
            drawn()
            return top.poll() is not None

        until(traced, "its launches are seen")
        os.write(ours, b"q")
        streams = ("meta.placement", "meta.process", "cuda.thread")
        placed, processes, launches = (session.read(s, 0, FOREVER) for s in streams)
        session.close()
        until(ended, "the screen has ended")
        assert top.returncode == 0
        until(lambda: not socket.exists(), "its agent has ended, too")
        return began, placed, processes, launches
    finally:
        top.kill()
        top.wait()
        os.close(ours)
