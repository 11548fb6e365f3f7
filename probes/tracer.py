"""Load the enabled BPF probes as one module, attach them, read them, take them off again.

Everything hangs on file descriptors: whatever way this process ends, the kernel closes them, and
programs, maps and attachments are gone.  Nothing is pinned.
"""

from __future__ import annotations

import contextlib
import errno
import os
import platform
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from dsprobe.probes import compiler, syscalls
from dsprobe.probes.btf import Btf, BtfError
from dsprobe.probes.maps import MappedArray
from dsprobe.probes.probe import (
    Batch,
    BpfProbe,
    Loss,
    Map,
    Program,
    Unavailable,
    online_cpus,
    possible_cpus,
)  # fmt: skip
from dsprobe.probes.ring import Ring
from dsprobe.recordings.model import Stream

HERE = Path(__file__).resolve().parent
COMPILE_SECONDS = 60.0

_C_TYPES = {"<u8": "u64", "<u4": "u32", "<u2": "u16", "u1": "u8",
            "<i8": "s64", "<i4": "s32", "<i2": "s16", "i1": "s8"}  # fmt: skip
_RING_COUNT = np.dtype([("produced", "<u8"), ("lost", "<u8"), ("pad", "<u8", (6,))])


@dataclass(frozen=True)
class Coverage:
    """A change of what ``probe`` (or one ``program`` of it) can see; a word of STATUSES."""

    probe: str
    program: str
    status: str
    reason: str = ""


def c_struct(name: str, stream: Stream) -> str:
    """The C structure of one row of ``stream``, byte for byte its dtype."""
    lines = []
    for f in stream.fields:
        if f.type.startswith("S"):
            lines.append(f"char {f.name}[{f.type[1:]}];")
        else:
            lines.append(f"{_C_TYPES[f.type]} {f.name}{f'[{f.shape}]' if f.shape else ''};")
    body = "\n\t".join(lines)
    size = stream.dtype.itemsize
    return (
        f"struct {name} {{\n\t{body}\n}} __attribute__((packed));\n"
        f'_Static_assert(sizeof(struct {name}) == {size}, "{stream.name}");\n'
    )


@dataclass
class _Attached:
    probe: BpfProbe
    programs: dict[str, int]
    links: dict[str, list[int]] = field(default_factory=dict)
    rings: dict[str, tuple[Ring, Stream, MappedArray]] = field(default_factory=dict)
    lost: dict[str, int] = field(default_factory=dict)


