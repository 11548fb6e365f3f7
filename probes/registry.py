"""All probes, in the order they are listed to users."""

from __future__ import annotations

from collections.abc import Sequence

from dsprobe.probes.calls import Calls
from dsprobe.probes.cpu import Cpu
from dsprobe.probes.cuda import Cuda
from dsprobe.probes.launches import Launches
from dsprobe.probes.memory import Memory
from dsprobe.probes.napi import Napi
from dsprobe.probes.netdev import Netdev
from dsprobe.probes.nvml import Nvml
from dsprobe.probes.pressure import Pressure
from dsprobe.probes.probe import BpfProbe, Probe
from dsprobe.probes.runq import Runq
from dsprobe.probes.sockets import Sockets
from dsprobe.probes.softirq import Softirq
from dsprobe.probes.tcp import Tcp

PROBES: tuple[type[Probe], ...] = (
    Softirq, Napi, Netdev, Tcp, Sockets, Cpu, Runq, Pressure, Cuda, Memory, Launches, Calls,
    Nvml,
)  # fmt: skip


def select(names: Sequence[str] | None) -> list[Probe]:
    """The probes called ``names`` and those that they require, or all.

    Raises ValueError, in a sentence that lists them, for a name that is none.
    """
    known = {p.name: p for p in PROBES}
    wanted = list(known) if names is None else names
    unknown = [n for n in wanted if n not in known]
    if unknown or not wanted:
        raise ValueError(
            f"there is no probe {', '.join(unknown) or 'named'}; the probes are {', '.join(known)}"
        )
    kinds: dict[type[Probe], None] = {}
    for name in wanted:
        kinds |= dict.fromkeys(_needed(known[name]))
    return [kind() for kind in kinds]


def _needed(kind: type[Probe]) -> list[type[Probe]]:
    """``kind``, after what it requires."""
    requires = kind.requires if issubclass(kind, BpfProbe) else ()
    return [*(k for r in requires for k in _needed(r)), kind]
