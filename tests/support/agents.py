"""An agent of this process, read as any viewer reads one: over its socket."""

from __future__ import annotations

import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from dsprobe.agent.agent import Agent, Settings
from dsprobe.probes.probe import Probe
from dsprobe.probes.registry import select
from dsprobe.recordings.connection import Connection
from dsprobe.recordings.live import LiveSession
from dsprobe.recordings.model import Rows
from dsprobe.recordings.session import FOREVER, Status, coverage
from tests.support.wait import until


class Watched:
    """``agent`` runs in a thread; ``session`` is connected to it."""

    def __init__(self, agent: Agent, thread: threading.Thread, session: LiveSession) -> None:
        self.agent, self._thread, self.session = agent, thread, session

    def coverage(self) -> dict[tuple[str, str], Status]:
        self.session.refresh()
        return coverage(self.session)

    def rows(self, stream: str, start: int = 0, end: int = FOREVER) -> Rows:
        if self.session.live:
            self.session.refresh()
        return self.session.read(stream, start, end)

    def pass_by(self, t: int | None = None) -> int:
        """Wait until everything up to ``t`` (default: now) is here; a moment it is here up to."""
        t = time.monotonic_ns() if t is None else t
        # Clocks are paired each second after the collections of that moment; blocking probes
        # answer in the second that follows at the latest.
        until(lambda: (self.rows("meta.clock")["t"] > t + 1_000_000_000).any(), "rows have come")
        return t

    def stop(self) -> None:
        """End the agent and take all it still has to say.  The rows stay here to be read."""
        if not self._thread.is_alive():
            return
        self.agent.stop()
        until(self._ended, "the agent says good-bye")
        self._thread.join(10)
        if self._thread.is_alive():
            raise AssertionError("the agent has not ended")

    def _ended(self) -> bool:
        self.session.wait(0.05)
        return not self.session.live


@contextmanager
def watched(*probes: str | Probe, pids: tuple[int, ...] = ()) -> Iterator[Watched]:
    """An agent with ``probes`` (by name, or made by the test) and those that they require, once
    each of them has said what became of it."""
    chosen = [p for p in probes if not isinstance(p, str)]
    named = [p for p in probes if isinstance(p, str)]
    chosen += select(named) if named else []
    with tempfile.TemporaryDirectory(prefix="dsprobe-agent-") as folder:
        path = str(Path(folder, "socket"))
        agent = Agent(chosen, Settings(socket=path, pids=pids))
        thread = threading.Thread(target=agent.run, name="agent", daemon=True)
        thread.start()
        connection = until(lambda: _connect(path), "the agent listens")
        it = Watched(agent, thread, LiveSession(connection))
        try:
            names = {p.name for p in chosen}
            until(lambda: names <= {p for p, prog in it.coverage() if not prog}, "probes report")
            yield it
        finally:
            it.stop()
            connection.close()  # the session keeps its rows, for the test to look at


def _connect(path: str) -> Connection | None:
    return Connection(path) if Path(path).exists() else None
