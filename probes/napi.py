"""NAPI polls per network device.

Source: napi:napi_poll (include/trace/events/napi.h), aggregated in the kernel.  Polls of a CPU's
own backlog (loopback, and veth without XDP) belong to no device: they are called ``(backlog)``.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from dsprobe.probes.btf import Btf
from dsprobe.probes.maps import MappedArray
from dsprobe.probes.probe import Batch, BpfProbe, Loss, Map, Program, need_btf
from dsprobe.recordings.streams import NET_NAPI

_CELLS = 64
"""Cells per CPU; a device may lie in any of ``_PROBES`` of them."""
_PROBES = 8

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

    def collect(self, now: int) -> list[Batch]:
        cells = self._cells.snapshot()
        before, self._before = self._before, cells
        moved = np.flatnonzero(cells["polls"] != before["polls"])
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

    def losses(self) -> list[Loss]:
        lost = int(self._count.live["lost"].sum())
        n, self._lost = lost - self._lost, lost
        return (
            [Loss(NET_NAPI.name, f"polls of more than {_CELLS} devices on a CPU", n)] if n else []
        )
