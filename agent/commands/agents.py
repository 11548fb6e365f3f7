"""Find the agent that runs, or start one."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence

from dsprobe.agent.commands.errors import PRIVILEGE, USAGE, Failure, need_root
from dsprobe.recordings import session, wire
from dsprobe.recordings.connection import Connection, Refused
from dsprobe.recordings.live import LiveSession

START_SECONDS = 15.0
READY_SECONDS = 60.0
_OWN = {"--probes": "probes", "--pid": "targets", "--native-stacks": "stacks"}


def running(path: str, history: int | None = None, queue: int | None = None) -> Connection | None:
    """A connection to the agent at ``path``; None where none listens.

    Raises :class:`~dsprobe.recordings.connection.Refused` where one does and will not talk.
    """
    try:
        return Connection(path, history=history, queue=queue)
    except Refused as e:
        if e.exit_code == PRIVILEGE or (os.path.exists(path) and not _dead(path)):
            raise
        return None


def _dead(path: str) -> bool:
    """Whether nobody listens at a socket that was left behind."""
    import socket

    with socket.socket(socket.AF_UNIX) as s:
        try:
            s.connect(path)
        except ConnectionRefusedError:
            return True
        except OSError:
            return False
    return False


def start(
    path: str,
    verb: str,
    probes: Sequence[str] | None,
    linger: int,
    queue: int | None = None,
    pids: Sequence[int] = (),
    native_stacks: bool = False,
) -> Connection:
    """Start an agent of our own at ``path``, in a session of its own, so that it outlives a
    terminal that is closed; it ends ``linger`` ns after its last viewer.

    Raises :class:`Failure`.
    """
    need_root(verb)
    command = [sys.executable, "-I", "-m", "dsprobe.agent.commands.main", "agent", "--socket", path]
    command += ["--linger", f"{linger}ns"]
    if probes is not None:
        command += ["--probes", ",".join(probes)]
    if pids:
        command += ["--pid", ",".join(map(str, pids))]
    if native_stacks:
        command += ["--native-stacks"]
    with tempfile.TemporaryFile() as log:
        child = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            start_new_session=True,
            cwd="/",
            env={**os.environ, "OPENBLAS_NUM_THREADS": "1"},  # numpy's would spin meanwhile
        )
        deadline = time.monotonic() + START_SECONDS
        while time.monotonic() < deadline:
            try:
                return Connection(path, queue=queue)
            except Refused as e:
                ended = child.poll()
                if ended is not None:
                    raise _failure(log.fileno(), ended) from None
                if e.exit_code == PRIVILEGE:
                    raise
            time.sleep(0.02)
        child.terminate()
        raise Failure(
            f"the agent did not answer within {START_SECONDS:.0f} s", "try dsprobe doctor"
        )


def _failure(log: int, code: int) -> Failure:
    size = os.fstat(log).st_size
    lines = os.pread(log, 4096, max(0, size - 4096)).decode(errors="replace").strip().splitlines()
    said = lines[-1].removeprefix("dsprobe: ") if lines else f"it ended with code {code}"
    return Failure(said if lines else f"the agent did not start: {said}", exit_code=max(code, 1))


def find_or_start(
    socket: str | None,
    verb: str,
    probes: Sequence[str] | None,
    linger: int,
    history: int | None = None,
    queue: int | None = None,
    pids: Sequence[int] = (),
    native_stacks: bool = False,
) -> tuple[Connection, bool]:
    """The connection, and whether the agent was started for it.

    An agent that runs keeps the probes and processes it has, so asking for others is an error.
    """
    check_pids(pids)
    path = socket or wire.SOCKET
    connection = running(path, history, queue)
    if connection is None:
        if probes is not None:
            _check(probes)
        return start(path, verb, probes, linger, queue, pids, native_stacks), True
    asked = {"--probes": probes is not None, "--pid": pids, "--native-stacks": native_stacks}
    given = [option for option, value in asked.items() if value]
    if given:
        connection.close()
        raise Failure(
            f"an agent already listens at {path} with {_OWN[given[0]]} of its own",
            f"leave {' and '.join(given)} out, or name another --socket",
            USAGE,
        )
    return connection, False


def _check(probes: Sequence[str]) -> None:
    from dsprobe.probes.registry import select

    try:
        select(probes)
    except ValueError as e:
        raise Failure(str(e), exit_code=USAGE) from None


def check_pids(pids: Sequence[int]) -> None:
    """Raises :class:`Failure` where one of them is no process."""
    for pid in pids:
        try:
            with open(f"/proc/{pid}/status", "rb") as f:
                leader = next(int(x.split()[1]) for x in f if x.startswith(b"Tgid:"))
        except (OSError, StopIteration, ValueError):
            raise Failure(f"there is no process {pid}", "pgrep -af NAME finds some") from None
        if leader != pid:
            raise Failure(f"{pid} is a thread of process {leader}", f"use --pid {leader}")


def wait_until_ready(live: LiveSession, seconds: float = READY_SECONDS) -> bool:
    """Wait until the agent has said of every probe whether it works; False when it does not."""
    from dsprobe.probes.registry import PROBES

    names = {p.name for p in PROBES}
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline and live.live:
        live.wait(0.1)
        if names <= {probe for probe, program in session.coverage(live) if not program}:
            return True
    return False
