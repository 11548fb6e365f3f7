"""The agent as a whole, with probes the test makes: one failure leaves the rest alone."""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import ClassVar

import pytest

from dsprobe.agent import workers
from dsprobe.agent.agent import Agent, Settings
from dsprobe.agent.commands.save import save
from dsprobe.probes import tracer
from dsprobe.probes.probe import Batch, Loss, Probe, Unavailable
from dsprobe.probes.registry import PROBES
from dsprobe.probes.softirq import Softirq
from dsprobe.recordings.filesession import open_file
from dsprobe.recordings.session import FOREVER
from dsprobe.recordings.streams import CPU_LOAD, STATUSES
from tests.support.agents import watched
from tests.support.bpfrun import run_raw_tracepoint
from tests.support.wait import until


class Quick(Probe):
    """Read in the agent's own loop; ``act`` is what the test wants it to do."""

    name = "quick"
    doc = "made by a test"
    streams = (CPU_LOAD,)

    def __init__(self) -> None:
        self.begin: Callable[[], None] = lambda: None
        self.act: Callable[[], None] = lambda: None
        self.read = 0

    def start(self) -> None:
        self.begin()

    def collect(self, now: int) -> list[Batch]:
        self.act()
        self.read += 1
        return [(CPU_LOAD, CPU_LOAD.rows(t=now, running=self.read))]


class Slow(Quick):
    name = "slow"
    blocking: ClassVar[bool] = True


def fail() -> None:
    raise OverflowError("int too big to convert")


def test_a_probe_that_hangs_leaves_the_rest_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(workers, "STALLED_NS", 300_000_000)
    slow, quick = Slow(), Quick()
    held = threading.Event()
    slow.act = lambda: held.wait(30) and None
    with watched(slow, quick) as it:
        until(lambda: it.coverage()["slow", ""].status == "stalled", "it is seen to hang")
        before = quick.read
        until(lambda: quick.read > before + 3, "the other one goes on")
        held.set()
        until(lambda: it.coverage()["slow", ""].status == "attached", "it comes back")
        assert it.coverage()["slow", ""].reason == "answers again"
        assert it.coverage()["quick", ""].status == "attached"


def test_a_hung_probe_does_not_hold_up_the_end() -> None:
    slow = Slow()
    held = threading.Event()
    slow.act = lambda: held.wait(30) and None
    with watched(slow) as it:
        until(lambda: it.agent._workers[0]._busy_since, "it hangs")
        began = time.monotonic()
        it.stop()
        assert time.monotonic() - began < 5
    held.set()


def test_an_agent_that_stood_still_says_when() -> None:
    """As one that was stopped, or got no CPU."""
    quick = Quick()
    with watched(quick) as it:
        until(lambda: quick.read > 2, "it goes on")
        moments: list[int] = []

        def stand() -> None:
            moments.append(time.monotonic_ns())
            until(lambda: time.monotonic_ns() - moments[0] > 1_500_000_000, "it was long")
            quick.act = lambda: None

        quick.act = stand
        until(lambda: it.coverage().get(("agent", "")), "it is told")
        rows = it.rows("meta.coverage")
        rows = rows[rows["probe"] == "agent"]
    assert rows["status"].tolist() == [STATUSES.index("stalled"), STATUSES.index("attached")]
    stalled, again = rows["t"].astype(int)
    assert stalled < moments[0] + 200_000_000  # it would have run within 125 ms
    assert again - stalled > 1_300_000_000
    length = f"{(again - stalled) / 1e9:.1f} s"
    assert rows["reason"].tolist() == [f"it did not run for {length}", f"runs again after {length}"]


@pytest.mark.parametrize("probe", [Quick(), Slow()], ids=["quick", "slow"])
def test_a_probe_that_fails_is_said_once_and_comes_back(probe: Quick) -> None:
    with watched(probe) as it:
        until(lambda: len(it.rows("cpu.load")) > 1, "rows come")
        tries = [0]

        def failing() -> None:
            tries[0] += 1
            fail()

        probe.act = failing
        until(lambda: it.coverage()[probe.name, ""].status == "missing", "it is seen")
        assert "too big" in it.coverage()[probe.name, ""].reason
        here = tries[0]
        until(lambda: tries[0] > here + 3, "it is tried again")
        assert (it.rows("meta.coverage")["probe"] == probe.name).sum() == 2
        probe.act = lambda: None
        until(lambda: it.coverage()[probe.name, ""].status == "attached", "it comes back")
        rows = it.rows("cpu.load")
        t = until(lambda: int(it.rows("cpu.load")["t"][-1]) > int(rows["t"][-1]), "rows come")
        assert t
        # Rows touch: the one after the failure speaks for the whole time since the one before it.
        rows = it.rows("cpu.load")
        assert (rows["t"][1:] - rows["dt"][1:] == rows["t"][:-1]).all()


@pytest.mark.parametrize("kind", [Quick, Slow])
@pytest.mark.parametrize("error", [Unavailable("needs a newer kernel"), IndexError("odd text")])
def test_a_probe_that_cannot_start_says_why(kind: type[Quick], error: Exception) -> None:
    def refuse() -> None:
        raise error

    bad, good = kind(), Quick()
    bad.begin, bad.name = refuse, "bad"  # type: ignore[misc]
    with watched(bad, good) as it:
        until(lambda: ("bad", "") in it.coverage(), "it says")
        assert it.coverage()["bad", ""].status == "missing"
        assert str(error) in it.coverage()["bad", ""].reason
        until(lambda: len(it.rows("cpu.load")) > 2, "the other one goes on")


