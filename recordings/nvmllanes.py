"""The lanes of what NVML tells of devices; part of :data:`dsprobe.recordings.lanes.LANES`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt

from dsprobe.recordings.cudalanes import grouped
from dsprobe.recordings.lane import Edges, Lane, Values, events_per_second, highest, spread
from dsprobe.recordings.model import Rows
from dsprobe.recordings.nvmlstreams import LOSING

Of = Callable[[Rows], npt.NDArray[Any]]
"""A number for each row, NaN where it is not told."""

_PART = np.dtype([("t", "<u8"), ("dt", "<u8"), ("value", "<f8")])


def over_devices(
    of: Of,
    inside: Callable[[Rows, Edges], Values],
    across: Callable[[npt.NDArray[np.float64]], Values],
) -> Callable[[Rows, Edges], Values]:
    """``of`` each row, folded ``inside`` buckets for each device, then ``across`` devices.

    MIG devices are left out, as the device they are part of has all of it.  NaN where no device
    tells.
    """

    def compute(rows: Rows, edges: Edges) -> Values:
        value = np.asarray(of(rows), float)
        told = (rows["mig"] == 0) & np.isfinite(value)
        gpu, part = rows["gpu"][told].astype(np.int64), np.empty(int(told.sum()), _PART)
        part["t"], part["dt"], part["value"] = rows["t"][told], rows["dt"][told], value[told]
        found = [inside(part[i], edges) for i in grouped(gpu)]
        return across(np.array(found)) if found else np.full(len(edges) - 1, np.nan)

    return compute


def mean_of(part: Rows, edges: Edges) -> Values:
    """Mean of ``value`` over the time that rows speak for."""
    time = spread(part, np.maximum(part["dt"].astype(float), 1), edges)
    total = spread(part, part["value"] * np.maximum(part["dt"].astype(float), 1), edges)
    out: Values = np.full(len(time), np.nan)
    np.divide(total, time, out=out, where=time > 0)
    return out


def _of(field: str) -> Of:
    return lambda rows: np.asarray(rows[field])


def clock_share(rows: Rows) -> npt.NDArray[Any]:
    """SM clock as a share (%) of its maximum."""
    out = np.full(len(rows), np.nan)
    top = rows["sm_clock_max"].astype(float)
    np.divide(100.0 * rows["sm_clock"].astype(float), top, out=out, where=top > 0)
    return out


def throttled(rows: Rows) -> npt.NDArray[Any]:
    """1 where a device is slower than it should be."""
    slow = (rows["throttle"] & np.uint64(LOSING)) != 0
    return np.where(rows["throttle_known"] != 0, slow, np.nan)


def _sum(found: npt.NDArray[np.float64]) -> Values:
    """Over the devices that tell."""
    total: Values = np.nansum(found, axis=0)
    return np.where(np.isnan(found).all(axis=0), np.nan, total)


def _mean(found: npt.NDArray[np.float64]) -> Values:
    told = (~np.isnan(found)).sum(axis=0)
    out: Values = np.full(found.shape[1], np.nan)
    np.divide(np.nansum(found, axis=0), told, out=out, where=told > 0)
    return out


def _most(found: npt.NDArray[np.float64]) -> Values:
    most: Values = np.fmax.reduce(found, axis=0)
    return most


def _least(found: npt.NDArray[np.float64]) -> Values:
    least: Values = np.fmin.reduce(found, axis=0)
    return least


_DEV = ("nvml", "nvml.device")
_PEAK = highest("value")

NVML_LANES: tuple[Lane, ...] = (
    Lane(80, "nvml.sm", "GPU utilisation", "%", *_DEV, "mean", False,
         over_devices(_of("sm"), mean_of, _mean), since=4),
    Lane(81, "nvml.used", "GPU memory used", "B", *_DEV, "max", False,
         over_devices(_of("mem_used"), _PEAK, _sum), since=4),
    Lane(82, "nvml.clock", "slowest SM clock", "%", *_DEV, "mean", False,
         over_devices(clock_share, mean_of, _least), since=4),
    Lane(83, "nvml.throttled", "GPUs throttled", "", *_DEV, "max", False,
         over_devices(throttled, _PEAK, _sum), since=4),
    Lane(84, "nvml.power", "GPU power", "W", *_DEV, "mean", False,
         over_devices(_of("power"), mean_of, _sum), since=4),
    Lane(85, "nvml.temperature", "hottest GPU", "°C", *_DEV, "max", False,
         over_devices(_of("temperature"), _PEAK, _most), since=4),
    Lane(86, "nvml.pcie_rx", "PCIe to GPUs", "B/s", *_DEV, "mean", False,
         over_devices(_of("pcie_rx"), mean_of, _sum), since=4),
    Lane(87, "nvml.pcie_tx", "PCIe from GPUs", "B/s", *_DEV, "mean", False,
         over_devices(_of("pcie_tx"), mean_of, _sum), since=4),
    Lane(88, "nvml.xid", "Xid errors", "/s", "nvml", "nvml.xid", "mean", True,
         events_per_second(None), since=4),
)  # fmt: skip
"""A device may be slow for the others: of clocks the lowest share of the maximum counts, of
temperatures the highest; utilisation is the mean, the rest the sum."""
