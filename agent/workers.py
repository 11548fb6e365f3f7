"""Probes that may block, each on a thread of its own, with a watchdog.

A read of /proc or of a driver may hang for as long as the kernel likes.  Then only that probe
stands still: its coverage says "stalled", and the agent goes on.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable

from dsprobe.probes.probe import Batch, Loss, Probe, Unavailable
from dsprobe.probes.tracer import Coverage

STALLED_NS = 3_000_000_000


def collect(probe: Probe, now: int, before: int) -> list[Batch]:
    """What ``probe`` has to say of the interval ``(before, now]``."""
    batches = probe.collect(now)
    for stream, rows in batches:
        if "dt" in stream.by_name:
            rows["dt"][rows["dt"] == 0] = now - before  # but where a probe knows better
    return batches


class Worker:
    """One blocking probe.

    :meth:`ask` it to collect, :meth:`take` what it has since given, and :meth:`changed` says what
    became of it.  ``now`` gives CLOCK_MONOTONIC ns.
    """

    def __init__(self, probe: Probe, now: Callable[[], int] = time.monotonic_ns) -> None:
        self.probe, self._now = probe, now
        self._asked: queue.SimpleQueue[bool] = queue.SimpleQueue()
        self._given: queue.SimpleQueue[tuple[list[Batch], list[Loss]]] = queue.SimpleQueue()
        self._busy_since = 0
        self._state = ("", "")  # as of its last answer: a word of STATUSES and the reason
        self._said = ("", "")
        self._thread = threading.Thread(target=self._work, name=probe.name, daemon=True)
        self._thread.start()

    def _work(self) -> None:
        before = 0  # 0 until it has started
        while self._asked.get():
            try:
                if not before:
                    self.probe.start()
                    before = self._now()
                else:
                    now = self._now()
                    self._given.put((collect(self.probe, now, before), self.probe.losses()))
                    before = now
                self._state = self.probe.standing
            except Unavailable as e:
                self._state = ("missing", str(e))
            except Exception as e:  # whatever it is, the next reading may be a good one
                self._state = ("missing", f"cannot be read: {e}")
            self._busy_since = 0
        self.probe.close()

    def ask(self) -> None:
        """Have it collect, unless it still does."""
        if not self._busy_since:
            self._busy_since = self._now()
            self._asked.put(True)

    def changed(self) -> Coverage | None:
        """Its state where that is not what the last call said."""
        since, state = self._busy_since, self._state
        if since and self._now() - since > STALLED_NS:
            state = ("stalled", f"a read has not returned for {STALLED_NS // 10**9} s")
        status, reason = state
        if state == self._said or not status:
            return None
        if status == "attached" and self._said[0]:
            reason = reason or "answers again"
        self._said = state
        return Coverage(self.probe.name, "", status, reason)

    def take(self) -> tuple[list[Batch], list[Loss]]:
        """What it has given since the last call; never waits."""
        batches: list[Batch] = []
        losses: list[Loss] = []
        while True:
            try:
                more, lost = self._given.get_nowait()
            except queue.Empty:
                return batches, losses
            batches += more
            losses += lost

    def end(self) -> None:
        """Ask the thread to end after what it does now."""
        self._asked.put(False)

    def join(self, seconds: float) -> None:
        """Wait so long for it to end; a hung one ends with the process."""
        self._thread.join(seconds)
