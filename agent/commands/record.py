"""``dsprobe record``: into a file, without a screen."""

from __future__ import annotations

import argparse
import math
import os
import pwd
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from typing import Any

from dsprobe.agent.commands import agents
from dsprobe.agent.commands.capture import Capture
from dsprobe.agent.commands.errors import PARTIAL, Failure
from dsprobe.recordings import session, wire
from dsprobe.recordings.connection import Connection
from dsprobe.recordings.errors import StoreFull
from dsprobe.recordings.live import LiveSession
from dsprobe.recordings.owner import sudo_caller
from dsprobe.recordings.writer import Writer
from dsprobe.tui.units import count

QUEUE_BYTES = 64 << 20
LINGER_NS = 2_000_000_000
LAST_ROWS_SECONDS = 3.5
BEHIND_SECONDS = 20.0
"""How long an agent that is behind, but answers, may take to tell the rest."""
GOES_ON_SECONDS = 5.0
"""How long a command may take to heed the signal that we were sent too."""


def run(args: argparse.Namespace) -> int:
    stop = _Stop()
    path = args.socket or wire.SOCKET
    own_wishes = args.probes is not None or args.pids or args.native_stacks
    if own_wishes and args.socket is None:
        # An agent of its own, so that what runs already is left as it is.
        path = f"{os.path.dirname(wire.SOCKET)}/record-{os.getpid()}.sock"
    connection, own = agents.find_or_start(
        path, "record", args.probes, LINGER_NS, history=0, queue=QUEUE_BYTES, pids=args.pids,
        native_stacks=args.native_stacks,
    )  # fmt: skip
    command: _Command | None = None
    try:
        with Writer(args.output, force=args.force) as writer:
            capture = Capture(connection, writer)
            _wait_for_probes(connection.path, capture, stop)
            command = _Command(args.command) if args.command else None
            progress = _Progress(args.output, capture)
            try:
                why = _record(args.duration, connection, capture, command, stop, progress)
                why = why or _take_the_rest(connection, capture, own, stop)
            finally:
                progress.end()
            writer.close(why)
            if why:
                raise Failure(f"recording ended early: {why}", exit_code=PARTIAL)
        print(f"{args.output}: {progress.summary()}", file=sys.stderr)
    except (Failure, StoreFull) as e:
        if command is None or command.ended():
            raise
        # Said now and not when the command ends, which may be tomorrow.
        print(f"dsprobe: {e}; {command.name} goes on", file=sys.stderr)
        command.wait(stop)
        return e.exit_code
    finally:
        connection.close()
    return command.wait(stop) if command else 0


class _Stop:
    """Set by SIGINT, SIGTERM and SIGHUP, which end a recording but leave it whole."""

    def __init__(self) -> None:
        self.times = 0
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            signal.signal(number, self._set)

    def _set(self, *_: object) -> None:
        self.times += 1

    @property
    def asked(self) -> bool:
        return self.times > 0


def _record(
    duration: int | None,
    connection: Connection,
    capture: Capture,
    command: _Command | None,
    stop: _Stop,
    progress: _Progress,
) -> str:
    """Record until it is time to end; why it ended before, if it did."""
    end = time.monotonic() + duration / 1e9 if duration else math.inf
    while not (stop.asked or time.monotonic() >= end or (command and command.ended())):
        capture.step(0.1)
        progress.show()
        if connection.ended:
            return connection.ended
    return ""


def _wait_for_probes(path: str, capture: Capture, stop: _Stop) -> None:
    """Until each probe has said what it can see, so that a command is seen from its start."""
    watcher = LiveSession(Connection(path, history=0, streams=()))
    deadline = time.monotonic() + agents.READY_SECONDS
    while not stop.asked and time.monotonic() < deadline and watcher.live:
        if capture.silence:
            break
        capture.step(0.0)
        if agents.wait_until_ready(watcher, 0.1):
            break
    for (probe, program), status in session.coverage(watcher).items():
        if not program and status.status not in ("attached", "off"):
            print(f"dsprobe: {probe} is {status.status}: {status.reason}", file=sys.stderr)
    watcher.close()


