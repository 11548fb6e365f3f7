"""Lanes: the curves of the screen and of the roll-ups, each a pure function of rows.

Those of processes that use CUDA are in :mod:`dsprobe.recordings.cudalanes`, those of GPUs in
:mod:`dsprobe.recordings.nvmllanes`.
"""

from __future__ import annotations

from dsprobe.recordings import streams as st
from dsprobe.recordings.cudalanes import CUDA_LANES
from dsprobe.recordings.lane import (
    Lane,
    cpus,
    events_per_second,
    gauge,
    highest,
    rate,
    share,
    worst_cpu,
    worst_quantile,
)
from dsprobe.recordings.nvmllanes import NVML_LANES

NET_RX = st.VECTORS.index("NET_RX")

_IRQ, _TCP, _SOCK, _BUSY = (
    ("softirq", "softirq.cpu"),
    ("tcp", "tcp.retransmit"),
    ("sockets", "tcp.sockets"),
    ("user", "nice", "system", "irq", "softirq", "steal"),
)

LANES: tuple[Lane, ...] = (
    Lane(1, "net_rx.worst", "net_rx worst CPU", "%", *_IRQ, "max", True,
         worst_cpu("busy", vector=NET_RX)),
    Lane(2, "net_rx.all", "net_rx all CPUs", "CPUs", *_IRQ, "mean", True, cpus("busy", NET_RX)),
    Lane(6, "softirq.wait", "raise→run P99 worst", "≤ns", *_IRQ, "max", False,
         worst_quantile("wait_hist", 0.99), "softirq_raise", 2),
    Lane(5, "softirq.slow", "softirqs ≥1ms", "/s", "softirq", "softirq.slow", "mean", True,
         events_per_second(None)),
    Lane(30, "tcp.retransmits", "retransmitted segs", "/s", *_TCP, "mean", True,
         events_per_second("segments")),
    Lane(31, "tcp.retransmit_calls", "retransmit calls", "/s", *_TCP, "mean", True,
         events_per_second(None)),
    Lane(33, "tcp.inuse", "TCP sockets", "", *_SOCK, "last", False, gauge("inuse")),
    Lane(34, "tcp.time_wait", "TIME_WAIT", "", *_SOCK, "last", False, gauge("time_wait")),
    Lane(40, "cpu.busy", "CPU busy", "%", "cpu", "cpu.usage", "mean", False, share(*_BUSY)),
    Lane(41, "cpu.worst", "busiest CPU", "%", "cpu", "cpu.usage", "max", False,
         worst_cpu(*_BUSY)),
    Lane(42, "cpu.softirq", "CPU softirq", "%", "cpu", "cpu.usage", "mean", False,
         share("softirq")),
    Lane(45, "cpu.runq", "longest run queue", "tasks", "runq", "cpu.runq", "max", False,
         highest("longest")),
    *NVML_LANES,
    *CUDA_LANES,
    Lane(20, "napi.work", "NAPI packets", "/s", "napi", "net.napi", "mean", True, rate("work")),
    Lane(23, "net.drops", "device drops", "/s", "netdev", "net.device", "mean", True,
         rate("rx_dropped", "tx_dropped")),
    Lane(22, "net.squeezed", "time squeezed", "/s", "netdev", "net.softnet", "mean", True,
         rate("squeezed")),
    Lane(21, "napi.budget", "NAPI budget hits", "/s", "napi", "net.napi", "mean", True,
         rate("budget_hits")),
    Lane(24, "net.backlog_drops", "backlog drops", "/s", "netdev", "net.softnet", "mean", True,
         rate("dropped")),
    Lane(32, "tcp.out_segs", "segments out", "/s", *_SOCK, "mean", False, rate("out_segs")),
    Lane(35, "tcp.listen_drops", "listen drops", "/s", *_SOCK, "mean", False,
         rate("listen_drops")),
    Lane(36, "tcp.resets", "resets out", "/s", *_SOCK, "mean", False, rate("out_resets")),
    Lane(43, "cpu.iowait", "CPU iowait", "%", "cpu", "cpu.usage", "mean", False, share("iowait")),
    Lane(44, "cpu.steal", "CPU steal", "%", "cpu", "cpu.usage", "mean", False, share("steal")),
    Lane(46, "cpu.running", "tasks runnable", "tasks", "cpu", "cpu.load", "max", False,
         highest("running")),
    Lane(47, "cpu.pressure", "CPU pressure", "%", "pressure", "cpu.pressure", "mean", False,
         lambda rows, edges: share("some")(rows[rows["resource"] == 0], edges)),
    Lane(7, "softirq.run", "run time P99 worst", "≤ns", *_IRQ, "max", False,
         worst_quantile("run_hist", 0.99), since=2),
    *(
        Lane(100 + vec, f"softirq.{name.lower()}", f"softirq {name}", "CPUs", *_IRQ, "mean", True,
             cpus("busy", vec))
        for vec, name in enumerate(st.VECTORS)
    ),
)  # fmt: skip
"""All lanes, in the order of the screen: a short terminal shows the first ones.  Numbers 3 and
4 were P99 over all CPUs and vectors together."""

BY_KEY: dict[str, Lane] = {lane.key: lane for lane in LANES}
