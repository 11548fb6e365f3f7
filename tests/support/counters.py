"""What the kernel itself counts: the truth that recordings are compared with."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import numpy.typing as npt

from dsprobe.recordings.streams import VECTORS
from tests.support.netns import Namespace

Counts = npt.NDArray[np.int64]


def softirqs() -> Counts:
    """/proc/softirqs as (vector, CPU); vectors in the order of ``streams.VECTORS``.

    Columns are CPUs by number; an offline CPU keeps its column, with 0.
    """
    header, *lines = Path("/proc/softirqs").read_text().splitlines()
    cpus = [int(name.removeprefix("CPU")) for name in header.split()]
    out = np.zeros((len(VECTORS), max(cpus) + 1), np.int64)
    for line in lines:
        name, values = line.split(":")
        out[VECTORS.index(name.strip()), cpus] = np.array(values.split(), np.int64)
    return out


def tcp(ns: Namespace) -> dict[str, int]:
    """/proc/net/snmp and /proc/net/netstat of ``ns``: ``{"Tcp.RetransSegs": 3, ...}``."""
    out: dict[str, int] = {}
    for path in ("snmp", "netstat"):
        lines = ns.proc(path).splitlines()
        for names, values in zip(lines[::2], lines[1::2], strict=True):
            group, _, rest = names.partition(":")
            for name, value in zip(rest.split(), values.split()[1:], strict=True):
                out[f"{group}.{name}"] = int(value)
    return out


def sockets(ns: Namespace) -> dict[str, int]:
    """/proc/net/sockstat and sockstat6 of ``ns``: ``{"TCP.inuse": 2, "TCP6.inuse": 1, ...}``."""
    out: dict[str, int] = {}
    for path in ("sockstat", "sockstat6"):
        for line in ns.proc(path).splitlines():
            group, _, rest = line.partition(":")
            words = rest.split()
            for name, value in zip(words[::2], words[1::2], strict=True):
                out[f"{group}.{name}"] = int(value)
    return out


def device(ns: Namespace) -> dict[str, int]:
    """/proc/net/dev of ``ns`` for its veth device: ``rx_packets``, ``tx_bytes`` and so on."""
    names = ("bytes", "packets", "errors", "dropped")
    for line in ns.proc("dev").splitlines()[2:]:
        label, _, rest = line.partition(":")
        if label.strip() == ns.device:
            v = [int(x) for x in rest.split()]
            rx = {f"rx_{n}": x for n, x in zip(names, v[:4], strict=True)}
            return rx | {f"tx_{n}": x for n, x in zip(names, v[8:12], strict=True)}
    raise RuntimeError(f"{ns.device} is not in /proc/net/dev of {ns.name}")


def difference(after: dict[str, int], before: dict[str, int]) -> dict[str, int]:
    """What has been counted between two looks at the same counters."""
    return {name: value - before.get(name, 0) for name, value in after.items()}
