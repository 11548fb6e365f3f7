"""TCP counters per network namespace that has sockets.

Source: /proc/PID/net/sockstat, sockstat6, snmp, netstat (Documentation/networking/
snmp_counter.rst).  RetransSegs counts segments, and OutSegs leaves retransmitted ones out.
"""

from __future__ import annotations

import numpy as np

from dsprobe.probes import netns
from dsprobe.probes.probe import Batch, Probe, grown
from dsprobe.recordings.streams import META_NETNS, TCP_SOCKETS

RESCAN_NS = 2_000_000_000
"""How often new namespaces are looked for."""

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

    def __init__(self) -> None:
        self._spaces: dict[int, netns.Namespace] = {}
        self._before: dict[int, np.void] = {}
        self._named: dict[int, str] = {}
        self._scanned = -RESCAN_NS

    def start(self) -> None:
        self._scan(0)
        self._before = self._read()
        self._scanned = -RESCAN_NS  # names are rows, so the first collect gives them

    def _scan(self, now: int) -> list[Batch]:
        """Look for namespaces; the names of those not known before."""
        self._scanned = now
        self._spaces = netns.discover()
        new = {i: ns.name for i, ns in self._spaces.items() if self._named.get(i) != ns.name}
        if now == 0 or not new:
            return []
        self._named = {i: ns.name for i, ns in self._spaces.items()}
        return [(META_NETNS, META_NETNS.rows(t=[now] * len(new), id=list(new),
                                             name=list(new.values())))]  # fmt: skip

    def _read(self) -> dict[int, np.void]:
        out: dict[int, np.void] = {}
        for inode, ns in self._spaces.items():
            texts = netns.read(ns, "snmp", "netstat", "sockstat", "sockstat6")
            if texts is None:
                continue
            try:
                c = counters(texts[0]) | counters(texts[1])
                u = usage(texts[2]) | usage(texts[3])
            except ValueError:
                continue
            row = np.zeros((), TCP_SOCKETS.dtype)[()]
            row["netns"] = inode
            row["inuse"] = u.get("TCP.inuse", 0) + u.get("TCP6.inuse", 0)
            row["orphan"], row["time_wait"] = u.get("TCP.orphan", 0), u.get("TCP.tw", 0)
            row["established"] = c.get("Tcp.CurrEstab", 0)
            for field, name in _GROWING.items():
                row[field] = c.get(name, 0) & 0xFFFFFFFF
            out[inode] = row
        return out

    def collect(self, now: int) -> list[Batch]:
        batches = self._scan(now) if now - self._scanned >= RESCAN_NS else []
        after = self._read()
        before, self._before = self._before, after
        known = [i for i in after if i in before and _lives(after[i], before[i])]
        if not known:
            return batches
        new = np.array([after[i] for i in known], TCP_SOCKETS.dtype)
        old = np.array([before[i] for i in known], TCP_SOCKETS.dtype)
        rows = new.copy()
        rows["t"] = now
        grown(new, old, rows, *_GROWING)
        return [*batches, (TCP_SOCKETS, rows)]


def _lives(after: np.void, before: np.void) -> bool:
    """Whether a namespace has sockets, or had traffic; the many idle ones get no rows."""
    return bool(after["inuse"] or after["time_wait"] or after["in_segs"] != before["in_segs"]
                or after["out_segs"] != before["out_segs"])  # fmt: skip
