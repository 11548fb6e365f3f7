"""Softirq runs and raise-to-run latency per CPU and vector.

Source: irq:softirq_raise, irq:softirq_entry and irq:softirq_exit (include/trace/events/irq.h), as
raw tracepoints: 60 to 90 ns a hit, aggregated in the kernel, read without a system call.

Once a second the counts are compared with /proc/softirqs: what the kernel ran no program for is a
loss (:mod:`dsprobe.probes.unseen`).
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt

from dsprobe.probes.btf import Btf
from dsprobe.probes.maps import MappedArray
from dsprobe.probes.probe import Batch, BpfProbe, Loss, Map, Program, possible_cpus
from dsprobe.probes.unseen import Counts, Unseen
from dsprobe.recordings.streams import HIST_SLOTS, SOFTIRQ_CPU, SOFTIRQ_SLOW, VECTORS

SLOW_NS = 1_000_000
"""A single run or wait at least this long becomes a row of softirq.slow."""

COMPARE_NS = 1_000_000_000
"""How often the counts are compared with the kernel's."""

UNSEEN = "the kernel ran no BPF program for them"

_CELL = np.dtype(
    [("raised_at", "<u8"), ("entered_at", "<u8"), ("count", "<u8"), ("busy", "<u8"),
     ("waits", "<u8"), ("wait", "<u8"), ("discarded", "<u8"),
     ("run_hist", "<u4", (HIST_SLOTS,)), ("wait_hist", "<u4", (HIST_SLOTS,))]
)  # fmt: skip
_SUMS = ("count", "busy", "waits", "wait", "run_hist", "wait_hist")


class Softirq(BpfProbe):
    name = "softirq"
    doc = "softirq runs, their time and raise-to-run latency per CPU and vector"
    streams = (SOFTIRQ_CPU, SOFTIRQ_SLOW)
    source = "softirq.bpf.c"
    programs = (
        Program("softirq_raise", "raw_tracepoint", "softirq_raise", required=False,
                otherwise="raise-to-run latency is not measured"),
        Program("softirq_exit", "raw_tracepoint", "softirq_exit"),
        Program("softirq_entry", "raw_tracepoint", "softirq_entry"),
    )  # fmt: skip
    rings: ClassVar = {"softirq_slow": SOFTIRQ_SLOW}

    def __init__(self, slow_ns: int = SLOW_NS, compare_ns: int = COMPARE_NS) -> None:
        self._slow_ns, self._compare_ns = slow_ns, compare_ns
        self._discarded = self._lost = self._compared = 0
        self.unseen: Unseen | None = None
        """None where /proc/softirqs cannot be read: then nobody knows."""
        self._at = 0
        self.fastest = 0.0
        """Runs per second on the busiest CPU, in the last interval."""
        self._shape = (possible_cpus(), len(VECTORS))
        self._cpu, self._vec = np.indices(self._shape).reshape(2, -1)

    def defines(self, btf: Btf | None) -> Mapping[str, int]:
        return {"SOFTIRQ_SLOW_NS": self._slow_ns}

    def open(self, maps: Mapping[str, Map]) -> None:
        self._cells = MappedArray(maps["softirq_cells"], _CELL)

    def start(self) -> None:
        self._before = self._cells.snapshot()
        with contextlib.suppress(OSError, ValueError):
            self.unseen = Unseen(self._counts(self._before))

    def _counts(self, cells: npt.NDArray[Any]) -> Counts:
        return cells["count"].astype(np.int64).reshape(self._shape)

    def _snapshot(self, now: int) -> npt.NDArray[Any]:
        """The cells, compared with the kernel's counts where that is due."""
        if self.unseen is None or now - self._compared < self._compare_ns:
            return self._cells.snapshot()
        self._compared = now
        kernel = self.unseen.read()
        cells = self._cells.snapshot()
        self._lost += self.unseen.update(kernel, self._counts(cells))
        return cells

    def collect(self, now: int) -> list[Batch]:
        cells = self._snapshot(now)
        before, self._before = self._before, cells
        runs = (cells["count"] - before["count"]).reshape(self._shape).sum(axis=1)
        self.fastest = float(runs.max()) / max(now - self._at, 1) * 1e9 if self._at else 0.0
        self._at = now
        moved = (cells["count"] != before["count"]) | (cells["busy"] != before["busy"])
        i = np.flatnonzero(moved)
        if not len(i):
            return []
        rows = SOFTIRQ_CPU.empty(len(i))
        rows["t"], rows["cpu"], rows["vec"] = now, self._cpu[i], self._vec[i]
        for f in _SUMS:
            rows[f] = cells[f][i] - before[f][i]
        self._discarded += int((cells["discarded"] - before["discarded"]).sum())
        return [(SOFTIRQ_CPU, rows)]

    def losses(self) -> list[Loss]:
        found = (
            ("raise stamped after the run that answered it", self._discarded),
            (UNSEEN, self._lost),
        )
        self._discarded = self._lost = 0
        return [Loss(SOFTIRQ_CPU.name, reason, n) for reason, n in found if n]
