"""Probes that may block, each on a thread of its own, with a watchdog.

A read of /proc or of a driver may hang for as long as the kernel likes.  Then only that probe
stands still: its coverage says "stalled", and the agent goes on.
"""

from __future__ import annotations

import queue
import threading
import time

from dsprobe.probes.probe import Batch, Loss, Probe, Unavailable
from dsprobe.probes.tracer import Coverage

STALLED_NS = 3_000_000_000


class Worker:
    """One blocking probe.  :meth:`ask` it to collect; :meth:`take` what it has since given."""

    def __init__(self, probe: Probe) -> None:
        self.probe = probe
        self._asked: queue.SimpleQueue[bool] = queue.SimpleQueue()
        self._given: queue.SimpleQueue[list[Batch] | Coverage] = queue.SimpleQueue()
        self._busy_since = 0
        self._stalled = False
        self._ended = False
        self._thread = threading.Thread(target=self._work, name=probe.name, daemon=True)
        self._thread.start()

    def _work(self) -> None:
        name = self.probe.name
        try:
            self.probe.start()
        except Unavailable as e:
            self._given.put(Coverage(name, "", "missing", str(e)))
            self._ended = True
            return
        except (OSError, ValueError, IndexError, KeyError) as e:
            self._given.put(Coverage(name, "", "missing", f"cannot be read: {e}"))
            self._ended = True
            return
        self._given.put(Coverage(name, "", "attached"))
        before, failing = time.monotonic_ns(), False
        while self._asked.get():
            try:
                now = time.monotonic_ns()
                batches = self.probe.collect(now)
            except (OSError, ValueError, IndexError, KeyError) as e:
                if not failing:
                    self._given.put(Coverage(name, "", "missing", f"cannot be read: {e}"))
                failing = True
            else:
                if failing:
                    self._given.put(Coverage(name, "", "attached"))
                failing = False
                for stream, rows in batches:
                    if "dt" in stream.by_name:
                        rows["dt"] = now - before
                before = now
                self._given.put(batches)
            self._busy_since = 0

    def ask(self, now: int) -> Coverage | None:
        """Have it collect, unless it still is; a change of its state, where there is one."""
        if self._ended:
            return None
        if not self._busy_since:
            self._busy_since = now
            self._asked.put(True)
            if self._stalled:
                self._stalled = False
                return Coverage(self.probe.name, "", "attached", "answers again")
        elif now - self._busy_since > STALLED_NS and not self._stalled:
            self._stalled = True
            return Coverage(self.probe.name, "", "stalled", "a read has not returned for 3 s")
        return None

    def take(self) -> tuple[list[Batch], list[Coverage], list[Loss]]:
        """What it has given since the last call; never waits."""
        batches: list[Batch] = []
        coverage: list[Coverage] = []
        while True:
            try:
                item = self._given.get_nowait()
            except queue.Empty:
                return batches, coverage, []
            if isinstance(item, Coverage):
                coverage.append(item)
            else:
                batches += item

    def stop(self, seconds: float) -> None:
        """End the thread if it answers in time; a hung one ends with the process."""
        self._asked.put(False)
        self._thread.join(seconds)
