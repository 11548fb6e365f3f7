"""Every stream dsprobe writes, declared once.

Adding a field at the end of a stream is a compatible change; any other change to an existing field
needs a new stream name.  ``tests/golden`` holds a file of every format version.
"""

from __future__ import annotations

from dsprobe.recordings.cudastreams import CUDA_STREAMS
from dsprobe.recordings.model import Field, Stream
from dsprobe.recordings.nvmlstreams import NVML_STREAMS

HIST_SLOTS = 32
"""Slots of a log2 histogram: slot i counts values in [2**i, 2**(i+1)) ns, the last all above."""

VECTORS = (
    "HI", "TIMER", "NET_TX", "NET_RX", "BLOCK", "IRQ_POLL", "TASKLET", "SCHED", "HRTIMER", "RCU",
)  # fmt: skip
"""Softirq vectors by number (include/linux/interrupt.h)."""

TCP_STATES = (
    "?", "ESTABLISHED", "SYN_SENT", "SYN_RECV", "FIN_WAIT1", "FIN_WAIT2", "TIME_WAIT", "CLOSE",
    "CLOSE_WAIT", "LAST_ACK", "LISTEN", "CLOSING", "NEW_SYN_RECV",
)  # fmt: skip
"""TCP states by number (include/net/tcp_states.h)."""

RETRANSMIT_KINDS = ("data", "SYN", "SYN-ACK")
RETRANSMIT_CAUSES = ("unknown", "RTO", "fast", "probe")
SLOW_KINDS = ("run", "wait")
PRESSURE = ("cpu", "memory", "io", "irq")

STATUSES = ("attached", "missing", "detached", "stalled", "shed", "off")
"""Words in meta.coverage: working / cannot work here / was taken off / gives no answer / working
with less detail to save cost / not asked for, or this machine has nothing of the kind."""

_T = Field("t", "<u8", "ns", "CLOCK_MONOTONIC")
_DT = Field("dt", "<u8", "ns", "length of the interval that ends at t")
_CPU = Field("cpu", "<u2", "cpu", "CPU number")
_VEC = Field("vec", "u1", "enum", "softirq vector", names=VECTORS)
_NETNS = Field("netns", "<u4", "id", "inode number of the network namespace", ref="meta.netns")


def _count(name: str, doc: str, type: str = "<u4") -> Field:
    return Field(name, type, "count", doc)


def _time(name: str, doc: str) -> Field:
    return Field(name, "<u8", "ns", doc)


def _text(name: str, doc: str) -> Field:
    return Field(name, "str", "text", doc)


SOFTIRQ_CPU = Stream(
    "softirq.cpu",
    "Softirq work per interval, CPU and vector; an interval without a run has no row.",
    "irq:softirq_raise, irq:softirq_entry, irq:softirq_exit, aggregated in the kernel",
    (
        _T,
        _DT,
        _CPU,
        _VEC,
        _count("count", "handler runs entered (as /proc/softirqs counts)"),
        _time("busy", "time inside the handler, summed over runs that ended"),
        _count("waits", "runs whose raise was seen"),
        _time("wait", "time from the first raise to the entry of the handler, summed over waits"),
        Field("run_hist", "<u4", "count", "log2 histogram of run times", HIST_SLOTS),
        Field("wait_hist", "<u4", "count", "log2 histogram of raise-to-run latency", HIST_SLOTS),
    ),
)

SOFTIRQ_SLOW = Stream(
    "softirq.slow",
    "Single softirq runs or waits over the threshold.",
    "irq:softirq_entry, irq:softirq_exit",
    (
        _T,
        _time("duration", "how long the run or the wait took; it ended at t"),
        _CPU,
        _VEC,
        Field("kind", "u1", "enum", "what was slow", names=SLOW_KINDS),
        Field("pid", "<u4", "pid", "process (tgid) that was interrupted; 0 is the idle task"),
        Field("tid", "<u4", "pid", "thread that was interrupted"),
        Field("comm", "S16", "text", "name of that thread"),
    ),
)

NET_NAPI = Stream(
    "net.napi",
    "NAPI polls per interval and device; an interval without a poll has no row.",
    "napi:napi_poll, aggregated in the kernel",
    (
        _T,
        _DT,
        _NETNS,
        Field("ifindex", "<u4", "id", "interface index; 0 is a per-CPU backlog"),
        Field("device", "S16", "text", "interface name"),
        _count("polls", "calls of the driver's poll function"),
        _count("work", "packets of work they reported"),
        _count("budget_hits", "polls that used their whole budget: more was waiting"),
    ),
)

NET_SOFTNET = Stream(
    "net.softnet",
    "Packet intake per interval and CPU.",
    "/proc/net/softnet_stat (net/core/net-procfs.c)",
    (
        _T,
        _DT,
        _CPU,
        _count("processed", "packets taken in"),
        _count("dropped", "packets dropped because the backlog was full"),
        _count("squeezed", "net_rx runs that ended for want of budget or time"),
    ),
)

