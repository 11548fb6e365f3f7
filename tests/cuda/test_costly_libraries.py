"""Files that cost whoever reads them, or hold their reader: real ones beside them are traced."""

from __future__ import annotations

import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from dsprobe.agent import libraryfiles
from dsprobe.agent.vetting import Vetting
from dsprobe.probes import driver
from dsprobe.probes.elf import MAX_FUNCTIONS
from tests.cuda.counter import Counter
from tests.cuda.test_discovery import Hosts, hosts  # noqa: F401
from tests.cuda.test_targets import attached, said
from tests.support import hostilefiles
from tests.support.agents import watched
from tests.support.wait import until

pytestmark = [pytest.mark.bpf, pytest.mark.tools("gcc")]

MAP = """
import mmap, os, sys
held = [mmap.mmap(os.open(p, os.O_RDONLY), 0, mmap.MAP_PRIVATE, mmap.PROT_READ | mmap.PROT_EXEC)
        for p in sys.argv[1:]]
print("up", flush=True)
sys.stdin.read()
"""
FILES = 8
_OF_ONE = driver.MAX_LIBRARIES


class Mappers:
    """Processes that map files as libraries are mapped, four each."""

    def __init__(self) -> None:
        self._running: list[subprocess.Popen[bytes]] = []

    def hold(self, paths: list[Path]) -> None:
        for i in range(0, len(paths), _OF_ONE):
            command = [sys.executable, "-c", MAP, *map(str, paths[i : i + _OF_ONE])]
            p = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
            self._running.append(p)
            assert p.stdout
            assert p.stdout.readline() == b"up\n"

    def end(self) -> None:
        for p in self._running:
            p.communicate(b"")


@pytest.fixture
def mappers() -> Iterator[Mappers]:
    made = Mappers()
    yield made
    made.end()


def made(folder: Path, count: int, sections: int) -> list[Path]:
    paths = []
    for i in range(FILES):
        (folder / f"evil{i}").mkdir()
        path = folder / f"evil{i}" / "libcuda.so.1"
        paths.append(hostilefiles.library(path, count, sections))
    return paths


def test_a_real_one_beside_files_with_tables_without_end(
    hosts: Hosts, mappers: Mappers, tmp_path: Path  # noqa: F811
) -> None:  # fmt: skip
    evil = made(tmp_path, 200_000, 4000)
    mappers.hold(evil)
    with watched(Counter()) as w:
        hosts.hold("real")
        until(lambda: attached(w, "/real/"), "the real one is traced")
        until(lambda: len(said(w, "missing")) == FILES, "the others are told of")
        assert all(f"more than {MAX_FUNCTIONS:,} functions" in why for why in said(w, "missing"))
        assert {n for _, n in w.coverage()} >= {str(path) for path in evil}


def test_a_real_one_beside_files_that_hold_who_reads_them(
    hosts: Hosts, mappers: Mappers, tmp_path: Path, monkeypatch: pytest.MonkeyPatch  # noqa: F811
) -> None:  # fmt: skip
    """And what takes long is taken when it comes."""
    places, over, held = Vetting.places, threading.Event(), []

    def hold(vetting: Vetting, fd: int, found: driver.Driver) -> driver.Driver:
        if "/evil" in found.path:
            held.append(found.path)
            over.wait(60)
        return places(vetting, fd, found)

    monkeypatch.setattr(Vetting, "places", hold)
    monkeypatch.setattr(libraryfiles, "LATE_NS", 200_000_000)
    monkeypatch.setattr(libraryfiles, "MAX_ASIDE", FILES + 1)
    evil = made(tmp_path, 1, 1)
    mappers.hold(evil)
    try:
        with watched(Counter()) as w:
            until(lambda: len(held) >= libraryfiles.MAX_READING, "all places are taken")
            hosts.hold("real")
            until(lambda: attached(w, "/real/"), "the real one is traced")
            until(lambda: len(said(w, "missing")) == FILES // _OF_ONE, "it is said who waits")
            for why in said(w, "missing"):
                assert "/evil" in why
                assert "takes long to read" in why
            assert not attached(w, "/evil")
            over.set()
            until(lambda: len(attached(w)) == 1 + FILES, "they are traced after all")
            until(lambda: not said(w, "missing"), "and it is said")
    finally:
        over.set()


def test_so_many_are_put_aside_and_no_more(
    hosts: Hosts, mappers: Mappers, tmp_path: Path, monkeypatch: pytest.MonkeyPatch  # noqa: F811
) -> None:  # fmt: skip
    over = threading.Event()

    def hold(vetting: Vetting, fd: int, found: driver.Driver) -> driver.Driver:
        over.wait(60)
        return found

    monkeypatch.setattr(Vetting, "places", hold)
    monkeypatch.setattr(libraryfiles, "LATE_NS", 50_000_000)
    monkeypatch.setattr(libraryfiles, "MAX_ASIDE", 2)
    mappers.hold(made(tmp_path, 1, 1))
    try:
        with watched(Counter()) as w:
            until(lambda: any("too many" in why for why in said(w, "missing")), "it is said")
            reading = [t for t in threading.enumerate() if t.name == "read"]
            assert len(reading) <= 2 + libraryfiles.MAX_READING - 1
    finally:
        over.set()
