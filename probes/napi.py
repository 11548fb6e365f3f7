"""NAPI polls per network device.

Source: napi:napi_poll (include/trace/events/napi.h), aggregated in the kernel.  Polls of a CPU's
own backlog (loopback, and veth without XDP) belong to no device: they are called ``(backlog)``.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import numpy.typing as npt

from dsprobe.probes.btf import Btf
from dsprobe.probes.maps import MappedArray
from dsprobe.probes.probe import Batch, BpfProbe, Loss, Map, Program, need_btf
from dsprobe.recordings.streams import NET_NAPI

_CELLS = 64
"""Cells per CPU; a device may lie in any of ``_PROBES`` of them."""
_PROBES = 8
_STALE_NS = 600_000_000_000
"""A device that has not polled for so long gives its cells back: devices of containers come and go,
and those that are gone must not take the place of those that come."""

_CELL = np.dtype(
    [("dev", "<u8"), ("net", "<u8"), ("polls", "<u8"), ("work", "<u8"), ("budget_hits", "<u8"),
     ("ifindex", "<u4"), ("netns", "<u4"), ("device", "S16")]
)  # fmt: skip
_COUNT = np.dtype([("produced", "<u8"), ("lost", "<u8"), ("pad", "<u8", (6,))])
_SUMS = ("polls", "work", "budget_hits")
_IDENTITY = ["netns", "ifindex", "device"]


class Napi(BpfProbe):
    name = "napi"
    doc = "NAPI polls, packets and exhausted budgets per network device"
    streams = (NET_NAPI,)
    source = "napi.bpf.c"
    programs = (Program("napi_poll", "raw_tracepoint", "napi_poll"),)

    def __init__(self) -> None:
        self._lost = 0

    def defines(self, btf: Btf | None) -> Mapping[str, int]:
        btf = need_btf(btf)
        return {
            "NAPI_CELLS": _CELLS,
            "NAPI_PROBES": _PROBES,
            "NAPI_DEV": btf.offset("napi_struct", "dev"),
            "NETDEV_IFINDEX": btf.offset("net_device", "ifindex"),
            "NETDEV_NAME": btf.offset("net_device", "name"),
            "NETDEV_NET": btf.offset("net_device", "nd_net.net"),
            "NET_INUM": btf.offset("net", "ns.inum"),
        }

    def open(self, maps: Mapping[str, Map]) -> None:
        self._cells = MappedArray(maps["napi_cells"], _CELL)
        self._count = MappedArray(maps["napi_count"], _COUNT)

    def start(self) -> None:
        self._before = self._cells.snapshot()
        self._moved_at = np.zeros(len(self._before), np.uint64)

    def collect(self, now: int) -> list[Batch]:
        cells = self._cells.snapshot()
        before, self._before = self._before, cells
        moved = np.flatnonzero(cells["polls"] != before["polls"])
        self._moved_at[moved] = now
        self._give_back(np.flatnonzero((cells["polls"] > 0) & (self._moved_at + _STALE_NS < now)))
        if not len(moved):
            return []
        # One row per device, over all CPUs.
        devices, of = np.unique(cells[moved][_IDENTITY], return_inverse=True)
        rows = NET_NAPI.empty(len(devices))
        rows["t"] = now
        for f in _IDENTITY:
            rows[f] = devices[f]
        rows["device"][devices["ifindex"] == 0] = b"(backlog)"
        for f in _SUMS:
            np.add.at(rows[f], of, (cells[f] - before[f])[moved].astype(rows[f].dtype))
        return [(NET_NAPI, rows)]

    def _give_back(self, stale: npt.NDArray[np.intp]) -> None:
        """Empty cells; ``polls`` last, as the program takes a cell without polls to be free."""
        for f in (*_IDENTITY, "dev", "net", "work", "budget_hits", "polls") if len(stale) else ():
            self._cells.live[f][stale] = self._before[f][stale] = np.zeros(1, _CELL[f])

    def losses(self) -> list[Loss]:
        lost = int(self._count.live["lost"].sum())
        n, self._lost = lost - self._lost, lost
        return (
            [Loss(NET_NAPI.name, f"polls of more than {_CELLS} devices on a CPU", n)] if n else []
        )
