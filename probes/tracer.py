"""Load the enabled BPF probes, attach them, read them, take them off again.

Everything hangs on file descriptors: whatever way this process ends, the kernel closes them, and
programs, maps and attachments are gone.  Nothing is pinned.
"""

from __future__ import annotations

import contextlib
import platform
import time
from collections.abc import Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np

from dsprobe.probes import attach, syscalls, units
from dsprobe.probes.attach import Libraries
from dsprobe.probes.loader import Loader, Made
from dsprobe.probes.maps import MappedArray
from dsprobe.probes.module import Loaded
from dsprobe.probes.probe import Batch, BpfProbe, Loss, Program, Uprobe, online_cpus
from dsprobe.probes.ring import Ring
from dsprobe.recordings.model import Stream

_RING_COUNT = np.dtype([("produced", "<u8"), ("lost", "<u8"), ("pad", "<u8", (6,))])


@dataclass(frozen=True)
class Coverage:
    """A change of what ``probe`` (or one ``program`` of it) can see; a word of STATUSES."""

    probe: str
    program: str
    status: str
    reason: str = ""


@dataclass
class _Attached:
    probe: BpfProbe
    programs: dict[str, int]
    links: dict[str, list[int]] = field(default_factory=dict)
    rings: dict[str, tuple[Ring, Stream, MappedArray]] = field(default_factory=dict)
    lost: dict[str, int] = field(default_factory=dict)


