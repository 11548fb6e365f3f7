"""A recorder that is killed, and disks that are full: the file stays readable."""

import os
import random
import resource
import struct
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from dsprobe.recordings import streams as st
from dsprobe.recordings.cut import cut
from dsprobe.recordings.errors import RecordingError, StoreFull
from dsprobe.recordings.filesession import open_file
from dsprobe.recordings.merge import merge
from dsprobe.recordings.writer import Writer
from tests.recordings.sample import FOREVER, SECOND, T0, head, host_second, random_rows, write_host

RECORDER = """
import mmap, struct, sys, time
from dsprobe.recordings import streams as st
from dsprobe.recordings.writer import Writer
writer = Writer(sys.argv[1])
told = open(sys.argv[1] + ".told", "r+b")
told = mmap.mmap(told.fileno(), 16)
began = flushed = time.monotonic_ns()
n = 0
print("ready", flush=True)
while True:
    now = time.monotonic_ns()
    n += 1
    writer.append(st.MARKER, st.MARKER.rows(t=[now], label=[str(n)]))
    writer.append(st.CPU_LOAD, st.CPU_LOAD.rows(t=[now], dt=1, switches=n))
    told[:] = struct.pack("<QQ", began, now)
    if now - flushed > 400_000_000:
        writer.flush()
        flushed = now
    time.sleep(0.01)
"""
"""Records numbered rows; tells the moment it began and that of the last row where a kill cannot
take it back."""


