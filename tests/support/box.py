"""The dsprobe command, run where /run/dsprobe is the test's own.

A mount namespace with a fresh tmpfs there: the usual socket can be used, and an agent that runs on
this machine, or in another test, is neither seen nor disturbed.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from dsprobe.recordings import wire
from dsprobe.recordings.connection import Connection, Refused
from dsprobe.recordings.live import LiveSession
from dsprobe.recordings.session import Status, coverage
from tests.support.wait import until

_SETUP = """set -e
mkdir -p /run/dsprobe
mount -t tmpfs -o mode=0755 none /run/dsprobe
echo ready
exec cat"""

Process = subprocess.Popen[str]


class Box:
    """Runs ``dsprobe`` verbs; :meth:`socket` is where an agent started in here listens."""

    def __init__(self, holder: Process) -> None:
        self._holder = holder

    def argv(self, *command: str) -> list[str]:
        return ["nsenter", f"--mount=/proc/{self._holder.pid}/ns/mnt", "--", *command]

    def popen(self, *words: str, **options: Any) -> Process:
        """Start ``dsprobe words``; nsenter execs it, so the PID is its own."""
        command = (sys.executable, "-m", "dsprobe.agent.commands.main", *words)
        options = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True} | options
        return subprocess.Popen(self.argv(*command), cwd="/", **options)

    def run(self, *words: str, timeout: float = 60) -> tuple[int, str, str]:
        """Exit code, stdout and stderr of ``dsprobe words``."""
        process = self.popen(*words)
        try:
            out, err = process.communicate(timeout=timeout)
        except subprocess.TimeoutExpired:
            process.kill()
            out, err = process.communicate()
            raise AssertionError(f"dsprobe {words[0]} did not end: {out}{err}") from None
        return process.returncode, out, err

    def path(self, inside: str = wire.SOCKET) -> str:
        """How we reach a path of the box."""
        return f"/proc/{self._holder.pid}/root{inside}"

    def connect(self, inside: str = wire.SOCKET) -> LiveSession:
        """A viewer, once somebody listens."""

        def attempt() -> LiveSession | None:
            with contextlib.suppress(Refused):
                return LiveSession(Connection(self.path(inside)))
            return None

        return until(attempt, "an agent listens")

    def agent(self, *words: str) -> Process:
        """``dsprobe agent words`` at the usual place."""
        return self.popen("agent", *words, stdout=subprocess.DEVNULL)

    def pids(self) -> set[int]:
        """All processes in the box but the one that holds it."""
        ours = os.stat(f"/proc/{self._holder.pid}/ns/mnt").st_ino
        found = set()
        for entry in os.listdir("/proc"):
            with contextlib.suppress(OSError):
                here = entry.isdigit() and os.stat(f"/proc/{entry}/ns/mnt").st_ino == ours
                if here and Path(f"/proc/{entry}/stat").read_text().rpartition(")")[2][1] != "Z":
                    found.add(int(entry))
        return found - {self._holder.pid}

    def commands(self) -> set[int]:
        """Those that are dsprobe commands, not their helpers, which come and go."""
        found = set()
        for pid in self.pids():
            with contextlib.suppress(OSError):
                if b"dsprobe.agent.commands" in Path(f"/proc/{pid}/cmdline").read_bytes():
                    found.add(pid)
        return found

    def clear(self) -> None:
        """Kill what still runs in the box."""
        for pid in self.pids():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        until(lambda: not self.pids(), "all have ended")


@contextlib.contextmanager
def box() -> Iterator[Box]:
    """A fresh box; what still runs in it at the end is killed."""
    holder = subprocess.Popen(
        ["unshare", "--mount", "--propagation", "private", "sh", "-c", _SETUP],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
    )  # fmt: skip
    try:
        assert holder.stdout
        assert holder.stdout.readline() == "ready\n"
        it = Box(holder)
        try:
            yield it
        finally:
            it.clear()
    finally:
        holder.kill()
        holder.communicate()


def ready(live: LiveSession, *probes: str) -> dict[tuple[str, str], Status]:
    """The coverage, once it names all ``probes``."""

    def said() -> dict[tuple[str, str], Status] | None:
        live.wait(0.05)
        found = coverage(live)
        return found if all((p, "") in found for p in probes) else None

    return until(said, f"the agent says what became of {', '.join(probes)}")


WORKS = ("attached", "shed")
"""What coverage says of a probe that works, with all its detail or, under load, with less."""


def end(process: Process, number: int = signal.SIGTERM, timeout: float = 20) -> tuple[int, str]:
    """Send a signal; exit code and stderr once it has ended."""
    process.send_signal(number)
    try:
        _, err = process.communicate(timeout=timeout)
    except subprocess.TimeoutExpired:
        process.kill()
        process.communicate()
        raise AssertionError(f"it did not end within {timeout:g} s of {number}") from None
    return process.returncode, err or ""
