"""dsprobe and its peers as programs that can be started, waited for and stopped."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from benchlib.machine import cpu
from benchlib.model import Context
from benchlib.processes import attachments, family
from tests.support.wait import until

_PROBES = Path(__file__).resolve().parents[2] / "probes"

_BPFTRACE = """
tracepoint:irq:softirq_entry { @start[cpu, args->vec] = nsecs; }
tracepoint:irq:softirq_exit /@start[cpu, args->vec]/ {
    @dist[args->vec] = hist(nsecs - @start[cpu, args->vec]);
    delete(@start[cpu, args->vec]);
}
interval:s:1 { print(@dist); clear(@dist); }
"""


@dataclass(frozen=True)
class Tracer:
    """``argv`` runs until SIGINT.  ``package`` is the Debian package it comes in."""

    name: str
    argv: tuple[str, ...]
    package: str = ""
    env: Mapping[str, str] = field(default_factory=dict)

    def missing(self) -> bool:
        return shutil.which(self.argv[0]) is None


PEERS = (
    Tracer("libbpf-tools softirqs -d", ("/usr/sbin/softirqs", "-d", "1"), "libbpf-tools"),
    Tracer("bpftrace histogram", ("bpftrace", "-e", _BPFTRACE), "bpftrace"),
    # Our header tree stands in for the kernel headers that bcc's tools want.
    Tracer("bcc softirqs -d", ("softirqs-bpfcc", "-d", "1"), "bpfcc-tools",
           {"BCC_KERNEL_SOURCE": str(_PROBES)}),
)  # fmt: skip
"""Each gives a histogram of run times per vector once a second, from the same two tracepoints."""


def dsprobe(ctx: Context, name: str, probes: Iterable[str]) -> Tracer:
    """``dsprobe record`` into a scratch file.  Named probes give it an agent of its own."""
    out = str(ctx.folder / "recording.mcap")
    argv = (ctx.dsprobe, "record", "--force", "-o", out, "--probes", ",".join(probes))
    return Tracer(name, argv)


@contextmanager
def running(tracer: Tracer, place: int = 1, keep: Path | None = None) -> Iterator[int]:
    """Start ``tracer`` on a CPU of its own, wait until it is attached; its PID.

    ``keep`` takes what it prints.
    """
    with open(keep or os.devnull, "w") as sink:
        process = subprocess.Popen(
            ["taskset", "-c", str(cpu(place)), *tracer.argv],
            stdin=subprocess.DEVNULL, stdout=sink, stderr=subprocess.PIPE, text=True,
            env=os.environ | dict(tracer.env), start_new_session=True,
        )  # fmt: skip
        try:
            _attached(process, tracer.name)
            yield process.pid
        finally:
            _stop(process)


def _attached(process: subprocess.Popen[str], name: str) -> None:
    """Wait until the process holds BPF attachments, and has stopped adding to them."""
    seen, since = 0, time.monotonic()

    def settled() -> bool:
        nonlocal seen, since
        if process.poll() is not None:
            said = process.stderr.read().strip().splitlines() if process.stderr else []
            raise RuntimeError(f"{name} ended at once: {said[-1] if said else 'in silence'}")
        n = attachments(process.pid)
        if n != seen:
            seen, since = n, time.monotonic()
        return n > 0 and time.monotonic() - since > 0.5

    until(settled, f"{name} has attached", 60)


def _stop(process: subprocess.Popen[str]) -> None:
    """Ask it to end and wait for its whole family, so that nothing of it stays attached."""
    members = family(process.pid)
    for sig in (signal.SIGINT, signal.SIGTERM, signal.SIGKILL):
        try:
            os.killpg(process.pid, sig)
            process.wait(10)
            break
        except ProcessLookupError:
            break
        except subprocess.TimeoutExpired:
            continue
    if process.stderr:
        process.stderr.close()
    until(lambda: not any(Path(f"/proc/{pid}").exists() for pid in members), "all of it ends", 30)
