"""GPUs as lines of plain text: for a pipe and for ``report``."""

from __future__ import annotations

import math

from dsprobe.recordings.gpus import Gpu, GpuProcess, Xid
from dsprobe.recordings.nvmlstreams import BENIGN
from dsprobe.tui import units

SIMULATED = "SIMULATED GPU: no number of GPUs here is a real one"
PROCESSES = 8
XIDS = 8


def gpu_lines(found: list[Gpu], errors: list[Xid]) -> list[str]:
    """A table of devices, then their processes, then the latest Xid errors; nothing where there is
    no device."""
    if not found:
        return []
    grid: list[tuple[str, ...]] = [
        ("GPU", "util", "mean", "memory", "SM clock", "power", "temp", "PCIe in", "out", "")
    ]
    grid += [_row(g) for g in found]
    wide = [max(len(row[i]) for row in grid) for i in range(len(grid[0]) - 1)]
    lines = [f"GPUs: {SIMULATED}" if any(g.simulated for g in found) else "GPUs:"]
    for first, *rest in grid:
        cells = [f"{cell:>{w}}" for cell, w in zip(rest, wide[1:], strict=False)]
        lines.append(f"  {first:<{wide[0]}} {' '.join(cells)}  {rest[-1]}".rstrip())
    for gpu in found:
        lines += [f"  {gpu.label}: {_process(p)}" for p in gpu.processes[:PROCESSES]]
        if len(gpu.processes) > PROCESSES:
            lines.append(f"  {gpu.label}: {len(gpu.processes) - PROCESSES} more processes")
    names = {g.id: g.label for g in found}
    for x in errors[-XIDS:]:
        lines.append(f"! Xid {x.xid} on {names.get(x.gpu, 'a GPU')}: {x.meaning}")
    return lines


def _row(g: Gpu) -> tuple[str, ...]:
    v = g.values
    clock = 100 * v["sm_clock"] / v["sm_clock_max"] if v["sm_clock_max"] > 0 else math.nan
    notes = [] if g.state == "ok" else [g.state.upper()]
    if g.state == "lost":
        notes.append(g.untold.partition(": ")[0])
    if g.throttle is None:
        notes += ["throttling n/a"] if g.state == "ok" and not g.parent else []
    elif slowing := [name for name in g.throttle if name not in BENIGN]:
        notes.append(f"throttled: {', '.join(slowing)}")
    for name, what in (("ecc_uncorrected", "uncorrected ECC errors"),
                       ("remapped_uncorrected", "rows remapped for errors")):  # fmt: skip
        if v[name] > 0:
            notes.append(f"{v[name]:.0f} {what}")
    return (
        f"{'  ' if g.parent else ''}{g.label} {g.name}",
        _told(v["sm"], "%"),
        _told(g.sm_mean, "%"),
        "n/a" if math.isnan(v["mem_used"]) else f"{_size(v['mem_used'])}/{_size(v['mem_total'])}",
        _told(clock, "%"),
        _told(v["power"], "W"),
        _told(v["temperature"], "C"),
        _size(v["pcie_rx"], "/s"),
        _size(v["pcie_tx"], "/s"),
        "; ".join(notes),
    )


def _process(p: GpuProcess) -> str:
    name = f"{p.comm}:{p.pid}" if p.known else f"PID {p.pid}, which is not in /proc here"
    kind = "" if p.kind == "compute" else f", {p.kind}"
    return f"{name}, memory {_size(p.mem_used)}, SM {_told(p.sm, '%')}{kind}"


def _told(value: float, unit: str) -> str:
    return f"{units.digits(value)}{unit}" if math.isfinite(value) else "n/a"


def _size(value: float, unit: str = "") -> str:
    return units.size(value) + unit if math.isfinite(value) else "n/a"