def test_killed_at_twenty_random_moments(tmp_path: Path) -> None:
    rng = random.Random(20)
    moments = [rng.uniform(0.05, 2.0) for _ in range(20)]
    running = []
    for i, moment in enumerate(moments):
        (tmp_path / f"{i}.mcap.told").write_bytes(bytes(16))
        recorder = subprocess.Popen(
            [sys.executable, "-c", RECORDER, tmp_path / f"{i}.mcap"], stdout=subprocess.PIPE
        )
        assert recorder.stdout is not None
        assert recorder.stdout.readline() == b"ready\n"
        running.append((time.monotonic_ns() + int(moment * 1e9), recorder))
    for due, recorder in sorted(running, key=lambda pair: pair[0]):
        time.sleep(max(0, (due - time.monotonic_ns()) / 1e9))
        recorder.kill()
        recorder.wait()
    lengths = set()
    for i in range(20):
        began, last = struct.unpack("<QQ", (tmp_path / f"{i}.mcap.told").read_bytes())
        with open_file(tmp_path / f"{i}.mcap") as source:
            assert source.truncated
            assert [p for p in source.problems if "no end" in p] == list(source.problems)
            rows = source.read("marker", 0, FOREVER)
            assert rows["label"].tolist() == [str(i + 1) for i in range(len(rows))]
            load = source.read("cpu.load", 0, FOREVER)
            assert load["switches"].tolist() == list(range(1, len(rows) + 1))
            lengths.add(len(rows))
            kept = int(rows["t"][-1]) if len(rows) else began
            assert 0 <= last - kept <= SECOND
    assert len(lengths) > 3


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 2 MiB."""
    if os.geteuid() != 0:
        refuse = pytest.fail if os.environ.get("CI") == "true" else pytest.skip
        refuse("needs root to mount a tmpfs")
    at = tmp_path / "disk"
    at.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=2m", "tmpfs", at], check=True)
    try:
        yield at
    finally:
        subprocess.run(["umount", "-l", at], check=True)


def use_up(disk: Path, spare: int = 0) -> None:
    """Leave no block of a file system free but ``spare`` bytes."""
    fd = os.open(disk / "other", os.O_WRONLY | os.O_CREAT)
    try:
        while True:
            os.write(fd, bytes(4096))
    except OSError:
        os.ftruncate(fd, os.fstat(fd).st_size - spare)
        os.close(fd)


def fill(path: Path) -> tuple[StoreFull, np.ndarray]:
    """Write until the disk is full: the error, and the rows the writer was given."""
    writer = Writer(path)
    head(writer)
    taken = []

    def forever() -> None:
        for i in range(10_000):
            rows = random_rows(st.TCP_RETRANSMIT, 500, seed=i, start=T0 + i * SECOND)
            taken.append(rows)
            writer.append(st.TCP_RETRANSMIT, rows)
            writer.flush()

    with pytest.raises(StoreFull) as caught:
        forever()
    with pytest.raises(StoreFull):
        writer.append(st.TCP_RETRANSMIT, taken[0])
    with pytest.raises(StoreFull):
        writer.flush()
    writer.close()
    return caught.value, np.concatenate(taken)


def check(path: Path, why: str, taken: np.ndarray, error: StoreFull) -> None:
    with open_file(path) as source:
        rows = source.read("tcp.retransmit", 0, FOREVER)
        assert len(rows) >= 500
        assert error.lost == {"tcp.retransmit": len(taken) - len(rows)}
        assert (rows == taken[: len(rows)]).all()
        assert source.problems
        assert not source.live
        if not source.truncated:  # there was room for the end
            assert why in source.problems[0]
            assert source.lost() == error.lost
        assert source.verify() is False
        assert len(source.problems) == 1
    assert why in str(error)
    assert error.exit_code == 3


def test_a_full_disk(small_disk: Path) -> None:
    path = small_disk / "full.mcap"
    error, taken = fill(path)
    check(path, "No space left on device", taken, error)


@pytest.mark.parametrize("spare", [0, 100, 5000, 20_000])
def test_a_full_disk_at_any_point(small_disk: Path, spare: int) -> None:
    """What is left of the disk varies, so that the write fails in different places."""
    (small_disk / "other").write_bytes(bytes(100_000 + spare))
    error, taken = fill(small_disk / "full.mcap")
    check(small_disk / "full.mcap", "No space left on device", taken, error)


def test_a_full_disk_at_the_end_of_the_file(small_disk: Path) -> None:
    path = small_disk / "end.mcap"
    writer = Writer(path)
    head(writer)
    for stream, rows in host_second(0).items():
        writer.append(stream, rows)
    writer.flush()
    use_up(small_disk)
    with pytest.raises(StoreFull):
        writer.close()
    with open_file(path) as source:
        assert source.truncated
        assert len(source.read("softirq.cpu", 0, FOREVER)) == 40


@pytest.mark.parametrize("share", [0.4, 0.7, 1])
@pytest.mark.parametrize("verb", ["cut", "merge"])
def test_a_copy_onto_a_full_disk_is_not_kept(
    small_disk: Path, tmp_path: Path, verb: str, share: float
) -> None:
    """Half a copy is worth nothing, as what was copied is still there."""
    path, whole, out = tmp_path / "a.mcap", tmp_path / "whole.mcap", small_disk / "out.mcap"
    write_host(path, 30)

    def copy(to: Path) -> None:
        with open_file(path) as source:
            cut(source, to, 0, FOREVER) if verb == "cut" else merge([path], to)

    copy(whole)
    # Room for a share of it; the whole, but for its last byte.
    use_up(small_disk, int((whole.stat().st_size - 1) * share) // 4096 * 4096)
    with pytest.raises(RecordingError) as caught:
        copy(out)
    assert not out.exists()
    assert caught.value.exit_code == 1
    assert str(caught.value) == (
        f"{out}: No space left on device, so nothing was kept: make room, or name a file on another"
        " disk"
    )


def test_a_disk_with_no_room_at_all(small_disk: Path) -> None:
    use_up(small_disk)
    with pytest.raises(RecordingError, match="No space left"):
        Writer(small_disk / "x.mcap")
    assert not (small_disk / "x.mcap").exists()


def test_a_limit_on_file_size(tmp_path: Path) -> None:
    limit = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (150_000, limit[1]))
    try:
        error, taken = fill(tmp_path / "limit.mcap")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limit)
    check(tmp_path / "limit.mcap", "File too large", taken, error)
    assert (tmp_path / "limit.mcap").stat().st_size <= 150_000
