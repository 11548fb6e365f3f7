"""Discovery where something stands in its way: hanging files, lost records, too many, no /proc."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from dsprobe.agent import discovery, libraries, libraryfiles, search, targets
from dsprobe.agent.search import Found, Scanned, Search
from dsprobe.probes import driver
from dsprobe.probes.btf import Btf
from dsprobe.probes.probe import Unavailable
from tests.cuda.counter import Counter
from tests.cuda.test_targets import HOLD, attached, said
from tests.simgpu import build
from tests.support.agents import watched
from tests.support.wait import until

pytestmark = [pytest.mark.bpf, pytest.mark.tools("gcc")]


class Hosts:
    """Processes that hold copies of the driver library."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._running: list[subprocess.Popen[bytes]] = []

    def hold(self, name: str = "a", flavour: str = "driver") -> int:
        """PID of one that maps the copy ``name``."""
        copy = self._folder / name / "libcuda.so.1"
        if not copy.exists():
            copy.parent.mkdir()
            shutil.copy(build.libcuda(flavour) / "libcuda.so.1", copy)
        p = subprocess.Popen(
            [sys.executable, "-c", HOLD, str(copy)], stdin=subprocess.PIPE, stdout=subprocess.PIPE
        )
        self._running.append(p)
        assert p.stdout
        assert p.stdout.readline() == b"up\n"
        return p.pid

    def end(self) -> None:
        for p in self._running:
            p.communicate(b"")
        self._running.clear()


@pytest.fixture
def hosts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hosts]:
    real = driver.libraries_of

    def ours(pid: int, proc: Path = Path("/proc")) -> list[driver.Mapped]:
        return [m for m in real(pid, proc) if m.path.startswith(str(tmp_path))]

    monkeypatch.setattr(driver, "libraries_of", ours)
    made = Hosts(tmp_path)
    yield made
    made.end()


def seen(counter: Counter) -> set[int]:
    return {pid for pid, _ in counter.seen}


