"""``dsprobe record`` from end to end: what the file holds is what the kernel counted."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from dsprobe.recordings.filesession import open_file
from dsprobe.recordings.session import FOREVER, coverage, facts
from tests.host.test_softirq_counts import assert_all_told, by_vector_and_cpu, unseen_after
from tests.support import counters, drops, loads, netns
from tests.support.native import program
from tests.support.sampler import sampling

pytestmark = [
    pytest.mark.bpf,
    pytest.mark.netns,
    pytest.mark.tools("ip", "nsenter", "gcc", "iperf3", "nft"),
]

DSPROBE = str(Path(sys.executable).with_name("dsprobe"))


def record(out: Path, *command: str) -> None:
    """Record all probes for as long as ``command`` runs."""
    done = subprocess.run(
        [DSPROBE, "record", "-o", str(out), "--", *command],
        capture_output=True, text=True, timeout=60,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr


def test_softirqs_in_the_file_are_the_kernels(pair: netns.Pair, tmp_path: Path) -> None:
    flood = (str(program("flood")), pair.right.ipv4, "9", "2.5", str(loads.SMALLEST), "0", "50000")
    out = tmp_path / "run.mcap"
    with sampling() as truth, loads.udp_sink(pair.right):
        record(out, *pair.left.argv(*flood))
    with open_file(out) as session:
        rows = session.read("softirq.cpu", 0, FOREVER)
        losses = session.read("meta.loss", 0, FOREVER)
        state = coverage(session)
        assert not session.problems
        assert facts(session)["boot_id"]
    start, end = int(rows["t"].min()), int(rows["t"].max())
    low = truth.at_least(end) - truth.at_most(start)
    high = truth.at_most(end) - truth.at_least(start)
    counted = by_vector_and_cpu(rows[rows["t"] > start], "count")
    assert_all_told(counted, unseen_after(losses, start), low, high)
    assert rows["count"].sum() > 50_000
    assert end - start > 2_000_000_000
    works = {p for (p, prog), s in state.items() if not prog and s.status in ("attached", "shed")}
    assert works >= {"softirq", "napi", "netdev", "tcp", "sockets", "cpu"}


def test_retransmits_in_the_file_are_the_namespaces(pair: netns.Pair, tmp_path: Path) -> None:
    out = tmp_path / "run.mcap"
    with drops.loss(pair.right, 2), loads.iperf_server(pair.right):
        before = counters.tcp(pair.left)
        client = ("iperf3", "-c", pair.right.ipv4, "-t", "2", "-b", "400M")
        record(out, *pair.left.argv(*client))
        kernel = counters.difference(counters.tcp(pair.left), before)
    with open_file(out) as session:
        rows = session.read("tcp.retransmit", 0, FOREVER)
        lost = session.lost()
    rows = rows[rows["netns"] == pair.left.inode]
    assert kernel["Tcp.RetransSegs"] > 0
    assert rows["segments"].sum() == kernel["Tcp.RetransSegs"]
    assert not lost.get("tcp.retransmit", 0)
