"""No user takes all places that there are for processes and libraries."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from dsprobe.agent import discovery, libraries, libraryfiles, targets
from dsprobe.agent.shares import room
from tests.cuda.counter import Counter
from tests.cuda.test_discovery import Hosts, hosts, seen  # noqa: F401
from tests.cuda.test_targets import attached, said
from tests.support.agents import Watched, watched
from tests.support.wait import until

USER = 12345
pytestmark = [pytest.mark.bpf, pytest.mark.tools("gcc")]

HOLD = f"""
import mmap, os, sys
f = open(sys.argv[1], "rb")
os.setuid({USER})
m = mmap.mmap(f.fileno(), 0, prot=mmap.PROT_READ | mmap.PROT_EXEC)
print("up", flush=True)
sys.stdin.read()
"""


def test_a_user_has_a_quarter_and_root_all() -> None:
    assert room([], 1, 8)
    assert room([1, 2, 2], 1, 8)
    assert not room([1, 2, 1], 1, 8)
    assert room([0] * 7, 0, 8)
    assert not room([0] * 8, 0, 8)
    assert not room([2] * 8, 1, 8)
    assert room([0, 0], 1, 3)  # one at least


@pytest.fixture
def theirs() -> Iterator[Callable[[Path], int]]:
    """Have an ordinary user map a file; the PID."""
    running: list[subprocess.Popen[bytes]] = []

    def hold(path: Path) -> int:
        command = [sys.executable, "-c", HOLD, str(path)]
        p = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        running.append(p)
        assert p.stdout
        assert p.stdout.readline() == b"up\n"
        return p.pid

    yield hold
    for p in running:
        p.communicate(b"")


def left_out(w: Watched) -> str:
    return w.coverage()["counter", ""].reason


def test_processes_of_one_user(
    hosts: Hosts, theirs: Callable[[Path], int], tmp_path: Path,  # noqa: F811
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    monkeypatch.setattr(targets, "MAX_PROCESSES", 4)
    hosts.hold("a")
    library = tmp_path / "a" / "libcuda.so.1"
    counter = Counter()
    with watched(counter) as w:
        until(lambda: attached(w), "it is found")
        three = {theirs(library) for _ in range(3)}
        until(lambda: f"not all of user {USER} are seen" in left_out(w), "it is said")
        root = hosts.hold("a")
        until(lambda: root in seen(counter), "root's is followed")
        assert len(seen(counter) & three) == 1


def test_libraries_of_one_user_and_those_that_are_none(
    hosts: Hosts, theirs: Callable[[Path], int], tmp_path: Path,  # noqa: F811
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    monkeypatch.setattr(libraries, "MAX_LIBRARIES", 4)
    monkeypatch.setattr(discovery, "AGAIN_NS", 1)
    for name in ("a", "b", "c"):
        hosts.hold(name)
    hosts.end()
    paths = {n: tmp_path / n / "libcuda.so.1" for n in ("a", "b", "c", "evil")}
    paths["evil"].parent.mkdir()
    paths["evil"].write_bytes(b"not a library" * 1000)
    with watched(Counter()) as w:
        theirs(paths["evil"])
        until(lambda: said(w, "missing"), "it is no library")
        theirs(paths["a"])
        until(lambda: attached(w, "/a/"), "a good one takes its place")
        assert "one that can be traced has its place" in said(w, "detached")
        theirs(paths["b"])
        until(lambda: f"not all of user {USER} are seen" in left_out(w), "it is said")
        hosts.hold("c")
        until(lambda: attached(w, "/c/"), "root's is traced")
        assert not attached(w, "/b/")


def test_files_of_one_user_that_are_read(
    hosts: Hosts, theirs: Callable[[Path], int], tmp_path: Path,  # noqa: F811
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    monkeypatch.setattr(libraryfiles, "READS", 4)
    for name in ("a", "b", "c"):
        hosts.hold(name)
    hosts.end()
    with watched(Counter()) as w:
        theirs(tmp_path / "a" / "libcuda.so.1")
        until(lambda: attached(w, "/a/"), "their first is read")
        theirs(tmp_path / "b" / "libcuda.so.1")
        [why] = until(lambda: said(w, "missing"), "their second is not")
        assert why.endswith(f"too many new libraries in a minute of user {USER}")
        hosts.hold("c")
        until(lambda: attached(w, "/c/"), "root's is read")
