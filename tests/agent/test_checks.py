"""What doctor says of a machine, where the test can make it be so."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from pathlib import Path

import pytest

from dsprobe.agent import checks
from dsprobe.agent.check import LIMITED
from dsprobe.probes import unseen
from dsprobe.probes.softirq import Softirq
from dsprobe.probes.tracer import Tracer
from dsprobe.recordings import wire


@pytest.mark.bpf
def test_softirqs_that_no_program_is_run_for() -> None:
    probe = Softirq()
    tracer = Tracer([probe])
    try:
        tracer.load()
        tracer.rest("softirq_entry")
        check = checks._sight(probe)
        assert probe.unseen
        ran = probe.unseen.ran
    finally:
        tracer.close()
    assert check.status == LIMITED
    assert f"of {ran:,} softirqs" in check.detail
    assert ran > len(os.sched_getaffinity(0))
    assert check.fix


@pytest.mark.bpf
def test_softirqs_where_the_kernels_counts_cannot_be_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(unseen.Unseen.__init__, "__defaults__", (Path("/no/such/file"),))
    probe = Softirq()
    tracer = Tracer([probe])
    try:
        assert {c.status for c in tracer.load()} == {"attached"}
        check = checks._sight(probe)
    finally:
        tracer.close()
    assert check.status == LIMITED
    assert "nobody knows" in check.detail


def test_agents_that_listen_elsewhere_are_told_of(tmp_path: Path) -> None:
    """Where it looked, and who runs with another --socket: here, processes called like agents."""
    code = "import sys; print(flush=True); sys.stdin.read()"
    path = tmp_path / "other.sock"
    agent = [sys.executable, "-c", code, "dsprobe", "agent", "--socket", str(path)]
    viewer = [sys.executable, "-c", code, "dsprobe", "top", f"--socket={path}.viewer"]
    with contextlib.ExitStack() as stack:
        started = [
            stack.enter_context(subprocess.Popen(c, stdin=subprocess.PIPE, stdout=subprocess.PIPE))
            for c in (agent, viewer)
        ]
        for p in started:
            assert p.stdout
            assert p.stdout.readline()
        said = checks._agent().detail
        assert f"at {wire.SOCKET}" in said
        assert f"PID {started[0].pid} at {path}" in said
        assert f"{path}.viewer" not in said
        for p in started:
            p.communicate(b"")
    assert str(path) not in checks._agent().detail
    words = ["/usr/bin/python3", "-m", checks._MODULE, "agent", "--socket=/x"]
    assert checks._listens_at(words) == "/x"
