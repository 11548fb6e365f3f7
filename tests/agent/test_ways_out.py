"""The real command: whatever way it ends, nothing of ours stays in the kernel."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from typing import Any

import pytest

from dsprobe.probes.probe import BpfProbe
from dsprobe.probes.registry import PROBES
from dsprobe.recordings.live import LiveSession
from tests.support import programs
from tests.support.box import WORKS, Box, Process, end, ready
from tests.support.wait import until

pytestmark = pytest.mark.bpf

BPF = ("softirq", "napi", "tcp", "runq")
ALL = {p.function for probe in PROBES if issubclass(probe, BpfProbe) for p in probe.programs}
SECOND = 10**9


def started(here: Box, *words: str) -> tuple[Process, LiveSession, set[int]]:
    """An agent with all its programs attached; their ids."""
    agent = here.agent(*words)
    live = here.connect()
    said = ready(live, *BPF)
    assert {said[p, ""].status for p in BPF} <= {*WORKS}
    ours = programs.held_by(agent.pid)
    assert len(ours) == len(ALL)
    assert ours <= programs.loaded()
    return agent, live, ours


def assert_clean(ours: set[int], pinned: set[str]) -> None:
    until(lambda: not ours & programs.loaded(), "the kernel has let go of all programs")
    assert programs.pinned() == pinned


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_signals_end_it_well(here: Box, number: int) -> None:
    pinned = programs.pinned()
    agent, live, ours = started(here)
    code, err = end(agent, number)
    assert code == 0, err
    assert "Traceback" not in err
    assert_clean(ours, pinned)
    until(lambda: (live.wait(0.05), not live.live)[1], "viewers are told")
    assert live.problems == ("the agent has ended",)
    assert not os.path.exists(here.path("/run/dsprobe/agent.sock"))
    assert os.listdir(here.path("/run/dsprobe")) == []
    live.close()


def test_kill_leaves_nothing_in_the_kernel(here: Box) -> None:
    pinned = programs.pinned()
    agent, live, ours = started(here)
    code, _ = end(agent, signal.SIGKILL)
    assert code == -signal.SIGKILL
    assert_clean(ours, pinned)
    assert not here.pids()
    until(lambda: (live.wait(0.05), not live.live)[1], "viewers see it")
    assert live.problems == ("the agent has gone",)
    live.close()
    # The next one takes the socket over.
    agent, live, ours = started(here)
    live.close()
    assert end(agent)[0] == 0
    assert_clean(ours, pinned)


def test_kill_while_compiling_leaves_no_compiler(
    here: Box, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DSPROBE_CACHE", "")
    agent = here.agent()
    until(lambda: len(here.pids()) >= 2, "it compiles")
    end(agent, signal.SIGKILL)
    until(lambda: not here.pids(), "the compiler has gone with it", timeout=3)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_signal_while_compiling_is_heard_at_once(
    here: Box, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    monkeypatch.setenv("DSPROBE_CACHE", "")
    agent = here.agent()
    until(lambda: len(here.pids()) >= 2, "it compiles")
    code, err = end(agent, number, timeout=5)
    assert code == 0, err
    assert not here.pids()


def test_exception_ends_in_a_sentence_and_detaches(here: Box) -> None:
    """What nobody thought of: here the agent's own /proc becomes unreadable to it."""
    code = (
        "import sys; from dsprobe.agent import agent, overhead\n"
        "from dsprobe.agent.commands.main import main\n"
        "n = [0]\n"
        "def explode():\n"
        "    n[0] += 1\n"
        "    if n[0] > 2: raise RuntimeError('nobody thought of this')\n"
        "    return 0\n"
        "overhead._rss = explode\n"
        "sys.exit(main(['agent']))"
    )
    pinned = programs.pinned()
    process = subprocess.Popen(
        here.argv(sys.executable, "-c", code), cwd="/", stderr=subprocess.PIPE, text=True
    )
    live = here.connect()
    ready(live, *BPF)
    ours = programs.held_by(process.pid)
    _, err = process.communicate(timeout=20)
    assert process.returncode == 1
    assert "nobody thought of this" in err
    assert "Traceback" not in err
    assert err.count("\n") == 2  # where it listens, and what went wrong
    assert_clean(ours, pinned)
    assert os.listdir(here.path("/run/dsprobe")) == []
    live.close()


def test_second_agent_on_one_path_is_one_sentence(here: Box) -> None:
    agent, live, _ = started(here)
    code, out, err = here.run("agent")
    assert (code, out) == (1, "")
    assert err == (
        "dsprobe: an agent already listens at /run/dsprobe/agent.sock: use it with dsprobe top, or"
        " stop it first\n"
    )
    assert live.live
    live.close()
    end(agent)


