"""CPU time per CPU, and the tasks of the whole machine.

Source: /proc/stat and /proc/loadavg (proc_stat(5), proc_loadavg(5)).  CPU time comes in clock ticks
of 1/sysconf(_SC_CLK_TCK) s, usually 10 ms.
"""

from __future__ import annotations

import os
from collections.abc import Hashable
from pathlib import Path

from dsprobe.probes.growth import Growth, Reading
from dsprobe.probes.probe import Batch, Probe
from dsprobe.recordings.streams import CPU_LOAD, CPU_USAGE

_TIMES = ("user", "nice", "system", "idle", "iowait", "irq", "softirq", "steal")
_TOTALS = {"ctxt": "switches", "processes": "forks", "procs_running": "running",
           "procs_blocked": "blocked"}  # fmt: skip


class Cpu(Probe):
    name = "cpu"
    doc = "where each CPU's time went, tasks runnable and blocked"
    streams = (CPU_USAGE, CPU_LOAD)

    def __init__(self, proc: Path = Path("/proc")) -> None:
        self._proc = proc
        self._tick = 10**9 // os.sysconf("SC_CLK_TCK")

    def start(self) -> None:
        cpus, totals = self._read()
        self._usage = Growth(CPU_USAGE, *_TIMES, wobbles=True)  # idle and iowait: proc_stat(5)
        self._usage.start(cpus)
        self._load = Growth(CPU_LOAD, "switches", "forks")
        self._load.start({"": totals})

    def _read(self) -> tuple[dict[Hashable, Reading], Reading]:
        cpus: dict[Hashable, Reading] = {}
        totals: dict[str, float] = {}
        for line in (self._proc / "stat").read_text().splitlines():
            name, *values = line.split()
            if name.startswith("cpu") and name != "cpu":
                times = {f: int(v) * self._tick for f, v in zip(_TIMES, values, strict=False)}
                cpus[name] = {"cpu": int(name[3:]), **times}
            elif name in _TOTALS:
                totals[_TOTALS[name]] = int(values[0])
        totals["load1"] = float((self._proc / "loadavg").read_text().split()[0])
        return cpus, totals

    def collect(self, now: int) -> list[Batch]:
        cpus, totals = self._read()
        return [
            (CPU_USAGE, self._usage.rows(now, cpus)),
            (CPU_LOAD, self._load.rows(now, {"": totals})),
        ]
