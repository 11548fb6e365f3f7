"""Lanes: the curves of the screen and of the roll-ups, each a pure function of rows.

A lane is computed over *buckets*, the spans between ``edges`` (int64 ns, ascending).  A value is
NaN where the rows say nothing about a bucket; where a probe was attached and nothing happened the
caller turns that into 0 (see :func:`dsprobe.recordings.session.coverage`).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from dsprobe.recordings import streams as st
from dsprobe.recordings.model import Rows

Values = npt.NDArray[np.float64]
Edges = npt.NDArray[np.int64]

NET_RX = st.VECTORS.index("NET_RX")


@dataclass(frozen=True)
class Lane:
    """``id`` is stored in roll-ups and never reused.  ``fold`` says how one-second values combine
    into a longer bucket: ``mean``, ``max`` or ``last``.  ``quiet`` lanes read 0, not NaN, where
    their probe was attached and no row came."""

    id: int
    key: str
    title: str
    unit: str
    probe: str
    stream: str
    fold: str
    quiet: bool
    compute: Callable[[Rows, Edges], Values]


def spread(rows: Rows, amount: npt.NDArray[Any], edges: Edges, keys: Any = None) -> Values:
    """Sum of ``amount`` per bucket, each row spread evenly over its ``(t - dt, t]``.

    Without ``keys`` the shape is (buckets,); with integer ``keys`` per row it is (max key + 1,
    buckets).  Buckets no row touches hold 0.
    """
    nb = len(edges) - 1
    group = np.zeros(len(rows), np.int64) if keys is None else np.asarray(keys, np.int64)
    ng = int(group.max()) + 1 if len(group) else 1
    out = np.zeros((ng, nb))
    end = rows["t"].astype(np.int64)
    start = end - np.maximum(rows["dt"].astype(np.int64), 1)
    keep = (end > edges[0]) & (start < edges[-1])
    end, start, group = end[keep], start[keep], group[keep]
    per_ns = np.asarray(amount, float)[keep] / (end - start)
    first = np.maximum(np.searchsorted(edges, start, "right") - 1, 0)
    last = np.minimum(np.searchsorted(edges, end, "left") - 1, nb - 1)
    for step in range(int((last - first).max()) + 1 if len(first) else 0):
        b = first + step
        on = b <= last
        b, g = b[on], group[on]
        overlap = np.minimum(end[on], edges[b + 1]) - np.maximum(start[on], edges[b])
        np.add.at(out, (g, b), overlap * per_ns[on])
    return out[0] if keys is None else out


def _width(edges: Edges) -> Values:
    return np.diff(edges) / 1e9


def events_per_second(field: str | None) -> Callable[[Rows, Edges], Values]:
    """Rate of instants: the sum of ``field`` (or the number of rows) per second."""

    def compute(rows: Rows, edges: Edges) -> Values:
        t = rows["t"].astype(np.int64)
        b = np.searchsorted(edges, t, "right") - 1
        ok = (b >= 0) & (b < len(edges) - 1)
        weights = None if field is None else rows[field][ok].astype(float)
        n = np.bincount(b[ok], weights, len(edges) - 1)
        return n / _width(edges)

    return compute


def rate(*fields: str) -> Callable[[Rows, Edges], Values]:
    """Sum of ``fields`` of a sampled stream, per second."""

    def compute(rows: Rows, edges: Edges) -> Values:
        amount = sum(rows[f].astype(float) for f in fields)
        return spread(rows, np.asarray(amount), edges) / _width(edges)

    return compute


def cpus(field: str, vector: int | None = None) -> Callable[[Rows, Edges], Values]:
    """Time in ``field`` as a number of CPUs kept busy (1.0 is one whole CPU)."""

    def compute(rows: Rows, edges: Edges) -> Values:
        rows = rows if vector is None else rows[rows["vec"] == vector]
        return spread(rows, rows[field], edges) / np.diff(edges)

    return compute


def worst_cpu(*fields: str, vector: int | None = None) -> Callable[[Rows, Edges], Values]:
    """Share (%) of the one CPU that spent the most time in ``fields``."""

    def compute(rows: Rows, edges: Edges) -> Values:
        rows = rows if vector is None else rows[rows["vec"] == vector]
        amount = np.asarray(sum(rows[f].astype(float) for f in fields))
        by_cpu = spread(rows, amount, edges, rows["cpu"])
        return 100.0 * by_cpu.max(axis=0) / np.diff(edges)

    return compute


def share(*fields: str) -> Callable[[Rows, Edges], Values]:
    """Share (%) of the CPU time that the rows account for which went to ``fields``."""

    def compute(rows: Rows, edges: Edges) -> Values:
        amount = np.asarray(sum(rows[f].astype(float) for f in fields))
        part, whole = spread(rows, amount, edges), spread(rows, rows["dt"], edges)
        return np.divide(100.0 * part, whole, out=np.full(len(part), np.nan), where=whole > 0)

    return compute


def gauge(field: str, per: str = "netns") -> Callable[[Rows, Edges], Values]:
    """Last value in the bucket, summed over ``per`` (each namespace reports its own)."""

    def compute(rows: Rows, edges: Edges) -> Values:
        nb = len(edges) - 1
        b = np.searchsorted(edges, rows["t"].astype(np.int64), "right") - 1
        ok = (b >= 0) & (b < nb)
        out = np.full(nb, np.nan)
        keys = rows[per][ok] if per else np.zeros(int(ok.sum()), np.int64)
        for key in np.unique(keys):
            last = np.full(nb, np.nan)
            of = keys == key
            last[b[ok][of]] = rows[field][ok][of]  # ascending t: the last one written stays
            out = np.where(np.isnan(out), last, out + np.nan_to_num(last))
        return out

    return compute


def highest(field: str) -> Callable[[Rows, Edges], Values]:
    """Largest value in the bucket."""

    def compute(rows: Rows, edges: Edges) -> Values:
        out = np.full(len(edges) - 1, -np.inf)
        b = np.searchsorted(edges, rows["t"].astype(np.int64), "right") - 1
        ok = (b >= 0) & (b < len(out))
        np.maximum.at(out, b[ok], rows[field][ok].astype(float))
        return np.where(np.isinf(out), np.nan, out)

    return compute


def quantile(hist: npt.NDArray[Any], q: float) -> Values:
    """Upper bound (ns) of the slot that holds quantile ``q`` of log2 histograms (..., slots).

    NaN where a histogram is empty.
    """
    cum = np.cumsum(hist, axis=-1, dtype=float)
    total = cum[..., -1]
    slot = (cum < (q * total)[..., None]).sum(axis=-1)
    return np.where(total > 0, 2.0 ** (slot + 1), np.nan)


def hist_quantile(field: str, q: float) -> Callable[[Rows, Edges], Values]:
    """Quantile of a log2 histogram field over each bucket; a row counts where its ``t`` is."""

    def compute(rows: Rows, edges: Edges) -> Values:
        nb = len(edges) - 1
        # A sampled row ends at t, so one that ends on an edge belongs to the bucket before it.
        b = np.searchsorted(edges, rows["t"].astype(np.int64), "left") - 1
        ok = (b >= 0) & (b < nb)
        hist = np.zeros((nb, st.HIST_SLOTS))
        np.add.at(hist, b[ok], rows[field][ok])
        return quantile(hist, q)

    return compute


_SOFTIRQ = tuple(
    Lane(
        100 + vec,
        f"softirq.{name.lower()}",
        f"softirq {name}",
        "CPUs",
        "softirq",
        "softirq.cpu",
        "mean",
        True,
        cpus("busy", vec),
    )
    for vec, name in enumerate(st.VECTORS)
)

_TCP, _SOCK = "tcp.retransmit", "tcp.sockets"

LANES: tuple[Lane, ...] = (
    Lane(1, "net_rx.worst", "net_rx worst CPU", "%", "softirq", "softirq.cpu", "max", True,
         worst_cpu("busy", vector=NET_RX)),
    Lane(2, "net_rx.all", "net_rx all CPUs", "CPUs", "softirq", "softirq.cpu", "mean", True,
         cpus("busy", NET_RX)),
    Lane(3, "softirq.wait", "raise→run P99", "ns", "softirq", "softirq.cpu", "max", False,
         hist_quantile("wait_hist", 0.99)),
    Lane(4, "softirq.run", "softirq run P99", "ns", "softirq", "softirq.cpu", "max", False,
         hist_quantile("run_hist", 0.99)),
    Lane(5, "softirq.slow", "slow softirqs", "/s", "softirq", "softirq.slow", "mean", True,
         events_per_second(None)),
    *_SOFTIRQ,
    Lane(20, "napi.work", "NAPI packets", "/s", "napi", "net.napi", "mean", True, rate("work")),
    Lane(21, "napi.budget", "NAPI budget hits", "/s", "napi", "net.napi", "mean", True,
         rate("budget_hits")),
    Lane(22, "net.squeezed", "time squeezed", "/s", "napi", "net.softnet", "mean", True,
         rate("squeezed")),
    Lane(23, "net.drops", "packets dropped", "/s", "napi", "net.device", "mean", True,
         rate("rx_dropped", "tx_dropped")),
    Lane(24, "net.backlog_drops", "backlog drops", "/s", "napi", "net.softnet", "mean", True,
         rate("dropped")),
    Lane(30, "tcp.retransmits", "retransmitted segs", "/s", "tcp", _TCP, "mean", True,
         events_per_second("segments")),
    Lane(31, "tcp.retransmit_calls", "retransmit calls", "/s", "tcp", _TCP, "mean", True,
         events_per_second(None)),
    Lane(32, "tcp.out_segs", "segments out", "/s", "sockets", _SOCK, "mean", False,
         rate("out_segs")),
    Lane(33, "tcp.inuse", "TCP sockets", "", "sockets", _SOCK, "last", False, gauge("inuse")),
    Lane(34, "tcp.time_wait", "TIME_WAIT", "", "sockets", _SOCK, "last", False,
         gauge("time_wait")),
    Lane(35, "tcp.listen_drops", "listen drops", "/s", "sockets", _SOCK, "mean", False,
         rate("listen_drops")),
    Lane(36, "tcp.resets", "resets out", "/s", "sockets", _SOCK, "mean", False,
         rate("out_resets")),
    Lane(40, "cpu.busy", "CPU busy", "%", "cpu", "cpu.usage", "mean", False,
         share("user", "nice", "system", "irq", "softirq", "steal")),
    Lane(41, "cpu.worst", "busiest CPU", "%", "cpu", "cpu.usage", "max", False,
         worst_cpu("user", "nice", "system", "irq", "softirq", "steal")),
    Lane(42, "cpu.softirq", "CPU softirq", "%", "cpu", "cpu.usage", "mean", False,
         share("softirq")),
    Lane(43, "cpu.iowait", "CPU iowait", "%", "cpu", "cpu.usage", "mean", False, share("iowait")),
    Lane(44, "cpu.steal", "CPU steal", "%", "cpu", "cpu.usage", "mean", False, share("steal")),
    Lane(45, "cpu.runq", "longest run queue", "tasks", "runq", "cpu.runq", "max", False,
         highest("longest")),
    Lane(46, "cpu.running", "tasks runnable", "tasks", "cpu", "cpu.load", "max", False,
         highest("running")),
    Lane(47, "cpu.pressure", "CPU pressure", "%", "pressure", "cpu.pressure", "mean", False,
         lambda rows, edges: share("some")(rows[rows["resource"] == 0], edges)),
)  # fmt: skip
"""All lanes, in the order of the screen."""

BY_KEY: dict[str, Lane] = {lane.key: lane for lane in LANES}
