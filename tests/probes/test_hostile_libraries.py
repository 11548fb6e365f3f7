"""Files made to cost whoever reads what they export: the work is bounded, whatever they say."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from dsprobe.probes import driver, elf, functions, placement
from dsprobe.probes.elf import MAX_FUNCTIONS, MAX_NAMES, MAX_SYMBOLS, ElfError, Library
from tests.support import hostilefiles


class Work:
    """What reading took: bytes read, and calls of what costs Python or a disassembler."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.bytes = self.offsets = self.decoded = 0
        pread, offset, disassembler = os.pread, Library._file_offset, placement._disassembler

        def counted(fd: int, size: int, at: int) -> bytes:
            self.bytes += size
            return pread(fd, size, at)

        def looked_up(library: Library, address: int) -> int:
            self.offsets += 1
            return offset(library, address)

        def decoding() -> object:
            self.decoded += 1
            return disassembler()

        monkeypatch.setattr(elf.os, "pread", counted)
        monkeypatch.setattr(Library, "_file_offset", looked_up)
        monkeypatch.setattr(placement, "_disassembler", decoding)


@pytest.fixture
def work(monkeypatch: pytest.MonkeyPatch) -> Work:
    return Work(monkeypatch)


@contextmanager
def opened(path: Path) -> Iterator[int]:
    fd = os.open(path, os.O_RDONLY)
    try:
        yield fd
    finally:
        os.close(fd)


def test_many_tables_are_one(tmp_path: Path, work: Work) -> None:
    path = hostilefiles.library(tmp_path / "libcuda.so.1", 1000, sections=4000)
    with opened(path) as fd:
        found = driver.read(fd, str(path))
    assert len(found.functions) == 1000
    assert work.bytes < path.stat().st_size + 64 * 1000  # each byte once, and the code
    assert work.offsets == 1000
    traced = [n for n in found.functions if functions.of_symbol(n)]
    assert list(found.entries) == traced == ["cuInit"]
    assert work.decoded == 1


def test_more_functions_than_a_driver_has_are_refused_before_any_is_looked_at(
    tmp_path: Path, work: Work
) -> None:
    path = hostilefiles.library(tmp_path / "libcuda.so.1", 300_000)
    with opened(path) as fd, pytest.raises(ElfError, match=f"more than {MAX_FUNCTIONS:,} func"):
        driver.read(fd, str(path))
    assert work.offsets <= MAX_FUNCTIONS
    assert work.decoded == 0


def test_more_symbols_or_names_than_there_are_are_not_read(tmp_path: Path, work: Work) -> None:
    for count, names in ((MAX_SYMBOLS + 1, b"cuInit\0"), (1, bytes(MAX_NAMES + 1))):
        path = hostilefiles.library(tmp_path / "libcuda.so.1", count, names=names)
        for ask in (lambda x: x.functions("cu"), lambda x: x.addresses("_PyRuntime")):
            with opened(path) as fd, pytest.raises(ElfError, match="more than"):
                ask(Library(fd))
    assert work.bytes < 10_000


@pytest.mark.parametrize("kind", [hostilefiles.DYNSYM, hostilefiles.SYMTAB])
def test_names_that_come_up_again_and_again_cost_no_more(
    tmp_path: Path, work: Work, kind: int
) -> None:
    names = b"x_PyRuntime\0" * 100_000
    path = hostilefiles.library(tmp_path / "libpython3.so", 200_000, 4000, names, kind)
    with opened(path) as fd:
        assert Library(fd).addresses("_PyRuntime", "Py_Version") == {}
        assert Library(fd).addresses("x_PyRuntime") == {"x_PyRuntime": 0x1000}
    assert work.bytes < 2.1 * path.stat().st_size


def test_a_name_at_the_very_end_is_read_no_further(tmp_path: Path) -> None:
    path = hostilefiles.library(tmp_path / "libcuda.so.1", 1, names=b"cuInit")
    with opened(path) as fd:
        assert list(Library(fd).functions("cu")) == ["cuInit"]
        assert Library(fd).functions("cuInit2") == {}
        assert Library(fd).addresses("cuInit") == {}  # it does not end there


def test_many_notes_and_segments(tmp_path: Path, work: Work) -> None:
    path = hostilefiles.library(tmp_path / "a", 100, 4000, kind=hostilefiles.NOTE)
    with opened(path) as fd:
        assert Library(fd).build_id() == ""
    assert work.bytes < 64 * 4002 + elf.MAX_NOTES * 4096
    path = hostilefiles.library(tmp_path / "b", 100_000, segments=60_000)
    with opened(path) as fd, pytest.raises(ElfError, match="segments"):
        Library(fd)
