"""What works on this machine: one check per function, each by trying the thing itself."""

from __future__ import annotations

import grp
import os
import platform
import shutil
import sys
import time
from collections.abc import Iterator
from pathlib import Path

from dsprobe.agent import host
from dsprobe.agent.check import FAILED, LIMITED, OK, Check
from dsprobe.agent.cudachecks import cuda_checks
from dsprobe.agent.server import GROUP
from dsprobe.probes import processes, syscalls
from dsprobe.probes.btf import Btf, BtfError
from dsprobe.probes.probe import BpfProbe, Probe, Unavailable
from dsprobe.probes.registry import PROBES
from dsprobe.probes.softirq import UNSEEN, Softirq
from dsprobe.probes.tracer import Tracer
from dsprobe.recordings import wire
from dsprobe.recordings.connection import Connection, Refused

_MODULE = "dsprobe.agent.commands.main"
_SHOWN = 4
SIGHT_SECONDS = 0.5
"""How long softirqs are counted to see whether BPF programs are run for all of them."""


def all_checks(verbose: bool = False) -> Iterator[Check]:
    """Every check, in the order in which one depends on the other; ``verbose`` adds where each
    probe would sit."""
    yield _system()
    yield _python()
    yield _root()
    yield _bcc()
    yield _types()
    yield from _mounts()
    yield from _probes()
    yield from cuda_checks(verbose)
    yield _agent()
    yield _terminal()


def _system() -> Check:
    machine, release = platform.machine(), platform.release()
    detail = f"Linux {release} on {machine}, {os.cpu_count()} CPUs"
    if not syscalls.supported():
        return Check("machine", FAILED, detail, "dsprobe runs on x86_64 and aarch64")
    version = tuple(int(x) for x in release.split("-")[0].split(".")[:2] if x.isdigit())
    if version < (5, 8):
        return Check("machine", FAILED, detail, "BPF ring buffers need Linux 5.8 or later")
    return Check("machine", OK, detail)


def _python() -> Check:
    detail = f"Python {platform.python_version()} at {sys.executable}"
    return Check("python", OK, detail)


def _root() -> Check:
    if os.geteuid() != 0:
        fix = "run it with sudo; replay, demo, info and dump work without"
        return Check("root", FAILED, "not root, so nothing can be traced", fix, privilege=True)
    if not syscalls.may_trace():
        fix = "give the container CAP_BPF and CAP_PERFMON, or run dsprobe on the host"
        return Check("root", FAILED, "root without CAP_BPF and CAP_PERFMON", fix, privilege=True)
    return Check("root", OK, "root, with the capabilities to trace")


def _bcc() -> Check:
    from importlib.util import find_spec

    spec = find_spec("bcc")
    if spec is None or spec.origin is None:
        fix = "install python3-bpfcc (apt) or python3-bcc (dnf); bcc on PyPI is another project"
        return Check("bcc", FAILED, "bcc is not installed for this Python", fix)
    if not (Path(spec.origin).parent / "libbcc.py").exists():
        return Check("bcc", FAILED, f"{spec.origin} is not the BPF Compiler Collection",
                     "pip uninstall bcc, then install python3-bpfcc or python3-bcc")  # fmt: skip
    return Check("bcc", OK, f"bcc at {Path(spec.origin).parent}; no kernel headers are needed")


def _types() -> Check:
    try:
        Btf.running().offset("task_struct", "pid")
    except BtfError as e:
        fix = "use a kernel built with CONFIG_DEBUG_INFO_BTF, as distributions have since 2020"
        return Check("kernel types", LIMITED, f"no type information ({e}): only softirqs", fix)
    return Check("kernel types", OK, "/sys/kernel/btf/vmlinux")


def _mounts() -> Iterator[Check]:
    for kind, at in host.MOUNTS:
        if host.mounted(kind, at):
            yield Check(kind, OK, f"mounted at {at}")
        else:
            fix = f"the agent mounts it, or: mount -t {kind} {kind} {at}"
            yield Check(kind, LIMITED, f"not mounted at {at}", fix, privilege=os.geteuid() != 0)


