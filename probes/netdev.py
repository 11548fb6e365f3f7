"""Packet intake per CPU, and the counters of network interfaces in every namespace.

Source: /proc/net/softnet_stat (net/core/net-procfs.c: hexadecimal; processed, dropped, squeezed
first, the CPU number in the 13th column since Linux 5.10) and /proc/PID/net/dev.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np

from dsprobe.probes import netns
from dsprobe.probes.probe import Batch, Probe, grown
from dsprobe.recordings.streams import NET_DEVICE, NET_SOFTNET

RESCAN_NS = 2_000_000_000

_COLUMNS = {
    "rx_bytes": 0, "rx_packets": 1, "rx_errors": 2, "rx_dropped": 3,
    "tx_bytes": 8, "tx_packets": 9, "tx_errors": 10, "tx_dropped": 11,
}  # fmt: skip


class Netdev(Probe):
    name = "netdev"
    doc = "packets taken in, squeezed and dropped per CPU, and interface counters"
    streams = (NET_SOFTNET, NET_DEVICE)
    blocking = True

    def __init__(self, proc: Path = Path("/proc")) -> None:
        self._proc = proc
        self._spaces: dict[int, netns.Namespace] = {}
        self._scanned = -RESCAN_NS

    def start(self) -> None:
        self._cpus = self._softnet()
        self._spaces = netns.discover()
        self._devices = self._read()

    def _softnet(self) -> dict[int, np.void]:
        out: dict[int, np.void] = {}
        for i, line in enumerate((self._proc / "net/softnet_stat").read_text().splitlines()):
            columns = [int(x, 16) for x in line.split()]
            row = np.zeros((), NET_SOFTNET.dtype)[()]
            cpu = columns[12] if len(columns) > 12 else i
            row["cpu"], row["processed"], row["dropped"], row["squeezed"] = cpu, *columns[:3]
            out[cpu] = row
        return out

    def _read(self) -> dict[tuple[int, str], np.void]:
        out: dict[tuple[int, str], np.void] = {}
        for inode, ns in self._spaces.items():
            texts = netns.read(ns, "dev")
            for line in texts[0].splitlines()[2:] if texts else ():
                name, _, values = line.partition(":")
                columns = values.split()
                row = np.zeros((), NET_DEVICE.dtype)[()]
                row["netns"], row["device"] = inode, name.strip().encode()[:16]
                for field, i in _COLUMNS.items():
                    row[field] = int(columns[i])
                out[inode, name.strip()] = row
        return out

    def collect(self, now: int) -> list[Batch]:
        if now - self._scanned >= RESCAN_NS:
            self._scanned, self._spaces = now, netns.discover()
        cpus, devices = self._softnet(), self._read()
        old_cpus, self._cpus = self._cpus, cpus
        old_devices, self._devices = self._devices, devices
        batches: list[Batch] = []
        for stream, new, old, fields in (
            (NET_SOFTNET, cpus, old_cpus, ("processed", "dropped", "squeezed")),
            (NET_DEVICE, devices, old_devices, tuple(_COLUMNS)),
        ):
            moved = [(row, old[key]) for key, row in new.items()  # type: ignore[attr-defined]
                     if key in old and row != old[key]]  # fmt: skip
            if moved:
                after, before = (np.array(side, stream.dtype) for side in zip(*moved, strict=True))
                rows = after.copy()
                rows["t"] = now
                grown(after, before, rows, *fields)
                batches.append((stream, rows))
        return batches
