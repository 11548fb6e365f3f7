"""NAPI polls per network device.

Source: napi:napi_poll (include/trace/events/napi.h), aggregated in the kernel.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from dsprobe.probes.btf import Btf
from dsprobe.probes.maps import MappedArray
from dsprobe.probes.probe import Batch, BpfProbe, Loss, Map, Program, need_btf, possible_cpus
from dsprobe.probes.syscalls import map_entries
from dsprobe.recordings.streams import NET_NAPI

_KEY = np.dtype([("dev", "<u8"), ("net", "<u8"), ("ifindex", "<u8")])
_CELL = np.dtype(
    [("polls", "<u8"), ("work", "<u8"), ("budget_hits", "<u8"), ("netns", "<u4"),
     ("ifindex", "<u4"), ("device", "S16")]
)  # fmt: skip
_COUNT = np.dtype([("produced", "<u8"), ("lost", "<u8"), ("pad", "<u8", (6,))])
_SUMS = ("polls", "work", "budget_hits")


class Napi(BpfProbe):
    name = "napi"
    doc = "NAPI polls, packets and exhausted budgets per network device"
    streams = (NET_NAPI,)
    source = "napi.bpf.c"
    programs = (Program("napi_poll", "raw_tracepoint", "napi_poll"),)

    def __init__(self) -> None:
        self._before: dict[bytes, np.void] = {}
        self._lost = 0

    def defines(self, btf: Btf | None) -> Mapping[str, int]:
        btf = need_btf(btf)
        return {
            "NAPI_DEV": btf.offset("napi_struct", "dev"),
            "NETDEV_IFINDEX": btf.offset("net_device", "ifindex"),
            "NETDEV_NAME": btf.offset("net_device", "name"),
            "NETDEV_NET": btf.offset("net_device", "nd_net.net"),
            "NET_INUM": btf.offset("net", "ns.inum"),
        }

    def open(self, maps: Mapping[str, Map]) -> None:
        self._map = maps["napi_cells"]
        self._full = MappedArray(maps["napi_lost"], _COUNT)

    def start(self) -> None:
        self._before = self._read()

    def _read(self) -> dict[bytes, np.void]:
        keys, cells = map_entries(
            self._map.fd, _KEY, _CELL, self._map.entries, copies=possible_cpus()
        )
        total = cells[:, 0].copy()
        # Only the CPU that first polled a device filled in its name.
        named = cells["ifindex"].argmax(axis=1)
        for f in ("netns", "ifindex", "device"):
            total[f] = cells[f][np.arange(len(cells)), named]
        for f in _SUMS:
            total[f] = cells[f].sum(axis=1)
        return {key.tobytes(): cell for key, cell in zip(keys, total, strict=True)}

    def collect(self, now: int) -> list[Batch]:
        cells = self._read()
        before, self._before = self._before, cells
        zero = np.zeros((), _CELL)[()]
        moved = [
            (cell, before.get(key, zero))
            for key, cell in cells.items()
            if key not in before or cell["polls"] != before[key]["polls"]
        ]
        if not moved:
            return []
        new, old = (np.array(side, _CELL) for side in zip(*moved, strict=True))
        rows = NET_NAPI.empty(len(new))
        rows["t"] = now
        for f in ("netns", "ifindex", "device"):
            rows[f] = new[f]
        rows["device"][new["ifindex"] == 0] = b"(backlog)"
        for f in _SUMS:
            rows[f] = new[f] - old[f]
        return [(NET_NAPI, rows)]

    def losses(self) -> list[Loss]:
        lost = int(self._full.live["lost"].sum())
        n, self._lost = lost - self._lost, lost
        return [Loss(NET_NAPI.name, "more than 1024 devices polled", n)] if n else []
