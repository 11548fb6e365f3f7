"""What is said, and what goes on, when a part of the tracing cannot work or is taken off."""

from __future__ import annotations

import os
from typing import ClassVar

import pytest

from dsprobe.probes.probe import BpfProbe, Program
from dsprobe.probes.softirq import Softirq
from dsprobe.probes.tcp import Tcp
from dsprobe.recordings.session import Status
from tests.support import loads, netns
from tests.support.agents import watched
from tests.support.wait import until

pytestmark = [pytest.mark.bpf, pytest.mark.netns, pytest.mark.tools("ip", "nsenter", "gcc")]


def without(probe: type[BpfProbe], program: str) -> BpfProbe:
    """``probe`` on a kernel that has no tracepoint for ``program``."""

    class Lacking(probe):  # type: ignore[valid-type, misc]
        programs: ClassVar[tuple[Program, ...]] = tuple(
            Program(p.function, p.kind, "no_such_tracepoint", p.required, p.otherwise)
            if p.function == program
            else p
            for p in probe.programs
        )

    made: BpfProbe = Lacking()
    return made


def test_a_required_tracepoint_that_does_not_exist(pair: netns.Pair) -> None:
    with watched(without(Tcp, "tcp_retransmit_skb"), "softirq", "napi") as w:
        loads.udp_flood(pair, 0.3)
        w.stop()
    state = w.coverage()
    assert state["tcp", ""].status == "missing"
    assert "no tracepoint no_such_tracepoint" in state["tcp", ""].reason
    assert state["napi", ""] == Status("attached", "")
    assert state["softirq", ""].status in ("attached", "shed")  # the flood may be a storm
    assert w.rows("softirq.cpu")["count"].sum() > 1000
    assert w.rows("net.napi")["work"].sum() > 1000


def test_an_optional_tracepoint_that_does_not_exist(pair: netns.Pair) -> None:
    """Counts and run times remain, waits are not measured, and coverage says so."""
    with watched(without(Softirq, "softirq_raise")) as w:
        loads.udp_flood(pair, 0.3)
        w.stop()
    state = w.coverage()
    assert state["softirq", "softirq_raise"].status == "missing"
    assert state["softirq", ""].status == "attached"
    assert state["softirq", ""].reason
    rows = w.rows("softirq.cpu")
    assert rows["count"].sum() > 1000
    assert rows["busy"].sum() > 0
    assert rows["waits"].sum() == rows["wait_hist"].sum() == 0


@pytest.mark.parametrize("program", ["softirq_entry", "softirq_exit"])
def test_a_program_detached_while_running(pair: netns.Pair, program: str) -> None:
    with watched("softirq", "napi") as w:
        until(lambda: len(w.rows("softirq.cpu")), "rows")
        w.agent.detach(program, "taken off by a test")
        t = w.pass_by()
        loads.udp_flood(pair, 0.3)
        w.stop()
    state = w.coverage()
    assert state["softirq", program] == Status("detached", "taken off by a test")
    assert state["softirq", ""].status == "detached"
    assert program in state["softirq", ""].reason
    assert not len(w.rows("softirq.cpu", t))
    assert not (w.rows("meta.loss", t)["stream"] == "softirq.cpu").any()  # nobody looks
    assert w.rows("net.napi", t)["work"].sum() > 1000


def test_nothing_stays_attached(pair: netns.Pair) -> None:
    def links() -> list[str]:
        fds = [os.readlink(f.path) for f in os.scandir("/proc/self/fd") if os.path.islink(f.path)]
        return sorted(f for f in fds if "bpf_link" in f or "bpf-prog" in f or "perf_event" in f)

    before = links()
    with watched("softirq", "napi", "tcp", "runq") as w:
        assert len(links()) >= len(before) + 7
        assert w.coverage()["softirq", ""].status == "attached"
    assert links() == before
