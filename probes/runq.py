"""Run-queue length per CPU, sampled about 21 times a second.

Source: perf software event cpu-clock (perf_event_open(2)); rq.nr_running (kernel/sched/sched.h).
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from dsprobe.probes.btf import Btf
from dsprobe.probes.maps import MappedArray
from dsprobe.probes.probe import Batch, BpfProbe, Map, Program, need_btf, possible_cpus
from dsprobe.recordings.streams import CPU_RUNQ

PERIOD_NS = 47_000_000
"""Not a divisor of any tick, so that periodic work is not always or never seen."""

_CELL = np.dtype([("samples", "<u8"), ("total", "<u8"), ("longest", "<u8"), ("pad", "<u8", (5,))])


class Runq(BpfProbe):
    name = "runq"
    doc = "run-queue length per CPU, sampled"
    streams = (CPU_RUNQ,)
    source = "runq.bpf.c"
    programs = (Program("runq_sample", "cpu_clock", str(PERIOD_NS)),)

    def defines(self, btf: Btf | None) -> Mapping[str, int]:
        btf = need_btf(btf)
        return {
            "TASK_CFS_RQ": btf.offset("task_struct", "se.cfs_rq"),
            "CFS_RQ_RQ": btf.offset("cfs_rq", "rq"),
            "RQ_NR_RUNNING": btf.offset("rq", "nr_running"),
        }

    def open(self, maps: Mapping[str, Map]) -> None:
        self._cells = MappedArray(maps["runq_cells"], _CELL)

    def start(self) -> None:
        self._before = self._cells.snapshot()

    def collect(self, now: int) -> list[Batch]:
        cells = self._cells.snapshot()
        self._cells.live["longest"][: possible_cpus()] = 0
        before, self._before = self._before, cells
        i = np.flatnonzero(cells["samples"] != before["samples"])
        if not len(i):
            return []
        rows = CPU_RUNQ.empty(len(i))
        rows["t"], rows["cpu"] = now, i
        for f in ("samples", "total"):
            rows[f] = cells[f][i] - before[f][i]
        rows["longest"] = cells["longest"][i]
        return [(CPU_RUNQ, rows)]
