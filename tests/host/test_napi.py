"""NAPI polls, packet intake and interface counters against /proc/net/dev and softnet_stat."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from dsprobe.recordings.model import Rows
from tests.support import counters, loads, netns
from tests.support.agents import watched
from tests.support.wait import until

pytestmark = [
    pytest.mark.bpf,
    pytest.mark.netns,
    pytest.mark.tools("ip", "nsenter", "gcc", "ethtool"),
]

DATAGRAMS = 10_007


def softnet() -> np.ndarray:
    """processed, dropped and squeezed of all CPUs."""
    lines = Path("/proc/net/softnet_stat").read_text().splitlines()
    return np.array([[int(x, 16) for x in line.split()[:3]] for line in lines]).sum(axis=0)


def send(pair: netns.Pair) -> dict[str, int]:
    """A prime number of datagrams from left to right; growth of right's /proc/net/dev."""
    before = counters.device(pair.right)
    with (
        loads.udp_sink(pair.right),
        loads.udp_socket(pair.left, (pair.right.ipv4, 9)) as sock,
    ):
        for _ in range(DATAGRAMS):
            sock.send(b"x")
        until(
            lambda: counters.device(pair.right)["rx_packets"] - before["rx_packets"] >= DATAGRAMS,
            "all have arrived",
        )
    return counters.difference(counters.device(pair.right), before)


def of_device(rows: Rows, ns: netns.Namespace) -> Rows:
    return rows[(rows["netns"] == ns.inode) & (rows["device"] == ns.device.encode())]


def test_work_of_a_device_is_what_it_received(pair: netns.Pair) -> None:
    # With GRO a veth has NAPI of its own, which takes packets of a peer that does not segment
    # (drivers/net/veth.c, veth_skb_is_eligible_for_gro); others go through the CPU's backlog.
    pair.right.run("ethtool", "-K", pair.right.device, "gro", "on")
    pair.left.run("ethtool", "-K", pair.left.device, "tso", "off")
    with watched("napi") as w:
        received = send(pair)
        w.stop()
    rows = of_device(w.rows("net.napi"), pair.right)
    assert abs(int(rows["work"].sum()) - received["rx_packets"]) <= 5  # neighbour discovery
    assert 0 < rows["polls"].sum() <= DATAGRAMS + 100
    assert (rows["budget_hits"] <= rows["polls"]).all()
    assert (rows["ifindex"] > 0).all()


def test_polls_of_the_backlog_belong_to_no_device(pair: netns.Pair) -> None:
    with watched("napi") as w:
        send(pair)
        w.stop()
    rows = w.rows("net.napi")
    backlog = rows[rows["device"] == b"(backlog)"]
    assert (backlog["ifindex"] == 0).all()
    assert backlog["work"].sum() >= DATAGRAMS
    assert not len(of_device(rows, pair.right))


def test_interfaces_and_intake_are_the_kernels(pair: netns.Pair) -> None:
    with watched("netdev") as w:
        until(
            lambda: pair.right.inode in w.rows("net.device")["netns"] or _ping(pair), "it is found"
        )
        w.pass_by()
        t = w.pass_by()
        before = softnet()
        received = send(pair)
        w.pass_by()
        processed, dropped, _ = softnet() - before
        w.pass_by()
    rows = of_device(w.rows("net.device", t), pair.right)
    for field in ("rx_packets", "rx_bytes", "rx_dropped", "rx_errors"):
        assert abs(int(rows[field].sum()) - received[field]) <= 0.001 * received[field]
    intake = w.rows("net.softnet", t)
    assert intake["processed"].sum() >= DATAGRAMS
    assert intake["processed"].sum() >= processed
    assert intake["dropped"].sum() >= dropped


def _ping(pair: netns.Pair) -> bool:
    """A datagram, so that the interface moves; False."""
    with loads.udp_socket(pair.left, (pair.right.ipv4, 9)) as sock:
        sock.send(b"x")
    return False