def _take_the_rest(connection: Connection, capture: Capture, own: bool, stop: _Stop) -> str:
    """What the agent has seen until now: its last tick, or all of it where it may end.  Why that is
    not in the file, where it is not."""
    until, asked = time.monotonic_ns(), stop.times
    begun = time.monotonic()
    if own:
        connection.send("stop")
    while not connection.ended:
        capture.step(0.05)
        told, waited = capture.lived >= until, time.monotonic() - begun
        if told and not own:
            break
        # One that is slow is waited for, unless we are asked again to end.
        hopeless = told or capture.silence or waited >= BEHIND_SECONDS or stop.times > asked
        if waited >= LAST_ROWS_SECONDS and hopeless:
            break
    if capture.lived >= until:
        return ""
    behind = f" ({(until - capture.lived) / 1e9:.1f} s)" if capture.lived else ""
    lost = f"what the agent saw last is missing{behind}"
    return f"{lost}: {connection.ended or capture.silence or 'it is too slow to tell in time'}"


class _Command:
    """The command that is recorded, run as the user who called sudo where that is how we became
    root.  It is never stopped by us: Ctrl-C has reached it as well, and where recording ends for
    another reason it goes on, and we wait for it."""

    def __init__(self, words: Sequence[str]) -> None:
        self.name = words[0]
        options: dict[str, Any] = {}
        caller = sudo_caller()
        try:
            if caller:
                uid, gid = caller
                user = pwd.getpwuid(uid)
                names = {"HOME": user.pw_dir, "USER": user.pw_name, "LOGNAME": user.pw_name}
                groups = os.getgrouplist(user.pw_name, gid)
                options = {"user": uid, "group": gid, "extra_groups": groups}
                options["env"] = os.environ | names
            self._process = subprocess.Popen(words, **options)
        except (OSError, KeyError) as e:
            reason = e.strerror if isinstance(e, OSError) else "who called sudo is no user here"
            raise Failure(f"{words[0]} cannot be run: {reason}") from None

    def ended(self) -> bool:
        return self._process.poll() is not None

    def wait(self, stop: _Stop) -> int:
        """Its exit code; 0 where we were asked to stop and it goes on."""
        asked_since = None
        while not self.ended():
            if stop.asked:
                asked_since = asked_since or time.monotonic()
                if time.monotonic() - asked_since > GOES_ON_SECONDS:
                    return 0
            time.sleep(0.05)
        code = self._process.returncode
        return 128 - code if code < 0 else code


class _Progress:
    """A line on standard error: rewritten every half second on a terminal, else not shown."""

    def __init__(self, path: str, capture: Capture) -> None:
        self._path, self._capture = path, capture
        self._shown = time.monotonic()
        self._terminal = sys.stderr.isatty()
        self._silent = False
        if not self._terminal:
            print(f"recording into {path}; stop with Ctrl-C", file=sys.stderr)

    def summary(self) -> str:
        seconds = (self._capture.last - self._capture.first) / 1e9
        size = self._capture.size
        lost = sum(self._capture.lost.values())
        text = f"{seconds:.1f} s, {count(self._capture.events, 'row')}, {size / 1e6:.2f} MB"
        return f"{text}, {count(lost, 'row')} lost" if lost else text

    def show(self) -> None:
        if self._silent != bool(said := self._capture.silence):
            self._silent = bool(said)
            self.end()
            print(f"dsprobe: {said or 'the agent answers again'}", file=sys.stderr)
        if self._terminal and time.monotonic() - self._shown >= 0.5:
            self._shown = time.monotonic()
            sys.stderr.write(
                f"\r\033[Krecording into {self._path}: {self.summary()} (Ctrl-C stops)"
            )
            sys.stderr.flush()

    def end(self) -> None:
        if self._terminal:
            sys.stderr.write("\r\033[K")
            sys.stderr.flush()
