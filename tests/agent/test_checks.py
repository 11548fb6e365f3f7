"""What doctor says of a machine, where the test can make it be so."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from dsprobe.agent import checks
from dsprobe.agent.check import LIMITED
from dsprobe.probes import unseen
from dsprobe.probes.softirq import Softirq
from dsprobe.probes.tracer import Tracer


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
