"""When raise-to-run latency is given up, sampled and taken up again."""

from __future__ import annotations

import numpy as np
import pytest

from dsprobe.agent import shedding
from dsprobe.agent.shedding import CALM, EVERY_NS, PROGRAM, SAMPLE_NS, STORM, Shedding
from dsprobe.probes.softirq import Softirq
from tests.support import loads, netns
from tests.support.agents import watched
from tests.support.wait import until


class FakeTracer:
    """Holds one softirq probe; ``on`` is whether the program is attached."""

    def __init__(self, on: bool = True) -> None:
        self.softirq = Softirq()
        self.probes = [self.softirq]
        self.on = on

    def costs(self) -> dict[str, None]:
        return {PROGRAM: None} if self.on else {}

    def rest(self, function: str) -> None:
        assert function == PROGRAM
        self.on = False

    def resume(self, function: str) -> bool:
        assert function == PROGRAM
        self.on = True
        return True


def test_a_storm_sheds_and_calm_restores_and_between_the_two_nothing_changes() -> None:
    tracer = FakeTracer()
    policy = Shedding(tracer)  # type: ignore[arg-type]
    said = []
    for now, rate in enumerate([0, CALM, STORM, STORM + 1, STORM, CALM, CALM - 1, STORM, 0], 1):
        tracer.softirq.fastest = rate
        said.append([c.status for c in policy.decide(now)])
    assert said == [[], [], [], ["shed", "shed"], [], [], ["attached", "attached"], [], []]
    assert tracer.on


def test_it_is_attached_one_second_in_ten_of_a_storm() -> None:
    tracer = FakeTracer()
    policy = Shedding(tracer)  # type: ignore[arg-type]
    tracer.softirq.fastest = 2 * STORM
    step = 250_000_000
    on = []
    for n in range(4 * EVERY_NS // step):
        assert bool(policy.decide(1 + n * step)) == (n == 0), "said once"
        on.append(tracer.on)
    assert np.mean(on) == SAMPLE_NS / EVERY_NS
    assert not any(on[: (EVERY_NS - SAMPLE_NS) // step])


def test_a_program_that_is_not_there_is_not_taken_off() -> None:
    tracer = FakeTracer(on=False)
    tracer.softirq.fastest = 2 * STORM
    assert Shedding(tracer).decide(1) == []  # type: ignore[arg-type]
    tracer.probes = []
    assert Shedding(tracer).decide(1) == []  # type: ignore[arg-type]


@pytest.mark.bpf
@pytest.mark.netns
@pytest.mark.tools("ip", "nsenter", "gcc")
def test_counts_stay_exact_while_latency_is_shed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shedding, "STORM", 20_000.0)  # any machine's flood is more than this
    monkeypatch.setattr(shedding, "CALM", 10_000.0)
    with netns.pair() as pair, watched("softirq") as w:
        flood = loads.udp_flood(pair, 1.5, cpu=0)
        until(lambda: w.coverage()["softirq", ""].status == "attached", "calm again")
        w.stop()
    rows = w.rows("meta.coverage")
    words = rows["status"][(rows["probe"] == "softirq") & (rows["program"] == PROGRAM)].tolist()
    assert words == [0, 4, 0]  # attached, shed, attached
    net_rx = w.rows("softirq.cpu")
    net_rx = net_rx[(net_rx["vec"] == 3) & (net_rx["cpu"] == 0)]
    assert net_rx["count"].sum() >= 0.99 * flood.sent
    assert net_rx["run_hist"].sum() >= net_rx["count"].sum() - 1
    assert 0 < net_rx["waits"].sum() < 0.8 * net_rx["count"].sum()
