"""Softirqs that BPF programs are not shown.

Some kernels of sandboxes run no BPF program while a thread of PID 1 is current: a softirq that
interrupts one is in /proc/softirqs and in ftrace, and no BPF program hears of it.  Elsewhere
programs see them all.  Ftrace tells how many there were.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np

from tests.support.counters import Counts, softirqs

_ENTRY = re.compile(r"\[(\d+)\].*softirq_entry: vec=(\d+)")


@contextmanager
def unseen() -> Iterator[Callable[[], Counts]]:
    """A function that says how many, as (vector, CPU), have interrupted PID 1 since the start."""
    # An instance has buffers and filters of its own (Documentation/trace/ftrace.rst).
    instance = Path("/sys/kernel/tracing/instances", f"dsprobe-test-{os.getpid()}")
    instance.mkdir()
    event = instance / "events/irq/softirq_entry"
    try:
        tids = os.listdir("/proc/1/task")
        (event / "filter").write_text(" || ".join(f"common_pid == {tid}" for tid in tids))
        (event / "enable").write_text("1")

        def count() -> Counts:
            out = np.zeros_like(softirqs())
            for cpu, vec in _ENTRY.findall((instance / "trace").read_text()):
                out[int(vec), int(cpu)] += 1
            return out

        yield count
    finally:
        (event / "enable").write_text("0")
        instance.rmdir()
