"""Reads processes in a thread of its own.

Memory of a process can be made not to answer (userfaultfd(2), a file system in user space), and who
reads it waits.  So a thread reads, and whoever asked goes on; one that hangs is left behind.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable

MAX_WAITING = 4096
MAX_HANGING = 4
"""Threads left behind at most; then nothing is read any more."""
SECONDS = 2.0
"""A job that takes longer hangs."""
WAITED, WAITED_IN = 1.0, 10.0
"""All callers together wait so many seconds of so many."""

Job = Callable[[], None]


class _Worker:
    since = 0.0
    """When its job began; 0 between jobs."""


class Reader:
    """Runs jobs one after the other; each is to see to its own result."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self.refused = 0
        """Jobs not taken."""
        self._clock = clock
        self._jobs: queue.Queue[Job | None] = queue.Queue(MAX_WAITING)
        self._worker: _Worker | None = None
        self._hanging: list[_Worker] = []
        self._waits_since = self._waited = 0.0

    def ask(self, job: Job) -> bool:
        """Have ``job`` done; False where that cannot be."""
        try:
            if not self._alive():
                raise queue.Full
            self._jobs.put_nowait(job)
        except queue.Full:
            self.refused += 1
            return False
        return True

    def late(self, seconds: float) -> bool:
        """Whether a job has been going on for so long."""
        worker = self._worker
        since = worker.since if worker else 0.0
        return bool(since) and self._clock() - since > seconds

    def wait(self, done: threading.Event, seconds: float) -> bool:
        """Wait so long for what a job sets, less or not at all where others took that time."""
        begun = self._clock()
        if begun - self._waits_since > WAITED_IN:
            self._waits_since, self._waited = begun, 0.0
        left = min(seconds, WAITED - self._waited)
        if left <= 0 or self.late(seconds):
            return done.is_set()
        is_done = done.wait(left)
        self._waited += self._clock() - begun
        return is_done

    def _alive(self) -> bool:
        """Whether a thread works; a new one is started where it hangs."""
        worker = self._worker
        self._hanging = [w for w in self._hanging if w.since]
        if worker and self.late(SECONDS):
            self._hanging.append(worker)
            worker = self._worker = None
        if worker is None and len(self._hanging) < MAX_HANGING:
            worker = self._worker = _Worker()
            threading.Thread(
                target=self._run, args=(worker,), name="python-reader", daemon=True
            ).start()
        return worker is not None

    def _run(self, worker: _Worker) -> None:
        while worker is self._worker and (job := self._jobs.get()):
            worker.since = self._clock()
            try:
                job()
            except Exception:
                pass  # jobs say what went wrong themselves; the others must be done too
            worker.since = 0.0

    def close(self) -> None:
        """Let the thread end."""
        if self._worker and not self._jobs.full():
            self._jobs.put_nowait(None)
        self._worker = None
