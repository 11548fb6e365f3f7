"""TCP retransmissions and counters against those of the namespaces they happen in."""

from __future__ import annotations

import ipaddress
import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest

from dsprobe.recordings.model import Rows
from dsprobe.recordings.streams import RETRANSMIT_CAUSES, RETRANSMIT_KINDS, TCP_STATES
from tests.support import counters, drops, loads, netns
from tests.support.agents import Watched, watched
from tests.support.wait import until

pytestmark = [
    pytest.mark.bpf,
    pytest.mark.netns,
    pytest.mark.tools("ip", "nsenter", "nft", "iperf3"),
]

DATA, SYN, SYNACK = (RETRANSMIT_KINDS.index(k) for k in ("data", "SYN", "SYN-ACK"))
RTO, FAST, PROBE = (RETRANSMIT_CAUSES.index(c) for c in ("RTO", "fast", "probe"))


def retransmits(w: Watched, ns: netns.Namespace) -> Rows:
    rows = w.rows("tcp.retransmit")
    return rows[rows["netns"] == ns.inode]


def address(raw: np.ndarray) -> str:
    """The text of an address; IPv4 ones are stored v4-mapped."""
    v6 = ipaddress.IPv6Address(raw.tobytes())
    return str(v6.ipv4_mapped or v6)


def closed(ns: netns.Namespace) -> None:
    """Wait until no socket is left that could still send something again."""

    def in_use() -> int:
        now = counters.sockets(ns)
        return now["TCP.inuse"] + now["TCP6.inuse"]

    until(lambda: not in_use(), "all connections are closed")


@contextmanager
def connecting(ns: netns.Namespace, family: socket.AddressFamily, to: str) -> Iterator[None]:
    """A connection attempt that goes on until the block ends."""

    def start() -> socket.socket:
        s = socket.socket(family, socket.SOCK_STREAM)
        s.setblocking(False)
        s.connect_ex((to, 4433))
        return s

    sock = ns.call(start)
    try:
        yield
    finally:
        sock.close()


def iperf_until(
    enough: Callable[[], bool], pair: netns.Pair, to: str, rate: str
) -> list[dict[str, Any]]:
    """Reports of runs from left to right, until ``enough()``: a busy machine sends less."""
    reports = []
    with loads.iperf_server(pair.right):
        for _ in range(10):
            reports.append(loads.iperf(pair.left, to, 1.5, "-b", rate))
            if enough():
                return reports
    raise AssertionError("too little was lost in ten runs")


@pytest.mark.parametrize("path", ["IPv4", "IPv6", "mapped"])
def test_two_percent_loss(pair: netns.Pair, path: str) -> None:
    """iperf3's flow appears with its addresses; segments are the namespace's RetransSegs."""
    to = {"IPv4": pair.right.ipv4, "IPv6": pair.right.ipv6, "mapped": f"::ffff:{pair.right.ipv4}"}
    with watched("tcp") as w:
        before = counters.tcp(pair.left)
        with drops.loss(pair.right, 2) as dropped:

            def enough() -> bool:
                return dropped() > 10 and len(retransmits(w, pair.left)) > 10

            reports = iperf_until(enough, pair, to[path], "500M")
        closed(pair.left)
        w.stop()
        kernel = counters.difference(counters.tcp(pair.left), before)
    rows = retransmits(w, pair.left)
    assert kernel["Tcp.RetransSegs"] > 10
    assert rows["segments"].sum() == kernel["Tcp.RetransSegs"]
    told = sum(r["end"]["sum_sent"]["retransmits"] for r in reports)
    assert 0 < told <= kernel["Tcp.RetransSegs"]
    # A call may send several segments, so calls are at most as many.
    assert 0 < len(rows) <= kernel["Tcp.RetransSegs"]
    ours = pair.left.ipv6 if path == "IPv6" else pair.left.ipv4
    theirs = pair.right.ipv6 if path == "IPv6" else pair.right.ipv4
    ports = [r["start"]["connected"][0]["local_port"] for r in reports]
    flow = rows[np.isin(rows["sport"], ports) & (rows["kind"] == DATA)]
    assert len(flow) > 5
    assert {address(a) for a in flow["saddr"]} == {ours}
    assert {address(a) for a in flow["daddr"]} == {theirs}
    assert set(flow["dport"]) == {5201}
    assert set(flow["family"]) == {6 if path == "IPv6" else 4}
    assert set(flow["mapped"]) == {int(path == "mapped")}
    assert TCP_STATES.index("ESTABLISHED") in flow["state"]


