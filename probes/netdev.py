"""Packet intake per CPU, and the counters of network interfaces in every namespace.

Source: /proc/net/softnet_stat (net/core/net-procfs.c: hexadecimal; processed, dropped, squeezed
first, the CPU number in the 13th column since Linux 5.10) and /proc/PID/net/dev.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator
from pathlib import Path

from dsprobe.probes import netns
from dsprobe.probes.growth import Growth, Reading
from dsprobe.probes.probe import Batch, Probe
from dsprobe.recordings.streams import NET_DEVICE, NET_SOFTNET

_SOFTNET = ("processed", "dropped", "squeezed")

_COLUMNS = {
    "rx_bytes": 0, "rx_packets": 1, "rx_errors": 2, "rx_dropped": 3,
    "tx_bytes": 8, "tx_packets": 9, "tx_errors": 10, "tx_dropped": 11,
}  # fmt: skip


def devices(dev: str) -> Iterator[tuple[bytes, dict[str, int]]]:
    """Name and counters of each interface in the text of /proc/net/dev.

    Only a new line ends a line: a name may hold any byte but space, colon and slash
    (net/core/dev.c, dev_valid_name), so also what str.splitlines takes for the end of one.
    """
    for line in dev.split("\n")[2:]:
        name, colon, values = line.partition(":")
        if colon:
            columns = [int(v) for v in values.split()]
            device = name.lstrip(" ").encode(errors="surrogateescape")
            yield device, {f: columns[i] for f, i in _COLUMNS.items()}


class Netdev(Probe):
    name = "netdev"
    doc = "packets taken in, squeezed and dropped per CPU, and interface counters"
    streams = (NET_SOFTNET, NET_DEVICE)
    blocking = True
    every = 4

    def __init__(self, proc: Path = Path("/proc")) -> None:
        self._proc = proc
        self._spaces: dict[int, netns.Namespace] = {}
        self._scanned = -netns.RESCAN_NS
        self._cpus = Growth(NET_SOFTNET, *_SOFTNET)
        self._devices = Growth(NET_DEVICE, *_COLUMNS)

    def start(self) -> None:
        self._spaces = netns.discover()
        self._cpus.start(self._read_softnet())
        self._devices.start(self._read_devices())

    def _read_softnet(self) -> dict[Hashable, Reading]:
        out: dict[Hashable, Reading] = {}
        for i, line in enumerate((self._proc / "net/softnet_stat").read_text().splitlines()):
            columns = [int(x, 16) for x in line.split()]
            cpu = columns[12] if len(columns) > 12 else i
            out[cpu] = {"cpu": cpu, **dict(zip(_SOFTNET, columns, strict=False))}
        return out

    def _read_devices(self) -> dict[Hashable, Reading]:
        out: dict[Hashable, Reading] = {}
        for inode, ns in self._spaces.items():
            texts = netns.read(ns, "dev")
            for name, counters in devices(texts[0]) if texts else ():
                out[inode, name] = {"netns": inode, "device": name, **counters}
        return out

    def collect(self, now: int) -> list[Batch]:
        if now - self._scanned >= netns.RESCAN_NS:
            self._scanned, self._spaces = now, netns.discover()
        return [
            (NET_SOFTNET, self._cpus.rows(now, self._read_softnet(), idle=False)),
            (NET_DEVICE, self._devices.rows(now, self._read_devices(), idle=False)),
        ]
