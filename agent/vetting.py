"""What is put to the test before probes go into a library that a server runs with.

Both tests take tenths of a second, and a library that wants to may draw its own out: they are made
on threads of their own (:mod:`dsprobe.agent.search`).
"""

from __future__ import annotations

import contextlib
import platform
import threading
from collections.abc import Iterator
from dataclasses import replace

from dsprobe.probes import functions, hitcost, trial
from dsprobe.probes.driver import Driver
from dsprobe.probes.tracer import Tracer

MAX_KNOWN = 64
"""Builds whose trial is remembered."""
_URETPROBE_CALL = (6, 11)
"""The first Linux that returns from a probed function through a system call."""


class Vetting:
    """Several threads may ask at once."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._tried: list[tuple[Driver, Driver]] = []
        self._survives: bool | None = None

    def places(self, fd: int, found: Driver) -> Driver:
        """``found`` with places for probes that have been tried out, where its build was never
        verified: without those that failed, at a function's start where it cannot be tried."""
        names = [n for n in found.entries if functions.of_symbol(n)]
        if not trial.needed(found, names):
            return found
        code = replace(found, path="", version="")
        for known, tried in self._tried:
            if known == code:
                return replace(found, entries=tried.entries, refused=tried.refused)
        refused: dict[str, str] = {}
        try:
            with contextlib.closing(trial.Bench()) as bench:
                verdict = bench.try_out(fd, found, names)
            entries, refused = verdict.entries, verdict.refused
        except OSError as e:
            entries = {n: trial.at_start(found.entries[n], f"not tried out: {e}") for n in names}
        entries = {n: p for n, p in (found.entries | entries).items() if n not in refused}
        tried = replace(found, entries=entries, refused=refused)
        with self._lock:
            self._tried = [*self._tried[1 - MAX_KNOWN :], (code, tried)]
        return tried

    def survives(self) -> bool:
        """Whether a process whose system calls a seccomp filter judges survives a probe on a
        return; False where that cannot be told."""
        with self._lock:
            if self._survives is None:
                self._survives = _linux() < _URETPROBE_CALL or _survives()
            return self._survives


def _survives() -> bool:
    try:
        with _loaded() as tracer:
            return hitcost.returns_survive_seccomp(tracer)
    except OSError:
        return False


@contextlib.contextmanager
def _loaded() -> Iterator[Tracer]:
    tracer = Tracer([trial.Trial()])
    try:
        tracer.load()
        yield tracer
    finally:
        tracer.close()


def _linux() -> tuple[int, ...]:
    numbers = platform.release().split("-")[0].split(".")[:2]
    return tuple(int(n) for n in numbers if n.isdigit())
