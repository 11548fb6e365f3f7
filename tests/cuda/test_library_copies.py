"""Several paths to a library: one file beneath, or copies that look alike."""
# ruff: noqa: F811 (fixtures that another file of tests has)

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from dsprobe.probes import syscalls
from tests.cuda.counter import Counter
from tests.cuda.test_targets import CALLS, _nobody_else, at, attached, library, said, work  # noqa: F401
from tests.simgpu.target import Target
from tests.support.agents import watched
from tests.support.wait import until

pytestmark = [pytest.mark.bpf, pytest.mark.tools("gcc", "unshare")]


def test_the_same_file_behind_two_overlays_is_probed_once(tmp_path: Path, library: Path) -> None:
    """As containers of one image have it."""
    mounted, counter = [], Counter()
    try:
        for name in ("a", "b"):
            parts = {n: tmp_path / f"{n}-{name}" for n in ("upper", "work", "root")}
            for part in parts.values():
                part.mkdir()
            options = f"lowerdir={library},upperdir={parts['upper']},workdir={parts['work']}"
            command = ["mount", "-t", "overlay", "overlay", "-o", options, str(parts["root"])]
            subprocess.run(command, check=True)
            mounted.append(parts["root"])
        with watched(counter) as w:
            a, b = (Target(tmp_path / "truth", prefix=at(root)) for root in mounted)
            with a, b:
                a.start()
                until(lambda: attached(w), "it is found")
                b.start()
                until(lambda: len({pid for pid, _ in counter.seen}) == 2, "the other one, too")
                before = counter.counts()
                work(a)
                work(b)
                assert counter.counts()["cuMemAlloc_v2"] == 2 * CALLS
                a.close()
                work(b)
                assert counter.counts()["cuMemAlloc_v2"] == 3 * CALLS
                assert sum(counter.counts().values()) == sum(before.values()) + 6 * CALLS
                assert len(attached(w)) == 1
    finally:
        for root in mounted:
            command = ["umount", str(root)]
            until(lambda c=command: subprocess.run(c).returncode == 0, "nobody holds it")  # type: ignore[misc]


@pytest.fixture
def alike(tmp_path: Path, library: Path) -> Iterator[list[Path]]:
    """Two copies of one build with the same inode number, on file systems of their own."""
    mounted: list[Path] = []
    try:
        for name in ("a", "b"):
            root = tmp_path / name
            root.mkdir()
            subprocess.run(["mount", "-t", "tmpfs", "tmpfs", str(root)], check=True)
            mounted.append(root)
            shutil.copy(library / "libcuda.so.1", root)
        inodes = {(root / "libcuda.so.1").stat().st_ino for root in mounted}
        assert len(inodes) == 1
        yield mounted
    finally:
        for root in mounted:
            command = ["umount", str(root)]
            until(lambda c=command: subprocess.run(c).returncode == 0, "nobody holds it")  # type: ignore[misc]


def test_another_tracers_breakpoints_do_not_pass_for_ours(
    tmp_path: Path, alike: list[Path]
) -> None:
    """Two agents and two copies: each agent counts in both."""
    a, b = (Target(tmp_path / f"truth-{root.name}", prefix=at(root)) for root in alike)
    counters = (Counter(), Counter())
    with watched(counters[0]) as first, watched(counters[1]) as second, a, b:
        a.start()
        for w in (first, second):
            until(lambda w=w: len(attached(w)) == 1, "it is found")  # type: ignore[misc]
        b.start()
        for w, counter in zip((first, second), counters, strict=True):
            until(lambda w=w: len(attached(w)) == 2, "the other copy, too")  # type: ignore[misc]
            assert {pid for pid, _ in counter.seen} == {a.pid, b.pid}
        work(a)
        work(b)
        assert [c.counts()["cuMemAlloc_v2"] for c in counters] == [2 * CALLS, 2 * CALLS]
        names = {s.split(" (")[0] for (_, s) in first.coverage() if s.startswith(str(tmp_path))}
        assert names == {str(root / "libcuda.so.1") for root in alike}


def test_what_cannot_be_told_apart_is_traced_and_said(
    tmp_path: Path, alike: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(file: int, offset: int) -> int:
        raise OSError("no mark can be made")

    monkeypatch.setattr(syscalls, "open_mark", refuse)
    a, b = (Target(tmp_path / f"truth-{root.name}", prefix=at(root)) for root in alike)
    counter = Counter()
    with watched(counter) as w, a, b:
        a.start()
        until(lambda: len(attached(w)) == 1, "it is found")
        b.start()
        until(lambda: len(attached(w)) == 2, "the other copy, too")
        work(b)
        assert counter.counts()["cuMemAlloc_v2"] == CALLS
        [why] = [s for s in said(w, "attached") if "no mark can be made" in s]
        assert "counted twice if it is one file with another" in why