def test_probes_not_asked_for_are_off_and_said_to_be() -> None:
    with watched(Quick()) as it:
        for p in PROBES:
            status = it.coverage()[p.name, ""]
            assert (status.status, status.reason) == ("off", "not asked for (--probes)")


def test_markers_come_to_everybody() -> None:
    with watched(Quick()) as it:
        it.session.mark("look here")
        until(lambda: it.rows("marker")["label"].tolist() == ["look here"], "it comes")


def test_own_cost_is_a_row_each_second() -> None:
    with watched(Quick()) as it:
        until(lambda: len(it.rows("meta.overhead")) >= 2, "rows come")
        rows = it.rows("meta.overhead")
        assert rows["viewers"][-1] == 1
        assert (rows["rss"] > 10 << 20).all()
        assert (rows["flight_bytes"] > 0).all()
        assert (rows["agent_cpu"] <= rows["dt"] * (os.cpu_count() or 1)).all()
        assert (rows["bpf_cpu"] == 0).all()


@pytest.mark.bpf
def test_the_end_does_not_wait_for_a_compiler(
    monkeypatch: pytest.MonkeyPatch, tmp_path: object
) -> None:
    script = f"{tmp_path}/python"
    with open(script, "w") as f:
        f.write("#!/bin/sh\nexec sleep 600\n")
    os.chmod(script, 0o755)
    monkeypatch.setattr(sys, "executable", script)
    monkeypatch.setenv("DSPROBE_CACHE", "")
    agent = Agent([Softirq(), Quick()], Settings(socket=f"{tmp_path}/socket"))
    thread = threading.Thread(target=agent.run)
    thread.start()
    (compiler,) = agent.tracer._loader._compilers.values()
    child = until(lambda: compiler.child, "it compiles")
    began = time.monotonic()
    agent.stop()
    thread.join(20)
    assert not thread.is_alive()
    assert time.monotonic() - began < 5
    assert child.returncode == -9


@pytest.mark.bpf
def test_whatever_goes_wrong_while_loading_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    def explode(*_: object) -> None:
        raise RecursionError("deep down")

    monkeypatch.setattr(tracer.Tracer, "_attach", explode)
    with watched("softirq", Quick()) as it:
        status = it.coverage()["softirq", ""]
        assert status.status == "missing"
        assert "deep down" in status.reason
        until(lambda: len(it.rows("cpu.load")) > 2, "the other one goes on")


@pytest.mark.bpf
def test_a_bpf_probe_that_cannot_be_read_is_taken_off() -> None:
    softirq, quick = Softirq(), Quick()
    with watched(softirq, quick) as it:
        until(lambda: len(it.rows("softirq.cpu")), "rows come")
        softirq.collect = lambda now: fail()  # type: ignore[method-assign,assignment]
        until(lambda: it.coverage()["softirq", ""].status == "missing", "it is seen")
        assert not it.agent.tracer.probes
        until(lambda: quick.read > 3, "the other one goes on")


class Leaky(Quick):
    """Loses a prime number of rows at each reading."""

    name = "leaky"
    blocking: ClassVar[bool] = True

    def losses(self) -> list[Loss]:
        return [Loss("cpu.load", "ring buffer full", 7)]


def test_losses_are_rows_and_add_up() -> None:
    leaky = Leaky()
    with watched(leaky) as it:
        until(lambda: len(it.rows("meta.loss")) >= 3, "losses are told")
        it.stop()
        rows = it.rows("meta.loss")
        assert set(rows["reason"]) == {"ring buffer full"}
        assert set(rows["stream"]) == {"cpu.load"}
        assert it.session.lost() == {"cpu.load": 7 * leaky.read}
        assert rows["lost"].sum() == 7 * leaky.read
        assert len(it.rows("cpu.load")) == leaky.read
        it.stop = lambda: None  # type: ignore[method-assign]


@pytest.mark.bpf
def test_a_full_ring_is_a_loss_in_the_session_and_the_file(tmp_path: Path) -> None:
    """Slow softirqs without end, into a ring that nobody reads for a while."""
    with watched(Softirq(slow_ns=1)) as it:  # every run is slow
        tracer, drain = it.agent.tracer, it.agent.tracer.drain
        attached = tracer._attached["softirq"]
        counts = attached.rings["softirq_slow"][2].live
        tracer.drain = lambda: iter(())  # type: ignore[method-assign]
        entry, exit_ = attached.programs["softirq_entry"], attached.programs["softirq_exit"]
        while int(counts["lost"].sum()) < 1009:
            run_raw_tracepoint(entry, 0, 9)
            run_raw_tracepoint(exit_, 0, 9)
        tracer.drain = drain  # type: ignore[method-assign]
        until(lambda: it.rows("meta.loss")["lost"].sum() >= 1009, "it is told")
        lost = int(it.rows("meta.loss")["lost"].sum())
        assert it.session.lost()["softirq.slow"] >= lost
        path = str(tmp_path / "s.mcap")
        save(it.session.name, None, path)
    with open_file(path) as f:
        assert f.lost()["softirq.slow"] >= lost
        assert set(f.read("meta.loss", 0, FOREVER)["reason"]) == {"ring buffer full"}
        assert len(f.read("softirq.slow", 0, FOREVER)) >= (256 << 10) // 56  # what fits the ring
