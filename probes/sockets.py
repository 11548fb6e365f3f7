"""TCP counters per network namespace that has sockets.

Source: /proc/PID/net/sockstat, sockstat6, snmp, netstat (Documentation/networking/
snmp_counter.rst).  RetransSegs counts segments, and OutSegs leaves retransmitted ones out.
"""

from __future__ import annotations

from collections.abc import Hashable

from dsprobe.probes import netns
from dsprobe.probes.growth import Growth, Reading
from dsprobe.probes.probe import Batch, Probe
from dsprobe.recordings.streams import META_NETNS, TCP_SOCKETS

_GROWING = {
    "in_segs": "Tcp.InSegs",
    "out_segs": "Tcp.OutSegs",
    "retrans_segs": "Tcp.RetransSegs",
    "timeouts": "TcpExt.TCPTimeouts",
    "fast_retrans": "TcpExt.TCPFastRetrans",
    "loss_probes": "TcpExt.TCPLossProbes",
    "syn_retrans": "TcpExt.TCPSynRetrans",
    "listen_overflows": "TcpExt.ListenOverflows",
    "listen_drops": "TcpExt.ListenDrops",
    "out_resets": "Tcp.OutRsts",
    "estab_resets": "Tcp.EstabResets",
    "attempt_fails": "Tcp.AttemptFails",
}


def counters(snmp: str) -> dict[str, int]:
    """``{"Tcp.OutSegs": ...}`` from the paired lines of /proc/net/snmp and netstat."""
    out: dict[str, int] = {}
    lines = snmp.splitlines()
    for names, values in zip(lines[::2], lines[1::2], strict=False):
        group, *keys = names.split()
        for key, value in zip(keys, values.split()[1:], strict=False):
            out[group + key if group.endswith(".") else f"{group[:-1]}.{key}"] = int(value)
    return out


def usage(sockstat: str) -> dict[str, int]:
    """``{"TCP.inuse": ...}`` from /proc/net/sockstat and sockstat6."""
    out: dict[str, int] = {}
    for line in sockstat.splitlines():
        group, *pairs = line.split()
        for key, value in zip(pairs[::2], pairs[1::2], strict=False):
            out[f"{group[:-1]}.{key}"] = int(value)
    return out


class Sockets(Probe):
    name = "sockets"
    doc = "TCP sockets, segments, resets and listen drops per network namespace"
    streams = (TCP_SOCKETS, META_NETNS)
    blocking = True
    every = 4

    def __init__(self) -> None:
        self._spaces: dict[int, netns.Namespace] = {}
        self._named: dict[int, str] = {}
        self._scanned = -netns.RESCAN_NS
        self._growth = Growth(TCP_SOCKETS, *_GROWING)

    def start(self) -> None:
        self._spaces = netns.discover()
        self._growth.start(self._read())

    def _names(self, now: int) -> list[Batch]:
        """Look for namespaces; the names of those not known before."""
        self._scanned, self._spaces = now, netns.discover()
        names = {inode: ns.name for inode, ns in self._spaces.items()}
        new = [i for i, name in names.items() if self._named.get(i) != name]
        self._named = names
        if not new:
            return []
        rows = META_NETNS.rows(t=[now] * len(new), id=new, name=[names[i] for i in new])
        return [(META_NETNS, rows)]

    def _read(self) -> dict[Hashable, Reading]:
        out: dict[Hashable, Reading] = {}
        for inode, ns in self._spaces.items():
            texts = netns.read(ns, "snmp", "netstat", "sockstat", "sockstat6")
            if texts is None:
                continue
            c = counters(texts[0]) | counters(texts[1])
            u = usage(texts[2]) | usage(texts[3])
            reading = {field: c.get(name, 0) for field, name in _GROWING.items()}
            reading["netns"] = inode
            reading["inuse"] = u.get("TCP.inuse", 0) + u.get("TCP6.inuse", 0)
            reading["orphan"], reading["time_wait"] = u.get("TCP.orphan", 0), u.get("TCP.tw", 0)
            reading["established"] = c.get("Tcp.CurrEstab", 0)
            out[inode] = reading
        return out

    def collect(self, now: int) -> list[Batch]:
        batches = self._names(now) if now - self._scanned >= netns.RESCAN_NS else []
        rows = self._growth.rows(now, self._read())
        # Namespaces without sockets or traffic say nothing; a host has many of them.
        lives = rows["inuse"] + rows["time_wait"] + rows["in_segs"] + rows["out_segs"] > 0
        return [*batches, (TCP_SOCKETS, rows[lives])]
