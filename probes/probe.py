"""What a probe is: one Python file here and, if it uses BPF, one ``.bpf.c`` beside it.

:mod:`dsprobe.probes.registry` lists them all; docs/adding-a-probe.md shows how to add one.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import ClassVar

from dsprobe.probes.btf import Btf
from dsprobe.recordings.model import Rows, Stream

Batch = tuple[Stream, Rows]


class Unavailable(Exception):
    """This machine cannot give what the probe needs: the reason, in one sentence, with the fix."""


@dataclass(frozen=True)
class Loss:
    """``lost`` events or rows of ``stream`` that never became rows, and where."""

    stream: str
    reason: str
    lost: int


class Probe:
    """A source of rows.

    ``blocking`` probes read files that may hang; they are given a thread of their own, and a
    watchdog marks their lane "stalled" while the rest goes on.
    """

    name: ClassVar[str]
    doc: ClassVar[str]
    streams: ClassVar[tuple[Stream, ...]]
    blocking: ClassVar[bool] = False
    every: ClassVar[int] = 1
    """Collected at every so many ticks of the agent (250 ms)."""

    def start(self) -> None:
        """Take a first reading, so that later ones can be differences.

        Raises :class:`Unavailable`.
        """

    def collect(self, now: int) -> list[Batch]:
        """Rows since the last call; ``now`` (CLOCK_MONOTONIC ns) is the end of their interval."""
        raise NotImplementedError

    def losses(self) -> list[Loss]:
        """What was lost since the last call."""
        return []

    def close(self) -> None:
        """End threads and processes of its own."""

    @property
    def shortage(self) -> str:
        """What it cannot tell in full at the moment, and why, as coverage says it; empty where it
        tells all."""
        return ""

    @property
    def standing(self) -> tuple[str, str]:
        """Of a ``blocking`` probe that has started: a word of ``streams.STATUSES`` and the reason;
        ("", "") where it cannot say yet."""
        return ("shed", self.shortage) if self.shortage else ("attached", "")


@dataclass(frozen=True)
class Program:
    """A BPF function and where it is attached.

    ``kind`` is ``raw_tracepoint`` (``target`` names it), ``cpu_clock`` (``target`` is the period
    in ns, on every CPU), or ``uprobe`` and ``uretprobe``: those are only loaded at first, and
    attached to libraries as these are found (:class:`Uprobe`).  ``tail`` is a program that uprobe
    programs go on with, in the BPF_PROG_ARRAY ``target``, first or as in ``NAME[1]``.  Without a
    ``required`` program the probe says nothing; without another one it goes on, and coverage says
    ``otherwise``.
    """

    function: str
    kind: str
    target: str = ""
    required: bool = True
    otherwise: str = ""

    @property
    def late(self) -> bool:
        """Whether it runs in libraries, which come later."""
        return self.kind in ("uprobe", "uretprobe", "tail")


@dataclass(frozen=True)
class Uprobe:
    """BPF program ``function``, run at ``offset`` (bytes from the start of a file), or, if
    ``returns``, when a function entered there returns.  ``cookie`` is what it is told
    (``bpf_get_attach_cookie``)."""

    function: str
    offset: int
    cookie: int
    returns: bool = False


@dataclass(frozen=True)
class Map:
    """A BPF map as the compiler made it."""

    fd: int
    key_size: int
    leaf_size: int
    entries: int


class BpfProbe(Probe):
    """A probe whose rows come out of BPF maps and rings.

    Each map in ``rings`` is a ring whose records are the rows of that stream; its size is that of
    the map, and ``<map>_count`` counts what was produced and lost.
    """

    source: ClassVar[str]
    """Its C text, a file beside it.  ``#include "NAME.bpf.h"`` puts one of ours there, once."""
    programs: ClassVar[tuple[Program, ...]]
    rings: ClassVar[Mapping[str, Stream]] = {}
    requires: ClassVar[tuple[type[BpfProbe], ...]] = ()
    """Probes whose text comes before this one's, and without which it is missing."""
    module: ClassVar[str] = "host"
    """Probes of one module are compiled together and share its maps; modules are compiled at the
    same time.  A probe that requires another is in that one's."""

    def defines(self, btf: Btf | None) -> Mapping[str, int]:
        """Constants for the C source.

        Raises :class:`Unavailable`, or :class:`~dsprobe.probes.btf.BtfError`.
        """
        return {}

    def build_on(self, required: BpfProbe) -> None:
        """Take a probe that it ``requires``, which runs; called for each before :meth:`open`."""

    def open(self, maps: Mapping[str, Map]) -> None:
        """Take the maps; called once, before any program is attached."""

    def took(self, ring: str, rows: Rows) -> list[Batch]:
        """What to publish of the records that ``ring`` held: these, as they are.

        To override where records are not yet rows.
        """
        return [(self.rings[ring], rows)]


@cache
def possible_cpus() -> int:
    """One more than the highest CPU number this kernel may ever bring up.

    Source: /sys/devices/system/cpu/possible (Documentation/admin-guide/cputopology.rst).
    """
    text = Path("/sys/devices/system/cpu/possible").read_text().strip()
    return int(text.replace(",", "-").split("-")[-1]) + 1


def online_cpus() -> set[int]:
    """CPUs that run now (/sys/devices/system/cpu/online)."""
    text = Path("/sys/devices/system/cpu/online").read_text().strip()
    cpus: set[int] = set()
    for part in text.split(","):
        first, _, last = part.partition("-")
        cpus.update(range(int(first), int(last or first) + 1))
    return cpus


def need_btf(btf: Btf | None) -> Btf:
    """``btf``, or :class:`Unavailable` where the kernel has none."""
    if btf is None:
        raise Unavailable(
            "this kernel has no /sys/kernel/btf/vmlinux; one built with CONFIG_DEBUG_INFO_BTF does"
        )
    return btf