class _Compiling:
    """The process that compiles.  :meth:`cancel` may be called from another thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._child: subprocess.Popen[bytes] | None = None
        self._cancelled = False
        self.ended = ""
        """How it ended, where that was not well."""

    def start(self, sock: socket.socket) -> None:
        with self._lock:
            if self._cancelled:
                raise EOFError("told to end")
            isolated = ["-I"] if sys.flags.isolated else []
            self._child = subprocess.Popen(
                [sys.executable, *isolated, "-m", "dsprobe.probes.compiler", str(sock.fileno())],
                pass_fds=[sock.fileno()],
                stdin=subprocess.DEVNULL,
                cwd="/",  # -m puts the working directory, which may be anybody's, in front
            )

    def end(self) -> None:
        with self._lock:
            child = self._child
            if child is None:
                return
            with contextlib.suppress(subprocess.TimeoutExpired):
                child.wait(0.2)  # one that has hung up is about to end
            code = child.returncode
            if code:
                how = f"was killed by signal {-code}" if code < 0 else f"ended with code {code}"
                self.ended = f"the compiler {how}"
            child.kill()
            child.wait()

    def cancel(self) -> None:
        with self._lock:
            self._cancelled = True
            if self._child:
                self._child.kill()


class Tracer:
    """The BPF probes of one agent."""

    def __init__(self, probes: Iterable[BpfProbe]) -> None:
        self.wanted = list(probes)
        self.started: dict[str, int] = {}
        """When each attached probe took its first reading (CLOCK_MONOTONIC ns)."""
        self._attached: dict[str, _Attached] = {}
        self._fds: list[int] = []
        self._cpus = online_cpus()
        self._compiling = _Compiling()

    # -- loading ------------------------------------------------------------------------------

    def load(self) -> list[Coverage]:
        """Compile, load and attach; what became of each probe and program.  Takes about 0.6 s."""
        refused = _refused()
        if refused:
            return [Coverage(probe.name, "", "missing", refused) for probe in self.wanted]
        btf: Btf | None
        try:
            btf = Btf.running()
        except BtfError:
            btf = None
        coverage: list[Coverage] = []
        units = []
        for probe in self.wanted:
            try:
                units.append(self._unit(probe, btf))
            except (Unavailable, BtfError) as e:
                coverage.append(Coverage(probe.name, "", "missing", str(e)))
        if not units:
            return coverage
        try:
            result = self._compile(units)
        except (OSError, EOFError, LookupError, TypeError, ValueError) as e:
            reason = f"BPF programs could not be compiled: {self._compiling.ended or e}"
            return coverage + [Coverage(str(u["probe"]), "", "missing", reason) for u in units]
        maps = {name: Map(m["fd"], m["key_size"], m["leaf_size"], m["entries"])
                for name, m in result["maps"].items()}  # fmt: skip
        self._fds += [m.fd for m in maps.values()]
        self._fds += [p["fd"] for p in result["programs"].values() if "fd" in p]
        for probe in self.wanted:
            if probe.name in result["errors"]:
                reason = result["errors"][probe.name]
                coverage.append(Coverage(probe.name, "", "missing", reason))
            elif any(u["probe"] == probe.name for u in units):
                coverage += self._attach(probe, result["programs"], maps)
        return coverage

    def _unit(self, probe: BpfProbe, btf: Btf | None) -> dict[str, object]:
        defines = dict(probe.defines(btf))
        text = "".join(f"#define {k} {v}\n" for k, v in defines.items())
        text += "".join(c_struct(name, stream) for name, stream in probe.rings.items())
        text += (HERE / probe.source).read_text()
        programs = [[p.function, p.kind] for p in probe.programs]
        return {"probe": probe.name, "text": text, "programs": programs}

    def _compile(self, units: list[dict[str, object]]) -> dict[str, Any]:
        version = [int(x) for x in platform.release().split("-")[0].split(".")[:3] if x.isdigit()]
        major, minor, patch = (*version, 0, 0, 0)[:3]
        code = (major << 16) + (minor << 8) + min(patch, 255)
        job = {
            "common": (HERE / "common.bpf.h").read_text(),
            "cflags": [f"-DNCPU={possible_cpus()}", f"-DLINUX_VERSION_CODE={code}", "-w"],
            "units": units,
        }
        ours, theirs = socket.socketpair()
        with ours:
            try:
                with theirs:
                    self._compiling.start(theirs)
                ours.settimeout(COMPILE_SECONDS)
                compiler.send_job(ours, job)
                return compiler.receive_result(ours)
            except TimeoutError:
                raise TimeoutError(f"it took longer than {COMPILE_SECONDS:g} s") from None
            finally:
                self._compiling.end()

    def cancel(self) -> None:
        """End a compilation that goes on in another thread, and start none any more."""
        self._compiling.cancel()

    # -- attaching ----------------------------------------------------------------------------

    def _attach(
        self, probe: BpfProbe, loaded: dict[str, dict[str, Any]], maps: dict[str, Map]
    ) -> list[Coverage]:
        fds = {p.function: loaded[p.function]["fd"] for p in probe.programs
               if "fd" in loaded[p.function]}  # fmt: skip
        a = _Attached(probe, fds)
        try:
            for name, stream in probe.rings.items():
                ring = Ring(maps[name].fd, maps[name].entries, stream.dtype)
                a.rings[name] = (ring, stream, MappedArray(maps[f"{name}_count"], _RING_COUNT))
                a.lost[name] = 0
            probe.open(maps)
        except (OSError, ValueError, KeyError) as e:
            self._release(a)
            return [Coverage(probe.name, "", "missing", f"its maps cannot be read: {e}")]
        coverage: list[Coverage] = []
        notes: list[str] = []
        for p in probe.programs:
            error = str(loaded[p.function].get("error", "")) or self._link(a, p)
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
        fd, links = a.programs[p.function], a.links.setdefault(p.function, [])
        try:
            if p.kind == "raw_tracepoint":
                links.append(syscalls.open_raw_tracepoint(p.target, fd))
            else:
                for cpu in self._cpus:
                    links.append(syscalls.open_cpu_clock(cpu, int(p.target), fd))
        except OSError as e:
            for link in a.links.pop(p.function):
                os.close(link)
            if e.errno == errno.ENOENT:
                return f"this kernel has no tracepoint {p.target}"
            return f"cannot be attached: {e.strerror}"
        return ""

    def _release(self, a: _Attached) -> None:
        """Detach its programs, then unmap its rings."""
        for links in a.links.values():
            for fd in links:
                os.close(fd)
        a.links.clear()
        for ring, _, _ in a.rings.values():
            ring.close()

    def remove(self, probe: BpfProbe, reason: str) -> list[Coverage]:
        """Take all programs of a probe off while running."""
        a = self._attached.pop(probe.name, None)
        if a is None:
            return []
        self._release(a)
        return [Coverage(probe.name, "", "missing", reason)]

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
                del self._attached[a.probe.name]
                self._release(a)
                coverage.append(
                    Coverage(a.probe.name, "", "detached", f"{function} was detached: {reason}")
                )
            else:
                for fd in a.links.pop(function):
                    os.close(fd)
                coverage.append(Coverage(a.probe.name, "", "attached", program.otherwise))
            return coverage
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
        """Take one program off for a while; coverage is the caller's to change."""
        for a in self._attached.values():
            for fd in a.links.pop(function, ()):
                os.close(fd)

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
        for a in self._attached.values():
            for ring, stream, _ in a.rings.values():
                rows = ring.drain()
                if len(rows):
                    yield stream, rows

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
        for a in self._attached.values():
            self._release(a)
        self._attached.clear()
        for fd in self._fds:
            with contextlib.suppress(OSError):
                os.close(fd)
        self._fds.clear()


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