def test_the_cause_is_the_one_the_kernel_counts(pair: netns.Pair) -> None:
    """Single losses are repaired by fast retransmits; a dead path by the timer."""
    with watched("tcp") as w:
        before = counters.tcp(pair.left)
        fast = "TcpExt.TCPFastRetrans"
        with drops.loss(pair.right, 1):

            def enough() -> bool:
                return counters.tcp(pair.left)[fast] - before[fast] > 10

            iperf_until(enough, pair, pair.right.ipv4, "300M")
        closed(pair.left)
        w.pass_by()
        kernel = counters.difference(counters.tcp(pair.left), before)
        first = retransmits(w, pair.left)

        listener = pair.right.call(lambda: socket.create_server((pair.right.ipv4, 4434)))
        client = pair.left.call(lambda: socket.create_connection((pair.right.ipv4, 4434)))
        middle = counters.tcp(pair.left)
        with listener, client, drops.black_hole(pair.right, 4434):
            client.sendall(b"x" * 1000)
            timeouts = "TcpExt.TCPTimeouts"
            until(lambda: counters.tcp(pair.left)[timeouts] - middle[timeouts] >= 2, "two RTOs")
            dead = counters.difference(counters.tcp(pair.left), middle)
            w.pass_by()
    data = first[first["kind"] == DATA]
    by_cause = {c: int(data["segments"][data["cause"] == c].sum()) for c in (RTO, FAST, PROBE)}
    # In recovery the kernel counts TCPFastRetrans, in loss TCPSlowStartRetrans and the timer's
    # own; a probe may repeat data or send what is new (net/ipv4/tcp_output.c).
    assert by_cause[FAST] == kernel[fast] > 10
    assert by_cause[PROBE] <= kernel["TcpExt.TCPLossProbes"]
    assert sum(by_cause.values()) == kernel["Tcp.RetransSegs"]
    late = w.rows("tcp.retransmit")
    late = late[(late["netns"] == pair.left.inode) & (late["dport"] == 4434)]
    assert (late["cause"] == RTO).sum() >= dead["TcpExt.TCPTimeouts"] >= 2
    assert set(late["cause"]) <= {RTO, PROBE}


@pytest.mark.parametrize("family", [socket.AF_INET, socket.AF_INET6])
def test_syn_into_a_black_hole(pair: netns.Pair, family: socket.AddressFamily) -> None:
    six = family == socket.AF_INET6
    to = pair.right.ipv6 if six else pair.right.ipv4
    with watched("tcp") as w:
        before = counters.tcp(pair.left)
        with drops.black_hole(pair.right, 4433), connecting(pair.left, family, to):
            sent = "TcpExt.TCPSynRetrans"
            until(lambda: counters.tcp(pair.left)[sent] > before[sent], "a SYN is sent again")
        kernel = counters.difference(counters.tcp(pair.left), before)
    rows = retransmits(w, pair.left)
    # A call that finds the first SYN still queued (EBUSY, over an unresolved neighbour) sends none.
    assert rows["segments"].sum() == kernel["TcpExt.TCPSynRetrans"] == kernel["Tcp.RetransSegs"] > 0
    assert set(rows["kind"]) == {SYN}
    assert set(rows["cause"]) == {RTO}
    assert set(rows["state"]) == {TCP_STATES.index("SYN_SENT")}
    assert set(rows["family"]) == {6 if six else 4}
    assert {address(a) for a in rows["daddr"]} == {to}
    assert set(rows["dport"]) == {4433}