def test_a_process_whose_files_hang_is_left_out_and_the_others_are_found(
    hosts: Hosts, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(search, "STALLED_NS", 500_000_000)
    hanging, over = hosts.hold("a"), threading.Event()
    before = driver.libraries_of

    def hang(pid: int, proc: Path = Path("/proc")) -> list[driver.Mapped]:
        if pid == hanging:
            over.wait(60)
        return before(pid, proc)

    monkeypatch.setattr(driver, "libraries_of", hang)
    counter = Counter()
    try:
        with watched(counter) as w:
            [reason] = until(lambda: said(w, "stalled"), "it is said")
            assert reason == f"process {hanging} takes too long to look into: it is left out"
            other = hosts.hold("b")
            until(lambda: seen(counter) == {other}, "the other is found")
            hosts.end()
            over.set()
            until(lambda: not said(w, "stalled"), "it has gone")
    finally:
        over.set()


def test_what_was_lost_is_found_by_a_scan(hosts: Hosts, monkeypatch: pytest.MonkeyPatch) -> None:
    """As where more was mapped at once than the ring holds: the kernel's word of it is lost."""
    counter = Counter()
    with watched(counter) as w:
        monkeypatch.setattr(discovery.Mappings, "take", lambda _: discovery_seen(0))
        pid = hosts.hold()
        monkeypatch.setattr(discovery.Mappings, "take", lambda _: discovery_seen(1))
        until(lambda: attached(w), "it is found", 5)
        assert seen(counter) == {pid}


def discovery_seen(lost: int) -> object:
    from dsprobe.probes.mappings import Seen

    return Seen([], lost)


def test_where_the_kernel_may_not_be_asked_scans_do_it(
    hosts: Hosts, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> int:
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr("dsprobe.probes.syscalls.open_mapping_events", refuse)
    monkeypatch.setattr(discovery, "UNTOLD_SECONDS", 0.5)
    counter = Counter()
    with watched(counter) as w:
        why = w.coverage()["counter", "discovery"].reason
        assert why == (
            "the kernel does not tell of new mappings (Operation not permitted): all processes are"
            " looked at every 0.5 s"
        )
        pid = hosts.hold()
        until(lambda: seen(counter) == {pid}, "it is found", 5)


def test_without_programs_nobody_is_looked_for(hosts: Hosts) -> None:
    class Broken(Counter):
        def defines(self, btf: Btf | None) -> dict[str, int]:
            raise Unavailable("this kernel is too old")

    counter = Broken()
    with watched(counter) as w:
        hosts.hold()
        said = w.coverage()
        assert (said["counter", ""].status, said["counter", ""].reason) == (
            "missing", "this kernel is too old",
        )  # fmt: skip
        assert said["counter", "discovery"].status == "off"
        assert not [t for t in threading.enumerate() if t.name == "search"]
    assert counter.seen == []


def test_more_libraries_than_are_followed(hosts: Hosts, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(libraries, "MAX_LIBRARIES", 1)
    monkeypatch.setattr(targets, "MAX_LIBRARIES", 1)
    counter = Counter()
    with watched(counter) as w:
        first, second = hosts.hold("a"), hosts.hold("b")
        until(lambda: "more than" in w.coverage()["counter", ""].reason, "it is said")
        assert len(attached(w)) == 1
        assert seen(counter) <= {first, second}
        assert len(seen(counter)) == 1


def test_more_processes_than_are_followed_keep_their_probes(
    hosts: Hosts, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(targets, "MAX_PROCESSES", 1)
    monkeypatch.setattr(discovery, "AGAIN_NS", 1)
    counter = Counter()
    with watched(counter) as w:
        hosts.hold("a")
        until(lambda: attached(w), "the first is found")
        hosts.hold("a")
        until(lambda: "more than 1 processes" in w.coverage()["counter", ""].reason, "it is said")
        assert not said(w, "detached")


def test_new_libraries_are_read_at_a_bounded_rate(
    hosts: Hosts, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(libraryfiles, "READS", 1)
    counter = Counter()
    with watched(counter) as w:
        hosts.hold("a")
        until(lambda: attached(w), "the first is found")
        hosts.hold("b")
        [why] = until(lambda: said(w, "missing"), "it is said")
        assert why.endswith("cannot be opened: too many new libraries in a minute")
        assert len(attached(w)) == 1


def test_a_library_again_and_again_is_one_plan(hosts: Hosts) -> None:
    """Places in the table of functions are bounded: the same build has the same ones."""
    counter = Counter()
    with watched(counter) as w:
        for n in range(1, 4):
            hosts.hold("a" if n < 3 else "b")
            until(lambda n=n: len(attached(w)) == n, "it is found")  # type: ignore[misc]
            hosts.end()
            until(lambda n=n: len(said(w, "detached")) == max(n - 1, 1), "it is let go")  # type: ignore[misc]
    assert len(counter.attached) == 1


def test_a_build_that_nobody_maps_is_forgotten(
    hosts: Hosts, monkeypatch: pytest.MonkeyPatch
) -> None:
    """So that there is room for others, however many come by."""
    monkeypatch.setattr(libraries, "FORGET_NS", 0)
    counter = Counter()
    with watched(counter) as w:
        hosts.hold("a")
        until(lambda: attached(w), "it is found")
        hosts.hold("b", "frame")
        until(lambda: len(attached(w)) == 2, "another build is found")
        assert counter.forgotten == []
        hosts.end()
        until(lambda: len(said(w, "detached")) == 2, "they are let go")
        hosts.hold("c", "endbr")
        until(lambda: len(attached(w)) == 3, "a third one is found")
    assert len(counter.forgotten) == 2


def test_a_scan_closes_what_nobody_takes(hosts: Hosts) -> None:
    hosts.hold()
    before = len(os.listdir("/proc/self/fd"))
    s = Search()
    s.scan()
    until(lambda: len(os.listdir("/proc/self/fd")) > before, "something is found")
    s.close()
    s.join(10)
    until(lambda: len(os.listdir("/proc/self/fd")) <= before, "all is closed")


def test_a_scan_is_spread_out_and_a_look_comes_in_between(hosts: Hosts) -> None:
    pid = hosts.hold()
    s = Search()
    try:
        began = time.monotonic()
        s.scan(3)
        s.look(pid)
        found: list[object] = []

        def look() -> bool:
            found.extend(s.take())
            return any(isinstance(f, Found) and f.pid == pid and f.copies for f in found)

        until(look, "it is looked at")
        assert time.monotonic() - began < 1.5
        assert not any(isinstance(f, Scanned) for f in found)
        until(lambda: any(isinstance(f, Scanned) for f in s.take()), "the scan ends")
        assert time.monotonic() - began > 2
        for f in found:
            if isinstance(f, Found):
                f.close()
    finally:
        s.close()
        s.join(10)
