"""GPUs of a session as NVML told of them: what they are, how they stand, who is on them."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from dsprobe.recordings.assemble import fits
from dsprobe.recordings.model import Rows, Stream
from dsprobe.recordings.nvmlstreams import (
    GPU_STATES,
    LOSING,
    META_GPU,
    NVML_DEVICE,
    NVML_PROCESS,
    NVML_XID,
    PROCESS_KINDS,
    THROTTLE_REASONS,
)
from dsprobe.recordings.references import last_of_ids
from dsprobe.recordings.session import FOREVER, Session

FRESH = 3_000_000_000
"""What a row says of a device holds so long (ns) without another: they come once a second."""
MAX_GPUS = 256
VALUES = tuple(f.name for f in NVML_DEVICE.fields if f.type.startswith("<f"))


@dataclass(frozen=True)
class GpuProcess:
    """As in ``nvml.process``; numbers that are not told are NaN.  ``known`` is whether /proc had
    that PID."""

    pid: int
    comm: str
    known: bool
    kind: str
    mem_used: float
    sm: float


@dataclass(frozen=True)
class Xid:
    """An Xid error at ``t``."""

    t: int
    gpu: int
    xid: int
    meaning: str


@dataclass(frozen=True)
class Gpu:
    """A device or MIG device (which has a ``parent``'s UUID); ``values`` has the fields of
    ``nvml.device`` at the end of the time, NaN where they are not told.

    ``throttle`` names the reasons for low clocks, None where they are not told; ``slowed`` is the
    share of the time in which a reason other than idleness or somebody's choice held, ``sm_mean``
    the mean utilisation (%), both NaN where nobody knows.
    """

    id: int
    index: int
    name: str
    uuid: str
    pci: str
    parent: str
    driver: str
    simulated: bool
    state: str
    untold: str
    values: dict[str, float]
    throttle: tuple[str, ...] | None
    slowed: float
    sm_mean: float
    processes: tuple[GpuProcess, ...]

    @property
    def label(self) -> str:
        """``GPU 0``; of a MIG device ``MIG 1``, within the device listed before it."""
        return f"{'MIG' if self.parent else 'GPU'} {self.index}"


def gpus(session: Session, start: int, end: int) -> list[Gpu]:
    """What is known at ``end``, each device with its MIG devices behind it; means are over
    (start, end].  Devices that were gone before ``start`` are left out."""
    told = last_of_ids(META_GPU, _read(session, META_GPU, 0, end))[:MAX_GPUS]
    rows = _read(session, NVML_DEVICE, start, end)
    listed = _read(session, NVML_PROCESS, max(start, end - FRESH), end)
    found = []
    for row in told:
        mine = rows[rows["gpu"] == row["id"]]
        if _state(row) != "gone" or len(mine):
            found.append(_gpu(row, mine, listed[listed["gpu"] == row["id"]], end))
    order = {g.uuid: g.index for g in found if not g.parent}
    return sorted(found, key=lambda g: (order.get(g.parent or g.uuid, math.inf), g.parent != "",
                                        g.index))  # fmt: skip


def xids(session: Session, start: int, end: int) -> list[Xid]:
    """Xid errors within (start, end], in order."""
    rows = _read(session, NVML_XID, start, end)
    return [Xid(int(r["t"]), int(r["gpu"]), int(r["xid"]), str(r["meaning"])) for r in rows]


def simulated(session: Session) -> bool:
    """Whether any device of ``session`` is a stand-in."""
    return bool(_read(session, META_GPU, 0, FOREVER - 1)["simulated"].any())


def plain(found: list[Gpu], errors: list[Xid]) -> dict[str, Any]:
    """As values for JSON, with None for what is not told."""
    return {"gpus": [_plain(asdict(g)) for g in found], "xids": [asdict(x) for x in errors]}


def _read(session: Session, stream: Stream, start: int, end: int) -> Rows:
    rows = session.read(stream.name, start + 1 if start else 0, end + 1)
    return rows if fits(stream, rows) else stream.empty()


def _state(row: Any) -> str:
    code = int(row["state"])
    return GPU_STATES[code] if code < len(GPU_STATES) else f"state {code}"


def _gpu(row: Any, rows: Rows, listed: Rows, end: int) -> Gpu:
    last = rows[-1:] if len(rows) and int(rows["t"][-1]) + FRESH >= end else rows[:0]
    if _state(row) != "ok":
        last = rows[:0]
    values = {name: float(last[name][0]) if len(last) else math.nan for name in VALUES}
    bits = int(last["throttle"][0]) if len(last) and last["throttle_known"][0] else None
    return Gpu(
        id=int(row["id"]),
        index=int(row["index"]),
        name=str(row["name"]),
        uuid=str(row["uuid"]),
        pci=str(row["pci"]),
        parent=str(row["parent"]),
        driver=str(row["driver"]),
        simulated=bool(row["simulated"]),
        state=_state(row),
        untold=str(row["untold"]),
        values=values,
        throttle=None if bits is None else reasons(bits),
        slowed=_mean(
            rows,
            np.where(
                rows["throttle_known"] != 0, (rows["throttle"] & np.uint64(LOSING)) != 0, np.nan
            ),
        ),
        sm_mean=_mean(rows, rows["sm"]),
        processes=_processes(listed),
    )


def reasons(bits: int) -> tuple[str, ...]:
    """Names of the bits of ``nvml.device.throttle``."""
    known = tuple(name for i, name in enumerate(THROTTLE_REASONS) if bits >> i & 1)
    rest = bits >> len(THROTTLE_REASONS) << len(THROTTLE_REASONS)
    return (*known, f"{rest:#x}") if rest else known


def _mean(rows: Rows, values: Any) -> float:
    """Over the time that rows speak for."""
    values, dt = np.asarray(values, float), rows["dt"].astype(float)
    told = np.isfinite(values) & (dt > 0)
    return float(np.average(values[told], weights=dt[told])) if told.any() else math.nan


def _processes(listed: Rows) -> tuple[GpuProcess, ...]:
    """Of the last reading: all rows of one have the same ``t``."""
    latest = listed[listed["t"] == listed["t"][-1]] if len(listed) else listed
    found = [
        GpuProcess(
            pid=int(r["pid"]),
            comm=bytes(r["comm"]).decode(errors="replace"),
            known=bool(r["known"]),
            kind=PROCESS_KINDS[r["kind"]] if r["kind"] < len(PROCESS_KINDS) else "?",
            mem_used=float(r["mem_used"]),
            sm=float(r["sm"]),
        )
        for r in latest
    ]
    return tuple(sorted(found, key=lambda p: -np.nan_to_num(p.mem_used)))


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {k: _plain(v) for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(v) for v in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
