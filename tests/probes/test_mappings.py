"""The kernel's word of new mappings, and what is made of rings full of something else."""

from __future__ import annotations

import mmap
import struct
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as some

from dsprobe.probes import mappings
from dsprobe.probes.mappings import Mapping, Mappings, parse
from tests.support.wait import until

NAME = b"/libwatched.so"


def record(kind: int, body: bytes, misc: int = 0) -> bytes:
    return struct.pack("<IHH", kind, misc, 8 + len(body)) + body


def mmap2(pid: int, path: bytes) -> bytes:
    head = struct.pack("<IIQQQIIQQII", pid, pid, 0x7F00, 4096, 0, 8, 1, 77, 0, 5, 2)
    return record(10, head + path + b"\0" * (8 - len(path) % 8), misc=2)


def lost(n: int) -> bytes:
    return record(2, struct.pack("<QQ", 1, n))


FORK = record(7, bytes(24))
OTHER = mmap2(4, b"/usr/lib/libc.so.6")


def test_a_mapping_of_the_name_is_found_among_others() -> None:
    data = OTHER + FORK + mmap2(12, b"/a/libwatched.so.1") + OTHER + mmap2(13, b"/b" + NAME)
    seen = parse(data, NAME)
    assert seen.mappings == [Mapping(12, b"/a/libwatched.so.1"), Mapping(13, b"/b/libwatched.so")]
    assert seen.lost == 0


def test_losses_are_counted_beside_it_and_alone() -> None:
    assert parse(OTHER + lost(3) + lost(4), NAME).lost == 7
    seen = parse(lost(2) + mmap2(1, NAME), NAME)
    assert (seen.lost, [m.pid for m in seen.mappings]) == (2, [1])


@pytest.mark.parametrize(
    "data",
    [
        NAME,  # no record at all
        mmap2(1, NAME + b".1234567")[:-8],  # cut off
        record(10, NAME + b"\0" * 2),  # too short for its kind
        struct.pack("<IHH", 10, 0, 4) + NAME,  # a size below that of a header
        struct.pack("<IHH", 10, 0, 0) + NAME + b"\0\0",
        struct.pack("<IHH", 10, 0, 1 << 15) + NAME + b"\0\0",  # past the end
    ],
)
def test_nonsense_is_a_loss_and_no_mapping(data: bytes) -> None:
    seen = parse(data, NAME)
    assert seen.mappings == []
    assert seen.lost == (0 if data == record(10, NAME + b"\0" * 2) else 1)


@settings(max_examples=200, deadline=None)
@given(some.binary(max_size=300), some.integers(0, 400))
def test_whatever_a_ring_holds(junk: bytes, at: int) -> None:
    whole = OTHER + mmap2(9, NAME) + lost(1)
    for data in (junk, whole[:at] + junk, junk + NAME + junk):
        seen = parse(data, NAME)
        assert all(NAME in m.path for m in seen.mappings)
        assert seen.lost >= 0


HOLD = "import mmap, sys; f = open(sys.argv[1], 'rb')\n" \
    "m = mmap.mmap(f.fileno(), 0, prot=mmap.PROT_READ | mmap.PROT_EXEC)\n" \
    "print('up', flush=True); sys.stdin.read()"  # fmt: skip


@pytest.fixture
def watch() -> Iterator[Mappings]:
    m = Mappings(NAME)
    yield m
    m.close()


@pytest.fixture
def watched_file(tmp_path: Path) -> Path:
    path = tmp_path / NAME.decode()[1:]
    path.write_bytes(bytes(4096))
    return path


@pytest.mark.root
@pytest.mark.parametrize("prefix", [(), ("unshare", "--pid", "--mount", "--fork", "--mount-proc")])
def test_a_real_mapping_in_any_namespace(
    watch: Mappings, watched_file: Path, prefix: tuple[str, ...]
) -> None:
    command = [*prefix, sys.executable, "-c", HOLD, str(watched_file)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as p:
        assert p.stdout
        assert p.stdout.readline() == b"up\n"
        [seen] = watch.take().mappings
        assert seen.path == str(watched_file).encode()
        maps = Path(f"/proc/{seen.pid}/maps").read_text()
        assert str(watched_file) in maps
        p.communicate(b"")
    assert watch.take().mappings == []


@pytest.mark.root
def test_a_ring_that_was_full_says_so_and_works_again(watch: Mappings, watched_file: Path) -> None:
    code = (
        "import mmap, sys; f = open(sys.argv[1], 'rb')\n"
        "for _ in range(4000): mmap.mmap(f.fileno(), 0, prot=5).close()"
    )
    other = watched_file.with_name("other")
    other.write_bytes(bytes(4096))
    subprocess.run([sys.executable, "-c", code, str(other)], check=True)
    seen = watch.take()
    assert seen.lost > 0
    assert seen.mappings == []
    until(lambda: watch.take().lost == 0, "nothing is lost any more")
    subprocess.run([sys.executable, "-c", code.replace("4000", "3"), str(watched_file)], check=True)
    seen = watch.take()
    assert [m.path for m in seen.mappings] == [str(watched_file).encode()] * 3


@pytest.mark.root
def test_cpus_that_come_and_go(watch: Mappings, monkeypatch: pytest.MonkeyPatch) -> None:
    """A CPU that is not online is not watched; while it was not, things may have been missed."""
    cpus = mappings.online_cpus()
    assert len(watch.fds) == len(cpus)
    assert not watch.follow_cpus()
    monkeypatch.setattr(mappings, "online_cpus", lambda: {min(cpus)})
    if watch.follow_cpus():
        assert len(watch.fds) == 1
        assert watch.take().lost > 0
    monkeypatch.setattr(mappings, "online_cpus", lambda: cpus)
    assert watch.follow_cpus() == (len(cpus) > 1)
    assert len(watch.fds) == len(cpus)
    assert watch.take().lost == len(cpus) - 1
    assert watch.take().lost == 0


def test_a_ring_takes_few_pages() -> None:
    assert mappings.PAGES * mmap.PAGESIZE <= 1 << 16