class Tracer:
    """The BPF probes of one agent."""

    def __init__(self, probes: Iterable[BpfProbe], multi: bool | None = None) -> None:
        self.wanted = units.in_order(list(probes))
        self.started: dict[str, int] = {}
        """When each attached probe took its first reading (CLOCK_MONOTONIC ns)."""
        self._loader = Loader(self.wanted, multi)
        self._made = Made()
        self._attached: dict[str, _Attached] = {}
        self._libraries = Libraries(multi=True)
        self._cpus = online_cpus()

    # -- loading ------------------------------------------------------------------------------

    def load(self) -> list[Coverage]:
        """Compile, load and attach; what became of each probe and program."""
        refused = _refused()
        if refused:
            return [Coverage(probe.name, "", "missing", refused) for probe in self.wanted]
        self._made = self._loader.load()
        self._libraries = Libraries(self._loader.multi)
        coverage: list[Coverage] = []
        for probe in self.wanted:
            if probe.name in self._made.missing:
                reason = self._made.missing[probe.name]
                coverage.append(Coverage(probe.name, "", "missing", reason))
            else:
                coverage += self._attach(probe, self._made.loaded[probe.name])
        return coverage

    def cancel(self) -> None:
        """End a compilation that goes on in another thread, and start none any more."""
        self._loader.cancel()

    # -- attaching ----------------------------------------------------------------------------

    def _attach(self, probe: BpfProbe, loaded: Loaded) -> list[Coverage]:
        for kind in probe.requires:
            them = [p for p in self.probes if isinstance(p, kind)]
            if not them:
                return [Coverage(probe.name, "", "missing", _needs(kind.name))]
            probe.build_on(them[0])
        fds = {p.function: loaded.programs[p.function] for p in probe.programs
               if p.function in loaded.programs}  # fmt: skip
        a = _Attached(probe, fds)
        try:
            for name, stream in probe.rings.items():
                ring = Ring(loaded.maps[name].fd, loaded.maps[name].entries, stream.dtype)
                count = MappedArray(loaded.maps[f"{name}_count"], _RING_COUNT)
                a.rings[name] = (ring, stream, count)
                a.lost[name] = 0
            probe.open(loaded.maps)
        except (OSError, ValueError, KeyError) as e:
            self._release(a)
            why = "; ".join(loaded.broken.values()) or f"its maps cannot be read: {e}"
            return [Coverage(probe.name, "", "missing", why)]
        coverage: list[Coverage] = []
        notes: list[str] = []
        for p in probe.programs:
            error = loaded.errors.get(p.function, "") or self._link(a, p)
            status = "missing" if error else "attached"
            coverage.append(Coverage(probe.name, p.function, status, error))
            if error and p.required:
                self._release(a)
                return [coverage[-1], Coverage(probe.name, "", "missing", f"{p.function}: {error}")]
            if error:
                notes.append(p.otherwise)
        probe.start()
        self.started[probe.name] = time.monotonic_ns()
        self._attached[probe.name] = a
        return [*coverage, Coverage(probe.name, "", "attached", "; ".join(notes))]

    def _link(self, a: _Attached, p: Program) -> str:
        """Attach one program; the reason where that fails."""
        try:
            a.links[p.function] = attach.attach(
                p, a.programs[p.function], self._cpus, self._made.loaded[a.probe.name].maps
            )
        except OSError as e:
            return str(e)
        return ""

    def attach_library(
        self, key: Hashable, file: int, uprobes: Sequence[Uprobe]
    ) -> list[tuple[Uprobe, str]]:
        """Put ``uprobes`` into the library open as ``file``, and so into all processes that map it
        now or later; those that could not be put there, and why.

        Entry and return probes of one function sit at the same offset: then the kernel runs the
        entry's program before it redirects the return.  ``key`` names the library to
        :meth:`detach_library`; ``file`` may be closed afterwards.
        """
        programs = {f: fd for a in self._attached.values() for f, fd in a.programs.items()
                    if f in a.links}  # fmt: skip
        return self._libraries.attach(key, file, programs, uprobes)

    def detach_library(self, key: Hashable) -> None:
        """Take out what is in a library, if anything: at once from Linux 6.6 on, else in the
        background (:mod:`dsprobe.probes.attach`)."""
        self._libraries.detach(key)

    def _release(self, a: _Attached) -> None:
        """Detach its programs, then unmap its rings."""
        self._libraries.drop(a.links)
        for links in a.links.values():
            attach.close(links)
        a.links.clear()
        for ring, _, _ in a.rings.values():
            ring.close()

    def remove(self, probe: BpfProbe, reason: str) -> list[Coverage]:
        """Take all programs of a probe off while running, and the probes that require it."""
        return self._remove(probe, "missing", reason)

    def _remove(self, probe: BpfProbe, status: str, reason: str) -> list[Coverage]:
        a = self._attached.pop(probe.name, None)
        if a is None:
            return []
        coverage = [Coverage(probe.name, "", status, reason)]
        for other in self.probes:
            if any(isinstance(probe, kind) for kind in other.requires):
                coverage += self._remove(other, status, _needs(probe.name))
        self._release(a)
        return coverage

    def detach(self, function: str, reason: str) -> list[Coverage]:
        """Take one program off while running.

        Where it was required, the others of its probe go too: half a probe's numbers would be
        wrong, not partial.
        """
        for a in self._attached.values():
            program = next((p for p in a.probe.programs if p.function == function), None)
            if program is None or function not in a.links:
                continue
            coverage = [Coverage(a.probe.name, function, "detached", reason)]
            if program.required:
                why = f"{function} was detached: {reason}"
                return coverage + self._remove(a.probe, "detached", why)
            self._libraries.drop([function])
            attach.close(a.links.pop(function))
            return [*coverage, Coverage(a.probe.name, "", "attached", program.otherwise)]
        return []

    def follow_cpus(self) -> None:
        """Sample on CPUs that have come online since the last call too."""
        online = online_cpus()
        new, self._cpus = online - self._cpus, online
        for a in self._attached.values() if new else ():
            for p in a.probe.programs:
                if p.kind == "cpu_clock" and p.function in a.links:
                    for cpu in new:
                        with contextlib.suppress(OSError):  # gone again
                            fd = syscalls.open_cpu_clock(cpu, int(p.target), a.programs[p.function])
                            a.links[p.function].append(fd)

    def rest(self, function: str) -> None:
        """Take one program off for a while, none of a library; coverage is the caller's to
        change."""
        for a in self._attached.values():
            attach.close(a.links.pop(function, ()))

    def resume(self, function: str) -> bool:
        """Put a program that rests back on; whether it is on now."""
        for a in self._attached.values():
            for program in a.probe.programs:
                if program.function == function and function in a.programs:
                    return function in a.links or not self._link(a, program)
        return False

    # -- reading ------------------------------------------------------------------------------

    @property
    def probes(self) -> list[BpfProbe]:
        """Those that are attached."""
        return [a.probe for a in self._attached.values()]

    def drain(self) -> Iterator[Batch]:
        """What the rings hold now."""
        # The last ring first: what probes announce in theirs is then here before others, which
        # require them, name it in those that come later.
        held = [(a.probe, name, ring.drain())
                for a in reversed(self._attached.values())
                for name, (ring, _, _) in reversed(a.rings.items())]  # fmt: skip
        for probe, name, rows in reversed(held):
            if len(rows):
                yield from probe.took(name, rows)

    def losses(self) -> Iterator[Loss]:
        """Ring events lost since the last call."""
        for a in self._attached.values():
            for name, (_, stream, count) in a.rings.items():
                total = int(count.live["lost"].sum())
                if total != a.lost[name]:
                    yield Loss(stream.name, "ring buffer full", total - a.lost[name])
                    a.lost[name] = total

    def produced(self, ring: str) -> int:
        """Events counted for a ring so far, reserved or not."""
        for a in self._attached.values():
            if ring in a.rings:
                return int(a.rings[ring][2].live["produced"].sum())
        raise KeyError(ring)

    def costs(self) -> dict[str, syscalls.ProgramInfo]:
        """Run time and counts of each attached program, as far as the kernel has counted them."""
        return {
            name: syscalls.program_info(fd)
            for a in self._attached.values()
            for name, fd in a.programs.items()
            if name in a.links
        }

    # -- the end ------------------------------------------------------------------------------

    def close(self) -> None:
        """Detach everything and let the kernel free it."""
        self._libraries.close()
        for a in self._attached.values():
            self._release(a)
        self._attached.clear()
        self._made.close()
        for probe in self.probes:
            probe.close()


def _needs(name: str) -> str:
    return f"it needs the probe {name}, which does not run"


def _refused() -> str:
    """Why no program can be loaded at all; empty where that is not known beforehand."""
    if not syscalls.supported():
        return f"dsprobe runs on x86_64 and aarch64, not on {platform.machine()}"
    if not syscalls.may_trace():
        return (
            "this process may not load BPF programs; give its container CAP_BPF and CAP_PERFMON,"
            " or run dsprobe on the host"
        )
    return ""