NET_DEVICE = Stream(
    "net.device",
    "Interface counters per interval; only interfaces that moved.",
    "/proc/PID/net/dev",
    (
        _T,
        _DT,
        _NETNS,
        Field("device", "S16", "text", "interface name"),
        _count("rx_packets", "packets received", "<u8"),
        _count("rx_bytes", "bytes received", "<u8"),
        _count("rx_errors", "receive errors", "<u8"),
        _count("rx_dropped", "received packets dropped", "<u8"),
        _count("tx_packets", "packets sent", "<u8"),
        _count("tx_bytes", "bytes sent", "<u8"),
        _count("tx_errors", "transmit errors", "<u8"),
        _count("tx_dropped", "packets to send that were dropped", "<u8"),
    ),
)

TCP_RETRANSMIT = Stream(
    "tcp.retransmit",
    "One retransmission call: one event may carry several segments.",
    "tcp:tcp_retransmit_skb, tcp:tcp_retransmit_synack",
    (
        _T,
        _NETNS,
        Field("family", "u1", "ip", "4 or 6; a v4-mapped IPv6 socket counts as 4"),
        Field("mapped", "u1", "bool", "1 where an IPv6 socket spoke IPv4"),
        Field("state", "u1", "enum", "state of the socket", names=TCP_STATES),
        Field("kind", "u1", "enum", "what was sent again", names=RETRANSMIT_KINDS),
        Field("cause", "u1", "enum", "why, where the kernel tells", names=RETRANSMIT_CAUSES),
        _count("segments", "segments sent again (as RetransSegs counts)", "<u2"),
        Field("err", "<i2", "errno", "result of the transmission, 0 or -errno"),
        Field("sport", "<u2", "port", "local port"),
        Field("dport", "<u2", "port", "remote port"),
        Field("saddr", "u1", "address", "local address, IPv4 as ::ffff:a.b.c.d", 16),
        Field("daddr", "u1", "address", "remote address, IPv4 as ::ffff:a.b.c.d", 16),
    ),
)

TCP_SOCKETS = Stream(
    "tcp.sockets",
    "TCP counters per interval and network namespace that has sockets.",
    "/proc/PID/net/sockstat, snmp, netstat (RFC 4022; Documentation/networking/snmp_counter.rst)",
    (
        _T,
        _DT,
        _NETNS,
        _count("inuse", "sockets in use, IPv4 and IPv6"),
        _count("orphan", "sockets no process holds, in the whole machine"),
        _count("time_wait", "sockets in TIME_WAIT"),
        _count("established", "connections ESTABLISHED or CLOSE_WAIT (CurrEstab)"),
        _count("in_segs", "segments received (InSegs)"),
        _count("out_segs", "segments sent, without retransmitted ones (OutSegs)"),
        _count("retrans_segs", "segments sent again (RetransSegs)"),
        _count("timeouts", "retransmission timer expiries (TCPTimeouts)"),
        _count("fast_retrans", "fast retransmits (TCPFastRetrans)"),
        _count("loss_probes", "tail loss probes sent (TCPLossProbes)"),
        _count("syn_retrans", "SYN and SYN-ACK sent again (TCPSynRetrans)"),
        _count("listen_overflows", "connections refused for a full accept queue"),
        _count("listen_drops", "SYN to a listening socket dropped for any reason"),
        _count("out_resets", "resets sent (OutRsts)"),
        _count("estab_resets", "established connections reset (EstabResets)"),
        _count("attempt_fails", "connection attempts that failed (AttemptFails)"),
    ),
)

CPU_USAGE = Stream(
    "cpu.usage",
    "Where each CPU's time went per interval, in steps of one clock tick (10 ms).",
    "/proc/stat (proc_stat(5))",
    (
        _T,
        _DT,
        _CPU,
        _time("user", "user mode, guests included"),
        _time("nice", "user mode, niced"),
        _time("system", "kernel mode, without interrupts"),
        _time("idle", "idle"),
        _time("iowait", "idle with disk I/O outstanding"),
        _time("irq", "hardware interrupts"),
        _time("softirq", "softirqs"),
        _time("steal", "time the hypervisor gave to others"),
    ),
)

CPU_RUNQ = Stream(
    "cpu.runq",
    "Run-queue length per CPU, sampled; the task on the CPU counts, the idle task does not.  A CPU"
    " that sleeps may give no sample.",
    "perf software event cpu-clock; rq.nr_running read by BPF",
    (
        _T,
        _DT,
        _CPU,
        _count("samples", "samples in the interval"),
        _count("total", "sum of the lengths seen"),
        _count("longest", "longest seen since the interval before began"),
    ),
)

CPU_LOAD = Stream(
    "cpu.load",
    "Tasks of the whole machine, and how often CPUs changed between them.",
    "/proc/stat, /proc/loadavg",
    (
        _T,
        _DT,
        _count("running", "tasks running or runnable now (procs_running)"),
        _count("blocked", "tasks waiting for I/O now (procs_blocked)"),
        _count("switches", "context switches in the interval", "<u8"),
        _count("forks", "tasks created in the interval", "<u8"),
        Field("load1", "<f4", "tasks", "load average over a minute"),
    ),
)

