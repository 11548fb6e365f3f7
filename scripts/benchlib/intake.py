"""What it takes to bring an event from a BPF ring into a frame, against bcc's callbacks."""

from __future__ import annotations

import ctypes
import os
import statistics
import time
from collections.abc import Iterator
from typing import Any

import numpy as np

from benchlib.model import Context, Row
from dsprobe.probes.ring import Ring
from dsprobe.probes.units import c_struct
from dsprobe.recordings import frames
from dsprobe.recordings.streams import SOFTIRQ_SLOW

_PAGES = 2048
_EVENTS = 50_000  # what 50 ms bring at a million events a second

# Each getppid(2) of this process puts the same event into both rings.
_PROGRAM = """
BPF_RINGBUF_OUTPUT(ours, PAGES);
BPF_RINGBUF_OUTPUT(theirs, PAGES);
int on_sys_enter(struct bpf_raw_tracepoint_args *ctx) {
    u64 id = bpf_get_current_pid_tgid();
    if (id >> 32 != PID || ctx->args[1] != GETPPID)
        return 0;
    struct event e = {};
    e.t = bpf_ktime_get_ns();
    e.duration = e.t & 0xffff;
    e.cpu = bpf_get_smp_processor_id();
    e.pid = id >> 32;
    e.tid = id;
    bpf_get_current_comm(e.comm, sizeof(e.comm));
    ours.ringbuf_output(&e, sizeof(e), BPF_RB_NO_WAKEUP);
    theirs.ringbuf_output(&e, sizeof(e), BPF_RB_NO_WAKEUP);
    return 0;
}
"""
_GETPPID = {"x86_64": 110, "aarch64": 173}


def intake(ctx: Context) -> Iterator[Row]:
    """The same events, read from two rings that hold the same bytes."""
    os.environ["BCC_KERNEL_SOURCE"] = str(ctx.root / "probes")
    from bcc import BPF

    text = "#include <linux/types.h>\n" + c_struct("event", SOFTIRQ_SLOW) + _PROGRAM
    number = _GETPPID[os.uname().machine]
    flags = [f"-DPAGES={_PAGES}", f"-DPID={os.getpid()}", f"-DGETPPID={number}", "-w"]
    bpf = BPF(text=text, cflags=flags)
    bpf.attach_raw_tracepoint(tp="sys_enter", fn_name="on_sys_enter")
    try:
        yield from _compare(ctx, bpf)
    finally:
        bpf.cleanup()


def _compare(ctx: Context, bpf: Any) -> Iterator[Row]:
    ring = Ring(bpf["ours"].map_fd, _PAGES * os.sysconf("SC_PAGE_SIZE"), SOFTIRQ_SLOW.dtype)
    theirs = bpf["theirs"]
    # The cheapest callback that still looks at the event: one field of a ctypes structure.
    fields = [(f.name, _CTYPES[f.type]) for f in SOFTIRQ_SLOW.fields]
    event = type("Event", (ctypes.Structure,), {"_pack_": 1, "_fields_": fields})
    seen: list[int] = []

    def callback(ctx: Any, data: Any, size: int) -> None:
        seen.append(ctypes.cast(data, ctypes.POINTER(event)).contents.t)

    theirs.open_ring_buffer(callback)
    ours_ns, theirs_ns = [], []
    for n in range(ctx.rounds * 3):
        for _ in range(_EVENTS):
            os.getppid()
        seen.clear()
        start = time.perf_counter_ns()
        rows = ring.drain()
        frame = frames.make(SOFTIRQ_SLOW, n, rows)
        middle = time.perf_counter_ns()
        bpf.ring_buffer_consume()
        end = time.perf_counter_ns()
        if frame.n != _EVENTS or not np.array_equal(rows["t"], np.array(seen, "<u8")):
            raise RuntimeError(f"the two readers saw {frame.n} and {len(seen)} of {_EVENTS} events")
        ours_ns.append((middle - start) / _EVENTS)
        theirs_ns.append((end - middle) / _EVENTS)
    ring.close()
    ours, other = statistics.median(ours_ns), statistics.median(theirs_ns)
    ratio = statistics.median(t / o for t, o in zip(theirs_ns, ours_ns, strict=True))
    yield Row("intake, numpy ring to frame", "ns/event", ours, 25)
    yield Row("intake, bcc callback", "ns/event", other)
    yield Row("intake, bcc callback over numpy ring", "times", ratio, 25, at_least=True)


_CTYPES = {
    "<u8": ctypes.c_uint64, "<u4": ctypes.c_uint32, "<u2": ctypes.c_uint16, "u1": ctypes.c_uint8,
    "S16": ctypes.c_char * 16,
}  # fmt: skip
