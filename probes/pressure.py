"""Pressure stall information: time in which tasks stood still for want of CPU, memory or I/O.

Source: /proc/pressure (Documentation/accounting/psi.rst), Linux 4.20 with CONFIG_PSI.
"""

from __future__ import annotations

from pathlib import Path

from dsprobe.probes.probe import Batch, Probe, Unavailable
from dsprobe.recordings.streams import CPU_PRESSURE, PRESSURE


class Pressure(Probe):
    name = "pressure"
    doc = "time lost to CPU, memory and I/O pressure (PSI)"
    streams = (CPU_PRESSURE,)
    every = 4

    def __init__(self, proc: Path = Path("/proc")) -> None:
        self._dir = proc / "pressure"

    def start(self) -> None:
        self._before = self._read()
        if not self._before:
            raise Unavailable(
                "this kernel keeps no /proc/pressure; boot with psi=1 where it was built with PSI"
            )

    def _read(self) -> dict[str, tuple[int, int]]:
        """(some, full) in microseconds by resource; those the kernel does not keep are absent."""
        out: dict[str, tuple[int, int]] = {}
        for resource in PRESSURE:
            try:
                lines = (self._dir / resource).read_text().splitlines()
            except OSError:  # absent, or EOPNOTSUPP where PSI is compiled in but off
                continue
            total = {line.split()[0]: int(line.rpartition("total=")[2]) for line in lines}
            out[resource] = (total.get("some", 0), total.get("full", 0))
        return out

    def collect(self, now: int) -> list[Batch]:
        after = self._read()
        before, self._before = self._before, after
        names = [r for r in after if r in before]
        if not names:
            return []
        some, full = ([max(after[r][i] - before[r][i], 0) * 1000 for r in names] for i in (0, 1))
        resource = [PRESSURE.index(r) for r in names]
        return [
            (
                CPU_PRESSURE,
                CPU_PRESSURE.rows(t=[now] * len(names), resource=resource, some=some, full=full),
            )
        ]