CPU_PRESSURE = Stream(
    "cpu.pressure",
    "Time in which tasks stood still for want of a resource (PSI).",
    "/proc/pressure (Documentation/accounting/psi.rst)",
    (
        _T,
        _DT,
        Field("resource", "u1", "enum", "what was short", names=PRESSURE),
        _time("some", "time in which at least one task stalled"),
        _time("full", "time in which all non-idle tasks stalled"),
    ),
)

META_SESSION = Stream(
    "meta.session",
    "Facts about the host and the session: host, kernel, machine, cpus, boot_id, version, zone ...",
    "uname(2), /proc/sys/kernel/random/boot_id, tzset(3)",
    (_T, _text("key", "name of the fact"), _text("value", "the fact")),
)

META_STRING = Stream(
    "meta.string",
    "Interned text.",
    "agent",
    (_T, Field("id", "<u4", "id", "number other streams use"), _text("text", "the text")),
)

META_NETNS = Stream(
    "meta.netns",
    "Network namespaces by inode number.",
    "/proc/PID/ns/net, /run/netns",
    (
        _T,
        Field("id", "<u4", "id", "inode number"),
        _text("name", "host, the name under /run/netns, or a process that lives in it"),
    ),
)

META_CLOCK = Stream(
    "meta.clock",
    "Pairs of CLOCK_MONOTONIC and wall clock, once a second.",
    "clock_gettime(2): monotonic, realtime, monotonic; the narrowest of a few tries",
    (
        _T,
        Field("wall", "<i8", "ns", "CLOCK_REALTIME at t"),
        _time("uncertainty", "the pair is true within this many ns"),
    ),
)

META_COVERAGE = Stream(
    "meta.coverage",
    "What each probe and program can see from t on; a later row replaces an earlier one.",
    "agent",
    (
        _T,
        _text("probe", "probe name"),
        _text("program", "BPF program or file; empty for the probe as a whole"),
        Field("status", "u1", "enum", "state from t on", names=STATUSES),
        _text("reason", "why, and what to do, where the status is not attached"),
    ),
)

META_LOSS = Stream(
    "meta.loss",
    "Rows or events that were produced and are not in the session.",
    "agent: BPF counters, ring-buffer reservations, bounded queues",
    (
        _T,
        _text("stream", "stream that lost them"),
        _text("reason", "where they were lost"),
        _count("lost", "how many since the row before", "<u8"),
    ),
)

META_OVERHEAD = Stream(
    "meta.overhead",
    "What dsprobe itself cost.",
    "getrusage(2), /proc/PID/statm, BPF_ENABLE_STATS (sampled a quarter of a second in ten)",
    (
        _T,
        _DT,
        _time("agent_cpu", "CPU time of the agent and of the processes it started"),
        _time("bpf_cpu", "CPU time of BPF programs in the interval, by the last sample's rate"),
        Field("rss", "<u8", "bytes", "resident memory of the agent and the processes it started"),
        _count("viewers", "viewers connected"),
        Field("flight_bytes", "<u8", "bytes", "memory in the flight ring"),
    ),
)

META_PROGRAM = Stream(
    "meta.program",
    "Cost of each BPF program over one sampled interval.",
    "BPF_ENABLE_STATS, BPF_OBJ_GET_INFO_BY_FD (bpf(2))",
    (
        _T,
        _DT,
        _text("program", "program name"),
        _count("runs", "times it ran", "<u8"),
        _time("run_time", "time it took"),
        _count("misses", "runs the kernel skipped (recursion_misses)", "<u8"),
    ),
)

MARKER = Stream(
    "marker",
    "A moment somebody marked.",
    "the key m, or the command line",
    (_T, _text("label", "what they called it")),
)

ROLLUP_LANE = Stream(
    "rollup.lane",
    "One value per second and lane, so that an overview need not read the rows below it.",
    "dsprobe.recordings.lanes over the other streams",
    (
        _T,
        Field("lane", "<u2", "id", "lane number; never reused for another meaning"),
        Field("value", "<f4", "lane", "the lane's value over [t, t + 1 s), in the lane's unit"),
    ),
)

STREAMS: dict[str, Stream] = {
    s.name: s
    for s in (
        SOFTIRQ_CPU,
        SOFTIRQ_SLOW,
        NET_NAPI,
        NET_SOFTNET,
        NET_DEVICE,
        TCP_RETRANSMIT,
        TCP_SOCKETS,
        CPU_USAGE,
        CPU_RUNQ,
        CPU_LOAD,
        CPU_PRESSURE,
        META_SESSION,
        META_STRING,
        META_NETNS,
        META_CLOCK,
        META_COVERAGE,
        META_LOSS,
        META_OVERHEAD,
        META_PROGRAM,
        MARKER,
        ROLLUP_LANE,
        *CUDA_STREAMS,
        *NVML_STREAMS,
    )
}