def _probes() -> Iterator[Check]:
    """Load and attach each probe for a moment, exactly as the agent does."""
    made: list[Probe] = [kind() for kind in PROBES]
    bpf = [p for p in made if isinstance(p, BpfProbe)]
    if os.geteuid() == 0:
        tracer = Tracer(bpf)
        try:
            found = {c.probe: c for c in tracer.load() if not c.program}
            yield from (_sight(p) for p in tracer.probes if isinstance(p, Softirq))
        finally:
            tracer.close()
    for probe in made:
        name = f"probe {probe.name}"
        if isinstance(probe, BpfProbe):
            if os.geteuid() != 0:
                yield Check(name, LIMITED, "needs root to be tried", "run doctor with sudo",
                            privilege=True)  # fmt: skip
                continue
            c = found[probe.name]
            if c.status != "attached":
                yield Check(name, FAILED, c.reason or c.status)
            elif c.reason:
                yield Check(name, LIMITED, c.reason)
            else:
                yield Check(name, OK, probe.doc)
            continue
        try:
            probe.start()
            yield Check(name, OK, probe.doc)
        except Unavailable as e:
            yield Check(name, LIMITED, str(e))
        except (OSError, ValueError, IndexError, KeyError) as e:
            yield Check(name, FAILED, f"cannot be read: {e}")


def _sight(probe: Softirq) -> Check:
    """Whether the kernel runs programs for every softirq, by what it counts itself meanwhile."""
    time.sleep(SIGHT_SECONDS)
    probe.collect(time.monotonic_ns())
    lost = sum(x.lost for x in probe.losses() if x.reason == UNSEEN)
    if probe.unseen is None:
        return Check("softirq counts", LIMITED, "/proc/softirqs cannot be read, so nobody knows"
                     " whether BPF programs are run for every softirq")  # fmt: skip
    ran = probe.unseen.ran
    if lost:
        detail = (
            f"this kernel ran BPF programs for {ran - lost:,} of {ran:,} softirqs, as those of some"
            " sandboxes run none in PID 1; the others are counted as lost"
        )
        fix = "run dsprobe on the host of the sandbox"
        return Check("softirq counts", LIMITED, detail, fix)
    return Check("softirq counts", OK, f"BPF programs were run for all of {ran:,} softirqs")


def _agent() -> Check:
    try:
        connection = Connection(history=0, follow=False, streams=())
    except Refused as e:
        if os.path.exists(wire.SOCKET) and os.geteuid() != 0:
            fix = f"add yourself to the group: groupadd -f {GROUP}; usermod -aG {GROUP} USER"
            return Check("agent", LIMITED, str(e), fix, privilege=True)
        detail = f"none runs at {wire.SOCKET}, where top and record start one"
        return Check("agent", OK, detail + _elsewhere())
    pid = connection.hello.get("pid")
    connection.close()
    try:
        members = f"root and group {grp.getgrnam(GROUP).gr_name}"
    except KeyError:
        members = f"root alone, as there is no group {GROUP}"
    detail = f"runs with PID {pid} at {wire.SOCKET}, open to {members}"
    return Check("agent", OK, detail + _elsewhere())


def _elsewhere(proc: Path = Path("/proc")) -> str:
    """Agents that were told to listen at another place, by their command lines: viewers find them
    with --socket alone."""
    found = []
    for pid in sorted(int(entry) for entry in os.listdir(proc) if entry.isdigit()):
        try:
            with open(proc / str(pid) / "cmdline", "rb") as f:
                words = [w.decode(errors="replace") for w in f.read(65536).split(b"\0")]
        except OSError:
            continue
        path = _listens_at(words)
        if path:
            found.append(f"PID {pid} at {processes.printable(path.encode(), 256)}")
    more = f" and {len(found) - _SHOWN} more" if len(found) > _SHOWN else ""
    return f"; others run with --socket: {', '.join(found[:_SHOWN])}{more}" if found else ""


def _listens_at(words: list[str]) -> str:
    """The --socket in the command line of an agent; "" in that of anything else."""
    ours = [w == _MODULE or os.path.basename(w) == "dsprobe" for w in words]
    if True not in ours or "agent" not in words[ours.index(True) :]:
        return ""
    for word, after in zip(words, [*words[1:], ""], strict=True):
        if word == "--socket":
            return after
        if word.startswith("--socket="):
            return word.removeprefix("--socket=")
    return ""


def _terminal() -> Check:
    if not sys.stdout.isatty():
        return Check("terminal", OK, "output is not a terminal; top --once works anywhere")
    size = shutil.get_terminal_size()
    name = os.environ.get("TERM", "")
    encoding = (sys.stdout.encoding or "").lower().replace("-", "")
    detail = f"{name or 'unknown'}, {size.columns}x{size.lines}, {sys.stdout.encoding}"
    if name in ("", "dumb"):
        return Check("terminal", FAILED, detail, "set TERM, such as TERM=xterm-256color")
    if encoding != "utf8":
        return Check("terminal", LIMITED, f"{detail}: drawn in ASCII", "set LANG=C.UTF-8")
    return Check("terminal", OK, detail)