def test_temporary_agent_ends_after_its_last_viewer(here: Box) -> None:
    agent, live, ours = started(here, "--linger", "1s")
    second = here.connect()
    live.close()
    second.wait(0.5)
    assert agent.poll() is None
    second.close()
    until(lambda: agent.poll() is not None, "it ends", timeout=10)
    assert agent.returncode == 0
    agent.communicate()
    assert_clean(ours, programs.pinned())


def test_stop_ends_a_temporary_agent_and_no_daemon(here: Box) -> None:
    agent, live, _ = started(here, "--linger", "1h")
    live.stop_agent()
    until(lambda: agent.poll() is not None, "it ends", timeout=10)
    agent.communicate()
    live.close()
    agent, live, _ = started(here)
    live.stop_agent()
    live.mark("heard after the stop")
    until(lambda: live.wait(0.05) and len(live.read("marker", 0, 1 << 63)), "the mark comes")
    assert agent.poll() is None
    live.close()
    end(agent)


def test_a_look_ends_nobodys_agent(here: Box) -> None:
    agent, live, _ = started(here, "--linger", "1h")
    code, out, _ = here.run("top", "--once")
    assert code == 0
    assert "lane" in out
    live.mark("heard after the look")
    until(lambda: live.wait(0.05) and len(live.read("marker", 0, 1 << 63)), "the mark comes")
    assert agent.poll() is None
    live.close()
    end(agent)


def test_one_probe_alone_and_one_that_does_not_exist(here: Box) -> None:
    agent = here.agent("--probes", "softirq")
    live = here.connect()
    said = ready(live, *BPF)
    assert {p: said[p, ""].status for p in BPF} == {
        "softirq": said["softirq", ""].status, "napi": "off", "tcp": "off", "runq": "off",
    }  # fmt: skip
    assert said["softirq", ""].status in WORKS
    until(lambda: len(programs.held_by(agent.pid)) == 3, "only its programs")
    live.close()
    end(agent)
    code, _, err = here.run("agent", "--probes", "softirq,nonsense")
    assert code == 2
    assert "nonsense" in err
    assert "pressure" in err


def overhead(live: LiveSession, since: int) -> list[Any]:
    return list(live.read("meta.overhead", since, 1 << 63))


def test_statistics_are_sampled_and_switched_off(here: Box) -> None:
    agent, live, _ = started(here)
    held = f"/proc/{agent.pid}/fd"

    def stats_fd() -> bool:
        return any(
            "bpf-stats" in os.readlink(f"{held}/{fd}")
            for fd in os.listdir(held)
            if os.path.islink(f"{held}/{fd}")
        )

    def sample() -> Any:
        live.wait(0.05)
        rows = live.read("meta.program", 0, 1 << 63)
        return list(rows)

    rows = until(sample, "a sample", timeout=15)
    until(lambda: not stats_fd(), "they are off again", timeout=5)
    by_name = {r["program"]: r for r in rows}
    assert by_name.keys() | {"softirq_raise"} == ALL  # which rests in a storm
    entry = by_name["softirq_entry"]
    assert entry["runs"] > 0
    assert 5 < entry["run_time"] / entry["runs"] < 100_000
    assert 0 < entry["dt"] / SECOND < 3
    cost = until(lambda: (live.wait(0.05), overhead(live, int(entry["t"])))[1], "the next second")
    total = sum(int(r["run_time"]) for r in rows)
    assert abs(int(cost[0]["bpf_cpu"]) / int(cost[0]["dt"]) - total / int(entry["dt"])) < 0.001
    live.close()
    end(agent)


NEEDED = "cap_bpf,cap_perfmon,cap_sys_admin"


@pytest.mark.tools("capsh")
@pytest.mark.parametrize("without", [NEEDED, "cap_bpf,cap_sys_admin", "cap_perfmon,cap_sys_admin"])
def test_root_without_the_capabilities_is_told_which(here: Box, without: str) -> None:
    """As in a container: root by number, without the right to load programs."""
    command = f"exec {sys.executable} -m dsprobe.agent.commands.main agent"
    agent = subprocess.Popen(
        here.argv("capsh", f"--drop={without}", "--", "-c", command), cwd="/",
        stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    live = here.connect()
    said = ready(live, *BPF, "cpu", "sockets", "netdev")
    for p in BPF:
        status = said[p, ""]
        assert status.status == "missing"
        assert "CAP_BPF and CAP_PERFMON" in status.reason, status
        assert len(status.reason) < 300
    for p in ("cpu", "sockets", "netdev"):
        assert said[p, ""].status == "attached"
    until(lambda: live.wait(0.05) and len(live.read("cpu.usage", 0, 1 << 63)), "the rest works")
    live.close()
    agent.terminate()
    agent.communicate()
