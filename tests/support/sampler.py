"""/proc/softirqs read over and over, to know what it said at any moment."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np

from tests.support.counters import Counts, softirqs


class Sampler:
    """Bounds of the counters at a moment, from the readings around it."""

    def __init__(self) -> None:
        self._began: list[int] = []
        self._ended: list[int] = []
        self._counts: list[Counts] = []

    def take(self) -> None:
        self._began.append(time.monotonic_ns())
        self._counts.append(softirqs())
        self._ended.append(time.monotonic_ns())

    def at_least(self, t: int) -> Counts:
        """What had certainly been counted by ``t`` (CLOCK_MONOTONIC ns)."""
        return self._counts[int(np.searchsorted(self._ended, t, "right")) - 1]

    def at_most(self, t: int) -> Counts:
        """More than this cannot have been counted by ``t``."""
        return self._counts[int(np.searchsorted(self._began, t, "left"))]


@contextmanager
def sampling(every: float = 0.004) -> Iterator[Sampler]:
    """Read every so many seconds until the block ends; once more after it has."""
    sampler, over = Sampler(), threading.Event()

    def run() -> None:
        while not over.wait(every):
            sampler.take()

    sampler.take()
    thread = threading.Thread(target=run, name="sampler")
    thread.start()
    try:
        yield sampler
    finally:
        over.set()
        thread.join()
        sampler.take()
