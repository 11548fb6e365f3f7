"""Probes that hang or fail, each on its own thread, under a clock that the test sets."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import ClassVar

import pytest

from dsprobe.agent.workers import STALLED_NS, Worker
from dsprobe.probes.probe import Batch, Loss, Probe, Unavailable
from dsprobe.recordings.streams import CPU_LOAD, SOFTIRQ_SLOW
from tests.support.wait import until

SECOND = 10**9


class Fake(Probe):
    """Does what the test puts into ``act``."""

    name = "fake"
    doc = "made by a test"
    streams = (CPU_LOAD, SOFTIRQ_SLOW)
    blocking: ClassVar[bool] = True

    def __init__(self) -> None:
        self.begin: Callable[[], None] = lambda: None
        self.act: Callable[[], None] = lambda: None
        self.started = self.collected = 0

    def start(self) -> None:
        self.begin()
        self.started += 1

    def collect(self, now: int) -> list[Batch]:
        self.act()
        self.collected += 1
        none = SOFTIRQ_SLOW.empty()
        return [(CPU_LOAD, CPU_LOAD.rows(t=now, running=self.collected)), (SOFTIRQ_SLOW, none)]

    def losses(self) -> list[Loss]:
        return [Loss("cpu.load", "made up", 1)] if self.collected == 3 else []


@dataclass
class Bench:
    probe: Fake = field(default_factory=Fake)
    now: int = SECOND

    def __post_init__(self) -> None:
        self.worker = Worker(self.probe, lambda: self.now)

    def once(self) -> tuple[list[Batch], list[Loss]]:
        """Ask, wait for the answer, take it."""
        self.worker.ask()
        until(lambda: not self.worker._busy_since, "it answers")
        return self.worker.take()

    def said(self) -> tuple[str, str] | None:
        c = self.worker.changed()
        return (c.status, c.reason) if c else None


@pytest.fixture
def bench() -> Bench:
    return Bench()


def test_rows_speak_for_the_time_since_the_last_reading(bench: Bench) -> None:
    assert bench.said() is None  # it has not answered yet
    assert bench.once() == ([], [])  # started
    assert bench.said() == ("attached", "")
    for step in (1, 2, 7):
        bench.now += step * SECOND
        (stream, rows), (_, none) = bench.once()[0]
        assert stream is CPU_LOAD
        assert (int(rows["t"][0]), int(rows["dt"][0])) == (bench.now, step * SECOND)
        assert not len(none)
    assert bench.said() is None


def test_losses_come_along(bench: Bench) -> None:
    got = [loss for _ in range(6) for loss in bench.once()[1]]
    assert got == [Loss("cpu.load", "made up", 1)]


def test_a_hang_is_stalled_and_comes_back(bench: Bench) -> None:
    bench.once()
    bench.said()
    reading, held = threading.Event(), threading.Event()
    bench.probe.act = lambda: (reading.set(), held.wait(20))[0]
    bench.worker.ask()
    assert reading.wait(20)
    bench.now += STALLED_NS
    assert bench.said() is None
    bench.now += 1
    status, reason = bench.said() or ("", "")
    assert (status, reason) == ("stalled", "a read has not returned for 3 s")
    assert bench.said() is None  # once is enough
    for _ in range(100):
        bench.worker.ask()  # asks while it hangs do not pile up
    held.set()
    until(lambda: not bench.worker._busy_since, "it answers")
    assert bench.said() == ("attached", "answers again")
    assert len(bench.worker.take()[0]) == 2
    assert bench.probe.collected == 1
    bench.now += SECOND
    (_, rows), _ = bench.once()[0]
    assert int(rows["dt"][0]) == STALLED_NS + 1 + SECOND  # of the reading, not of its return


def test_a_hang_at_the_start_is_stalled_too() -> None:
    held = threading.Event()
    probe = Fake()
    probe.begin = lambda: held.wait(20) and None
    bench = Bench(probe)
    bench.worker.ask()
    bench.now += STALLED_NS + 1
    assert (bench.said() or ("",))[0] == "stalled"
    held.set()
    until(lambda: not bench.worker._busy_since, "it answers")
    assert bench.said() == ("attached", "answers again")


@pytest.mark.parametrize(
    "error",
    [OSError(5, "Input/output error"), ValueError("nonsense"), OverflowError("too big"),
     ZeroDivisionError("x"), AttributeError("y"), UnicodeDecodeError("utf-8", b"", 0, 1, "z")],
    ids=lambda e: type(e).__name__,
)  # fmt: skip
def test_a_reading_that_fails_is_missing_and_comes_back(bench: Bench, error: Exception) -> None:
    bench.once()
    bench.said()

    def fail() -> None:
        raise error

    bench.probe.act = fail
    for _ in range(3):
        assert bench.once() == ([], [])
    status, reason = bench.said() or ("", "")
    assert status == "missing"
    assert reason == f"cannot be read: {error}"
    assert bench.said() is None
    bench.probe.act = lambda: None
    bench.now += SECOND
    assert bench.once()[0]
    assert bench.said() == ("attached", "answers again")


def test_a_hang_that_ends_in_an_error_is_missing(bench: Bench) -> None:
    bench.once()
    bench.said()
    held = threading.Event()

    def hang_then_fail() -> None:
        held.wait(20)
        raise OSError(5, "Input/output error")

    bench.probe.act = hang_then_fail
    bench.worker.ask()
    bench.now += STALLED_NS + 1
    assert (bench.said() or ("",))[0] == "stalled"
    held.set()
    until(lambda: not bench.worker._busy_since, "it answers")
    assert (bench.said() or ("",))[0] == "missing"


def test_one_that_cannot_start_says_why_and_tries_again() -> None:
    probe = Fake()

    def refuse() -> None:
        raise Unavailable("this kernel has none; build one with it")

    probe.begin = refuse
    bench = Bench(probe)
    bench.once()
    assert bench.said() == ("missing", "this kernel has none; build one with it")
    probe.begin = lambda: None
    bench.once()
    assert bench.said() == ("attached", "answers again")
    assert bench.once()[0]


def test_end_lets_it_finish_what_it_was_asked(bench: Bench) -> None:
    bench.once()
    held = threading.Event()
    bench.probe.act = lambda: held.wait(20) and None
    bench.worker.ask()
    bench.worker.end()
    bench.worker.join(0.01)  # hangs: not waited for longer
    assert bench.worker._thread.is_alive()
    held.set()
    bench.worker.join(20)
    assert not bench.worker._thread.is_alive()
    assert bench.worker.take()[0]


def test_what_a_probe_says_of_itself_is_told_when_it_changes(bench: Bench) -> None:
    standing = {"": ("", "")}

    class Frank(Fake):
        @property
        def standing(self) -> tuple[str, str]:
            return standing[""]

    bench = Bench(Frank())
    bench.once()
    assert bench.said() is None  # it cannot say yet
    for now, told in (
        (("attached", ""), ("attached", "")),
        (("shed", "one is lost"), ("shed", "one is lost")),
        (("shed", "two are lost"), ("shed", "two are lost")),
        (("shed", "two are lost"), None),
        (("attached", ""), ("attached", "answers again")),
        (("attached", ""), None),
        (("attached", "but there is nothing"), ("attached", "but there is nothing")),
    ):
        standing[""] = now
        bench.once()
        assert bench.said() == told


def test_the_probe_is_closed_by_the_thread_that_started_it() -> None:
    threads = []

    class Closing(Fake):
        def start(self) -> None:
            threads.append(threading.current_thread())

        def close(self) -> None:
            threads.append(threading.current_thread())

    bench = Bench(Closing())
    bench.once()
    bench.worker.end()
    bench.worker.join(20)
    assert threads == [bench.worker._thread] * 2
