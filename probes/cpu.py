"""CPU time per CPU, and the tasks of the whole machine.

Source: /proc/stat and /proc/loadavg (proc_stat(5), proc_loadavg(5)).  CPU time comes in clock ticks
of 1/sysconf(_SC_CLK_TCK) s, usually 10 ms.
"""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np

from dsprobe.probes.probe import Batch, Probe
from dsprobe.recordings.streams import CPU_LOAD, CPU_USAGE

_TIMES = ("user", "nice", "system", "idle", "iowait", "irq", "softirq", "steal")


class Cpu(Probe):
    name = "cpu"
    doc = "where each CPU's time went, tasks runnable and blocked"
    streams = (CPU_USAGE, CPU_LOAD)

    def __init__(self, proc: Path = Path("/proc")) -> None:
        self._proc = proc
        self._tick = 10**9 // os.sysconf("SC_CLK_TCK")

    def start(self) -> None:
        self._before, self._totals = self._read()

    def _read(self) -> tuple[dict[int, np.void], dict[str, int]]:
        cpus: dict[int, np.void] = {}
        totals: dict[str, int] = {}
        for line in (self._proc / "stat").read_text().splitlines():
            name, *values = line.split()
            if name.startswith("cpu") and name != "cpu":
                row = np.zeros((), CPU_USAGE.dtype)[()]
                for f, v in zip(_TIMES, values, strict=False):
                    row[f] = int(v) * self._tick
                cpus[int(name[3:])] = row
            elif name in ("ctxt", "processes", "procs_running", "procs_blocked"):
                totals[name] = int(values[0])
        return cpus, totals

    def collect(self, now: int) -> list[Batch]:
        cpus, totals = self._read()
        before, self._before = self._before, cpus
        old_totals, self._totals = self._totals, totals
        known = [n for n in cpus if n in before]  # one that came online has no interval yet
        usage = CPU_USAGE.empty(len(known))
        usage["t"], usage["cpu"] = now, known
        if known:
            new = np.array([cpus[n] for n in known], CPU_USAGE.dtype)
            old = np.array([before[n] for n in known], CPU_USAGE.dtype)
            # iowait and idle may step back a tick (proc_stat(5)): that is no growth.
            for f in _TIMES:
                delta = new[f].astype(np.int64) - old[f].astype(np.int64)
                usage[f] = np.maximum(delta, 0)
        load = CPU_LOAD.rows(
            t=now,
            running=totals.get("procs_running", 0),
            blocked=totals.get("procs_blocked", 0),
            switches=totals["ctxt"] - old_totals["ctxt"],
            forks=totals["processes"] - old_totals["processes"],
            load1=float((self._proc / "loadavg").read_text().split()[0]),
        )
        return [(CPU_USAGE, usage), (CPU_LOAD, load)]