@pytest.mark.parametrize("family", [socket.AF_INET, socket.AF_INET6])
def test_syn_acks_that_get_lost(pair: netns.Pair, family: socket.AddressFamily) -> None:
    six = family == socket.AF_INET6
    to, back = (pair.right.ipv6, pair.left.ipv6) if six else (pair.right.ipv4, pair.left.ipv4)
    with watched("tcp") as w:
        server = pair.right.call(lambda: socket.create_server((to, 4433), family=family))
        before = counters.tcp(pair.right)
        with server, drops.lose_syn_acks(pair.left), connecting(pair.left, family, to):
            until(lambda: len(retransmits(w, pair.right)) >= 1, "a SYN-ACK sent again")
            kernel = counters.difference(counters.tcp(pair.right), before)
    rows = retransmits(w, pair.right)
    rows = rows[rows["kind"] == SYNACK]
    assert 1 <= kernel["TcpExt.TCPSynRetrans"] <= len(rows)
    assert {address(a) for a in rows["saddr"]} == {to}
    assert {address(a) for a in rows["daddr"]} == {back}
    assert set(rows["sport"]) == {4433}
    assert set(rows["family"]) == {6 if six else 4}


def test_counters_are_those_of_the_namespace(pair: netns.Pair) -> None:
    with watched("sockets") as w:
        until(lambda: pair.left.inode in w.rows("meta.netns")["id"], "the namespace is found")
        w.pass_by()
        since = {ns.inode: int(w.rows("meta.clock")["t"].max()) for ns in (pair.left, pair.right)}
        before = {ns.inode: counters.tcp(ns) for ns in (pair.left, pair.right)}
        with drops.loss(pair.right, 5), loads.iperf_server(pair.right):
            loads.iperf(pair.left, pair.right.ipv6, 1.5, "-b", "200M")
        # Nobody listens there: a reset.
        with pytest.raises(ConnectionRefusedError):
            pair.left.call(lambda: socket.create_connection((pair.right.ipv4, 1)))
        w.pass_by()
        after = {ns.inode: counters.tcp(ns) for ns in (pair.left, pair.right)}
        now = {ns.inode: counters.sockets(ns) for ns in (pair.left, pair.right)}
        w.pass_by()
    fields = {
        "in_segs": "Tcp.InSegs", "out_segs": "Tcp.OutSegs", "retrans_segs": "Tcp.RetransSegs",
        "timeouts": "TcpExt.TCPTimeouts", "fast_retrans": "TcpExt.TCPFastRetrans",
        "loss_probes": "TcpExt.TCPLossProbes", "syn_retrans": "TcpExt.TCPSynRetrans",
        "listen_drops": "TcpExt.ListenDrops", "out_resets": "Tcp.OutRsts",
        "estab_resets": "Tcp.EstabResets", "attempt_fails": "Tcp.AttemptFails",
    }  # fmt: skip
    for ns in (pair.left, pair.right):
        rows = w.rows("tcp.sockets", since[ns.inode])
        rows = rows[rows["netns"] == ns.inode]
        kernel = counters.difference(after[ns.inode], before[ns.inode])
        ours = {f: int(rows[f].sum()) for f in fields}
        assert ours == {f: kernel[name] for f, name in fields.items()}
        assert int(rows["time_wait"][-1]) == now[ns.inode]["TCP.tw"]
    left = w.rows("tcp.sockets")
    left = left[left["netns"] == pair.left.inode]
    assert left["established"].max() == 2  # iperf3's control connection and its stream
    assert left["retrans_segs"].sum() > 0
    assert left["attempt_fails"].sum() == 1


def test_a_prime_number_of_flows_is_that_many_rows(pair: netns.Pair) -> None:
    """61 connections, each of which sends its SYN again once."""
    with watched("tcp") as w, drops.black_hole(pair.right, 4433):

        def connect() -> list[socket.socket]:
            made = []
            for _ in range(61):
                s = socket.socket()
                s.setblocking(False)
                s.connect_ex((pair.right.ipv4, 4433))
                made.append(s)
            return made

        socks = pair.left.call(connect)
        ports = {s.getsockname()[1] for s in socks}
        until(lambda: len(retransmits(w, pair.left)) >= 61, "all have sent again")
        for s in socks:
            s.close()
    rows = retransmits(w, pair.left)
    assert len(rows) == 61
    assert set(rows["sport"].tolist()) == ports
    assert w.session.lost().get("tcp.retransmit", 0) == 0
