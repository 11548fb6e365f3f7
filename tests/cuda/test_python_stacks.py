"""Python stacks against the truth that Python itself takes inside the called function."""

from __future__ import annotations

import os
import select
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from dsprobe.probes.calls import Calls
from dsprobe.probes.elf import ElfError, Library
from dsprobe.probes.memory import Memory
from tests.cuda.stackview import (
    NATIVE,
    Load,
    allocations,
    compare,
    frames,
    places,
    said,
    told,
)  # fmt: skip
from tests.cuda.tracing import Tracing, tracing
from tests.simgpu import truth
from tests.simgpu.run import environment, workload
from tests.support import pythons
from tests.support.pythons import Python
from tests.support.wait import until

pytestmark = pytest.mark.bpf
RAN: set[str] = set()
"""Versions whose stacks have been compared in this run."""


@pytest.fixture(scope="module")
def it() -> Iterator[Tracing]:
    with tracing(Memory, Calls) as it:
        it.cuda.config["slow_ns"] = 0  # every call with its stack
        yield it


@pytest.fixture(params=pythons.VERSIONS)
def python(request: pytest.FixtureRequest) -> Python:
    found = pythons.find(request.param)
    if found is None:
        pytest.skip(f"no Python {request.param} here")  # enough of them: test_versions
    return found


@pytest.fixture
def own() -> Python:
    """This machine's."""
    found = pythons.find("3.11")
    assert found
    return found


def run(it: Tracing, python: Python, folder: Path, *words: str) -> Load:
    """The load ``stacks``, from its gate to its end, with all it says."""
    load = Load(python, folder, "tests.simgpu.workloads.stacks", "gate=1", *words)
    assert load.gate() == "ready"
    version = it.cuda.stacks.process_seen(load.process.pid)
    assert version.split(".")[:2] == python.version.split("."), version
    load.go()
    until(lambda: (it.step(), load.process.stdout and _ready(load))[1], "it has done its work")
    assert load.gate() == "done"
    return load


def _ready(load: Load) -> bool:
    return bool(select.select([load.process.stdout], [], [], 0)[0])


def test_stacks_equal_truth(it: Tracing, python: Python, tmp_path: Path) -> None:
    load = run(it, python, tmp_path, "repeat=3", "depth=60", "functions=30")
    stacks = compare(it, load, 100)
    load.end()
    assert not [s for stack in stacks.values() for s in said(stack)]
    for stack in stacks.values():
        kinds = [kind for kind, _ in stack]
        assert kinds[0] == NATIVE, "the caller in native code comes first"
        assert kinds == sorted(kinds, key=[NATIVE, "python", "status"].index)
    RAN.add(python.version)


def test_versions() -> None:
    """Enough of them ran; says which."""
    print("stacks were compared on Python", ", ".join(sorted(RAN)))
    assert "3.11" in RAN
    assert len(RAN & {"3.10", "3.12", "3.13", "3.14"}) >= 2, RAN


def test_deeper_than_is_kept(it: Tracing, python: Python, tmp_path: Path) -> None:
    load = run(it, python, tmp_path, "repeat=2", "depth=300", "shapes=deep")
    pids = {load.process.pid}
    until(lambda: (it.step(), allocations(it, pids))[1], "its allocations have come")
    stacks = _settled(it, pids)
    told_by_size = {r["bytes"]: told(r) for r in load.truth()}
    for size, stack in allocations(it, pids):
        got = places(stacks[stack])
        assert 100 < len(got) <= 128
        assert got == told_by_size[size][: len(got)]
        assert said(stacks[stack]) == ["deeper than 128 Python frames"]
    load.end()


def _settled(it: Tracing, pids: set[int]) -> dict[int, list[tuple[str, object]]]:
    """Stacks, once those of all allocations are there."""

    def all_there() -> bool:
        it.step()
        known = set(it.rows("meta.stack")["id"].tolist())
        return all(s in known for _, s in allocations(it, pids))

    until(all_there, "stacks have come")
    return frames(it)


def test_descendants(it: Tracing, python: Python, tmp_path: Path) -> None:
    """Forked ones are readable from their first call on; one started anew once it was seen."""
    load = Load(python, tmp_path, "tests.cuda.stackfamily")
    assert load.gate().startswith("ready")
    it.cuda.stacks.process_seen(load.process.pid)
    load.go()
    word, pid = load.gate().split()
    assert word == "anew"
    it.cuda.stacks.process_seen(int(pid))
    load.go()
    assert load.gate().startswith("done")
    load.end()
    stacks = compare(it, load, 3 * 5)
    assert not [s for stack in stacks.values() for s in said(stack)]


@pytest.mark.parametrize("threads", [40, 600])
def test_odd_places(it: Tracing, python: Python, tmp_path: Path, threads: int) -> None:
    """A thread that is not among the first of its process has a stack that says so."""
    load = Load(python, tmp_path, "tests.cuda.stackedges", str(threads))
    assert load.gate() == "ready"
    it.cuda.stacks.process_seen(load.process.pid)
    load.go()
    until(lambda: (it.step(), _ready(load))[1], "it has done its work")
    assert load.gate() == "done"
    pids = {load.process.pid}
    want = [r for r in load.truth() if r["symbol"] == "cuMemAlloc_v2"]
    assert {r["shape"] for r in want} >= {"holding", "in_a_handler", "in_a_finaliser", "thread"}
    until(lambda: (it.step(), len(allocations(it, pids)) == len(want))[1], "they have come")
    stacks = _settled(it, pids)
    load.end()
    traced = dict(allocations(it, pids))
    for row in want:
        stack = stacks[traced[row["bytes"]]]
        # The main thread was known from before: what is remembered of a thread stays right.
        assert places(stack) == told(row), row["shape"]
        assert said(stack) == []


def test_a_thread_behind_many(it: Tracing, own: Python, tmp_path: Path) -> None:
    """One that calls for the first time, and is not among the first 512 of its process."""
    load = Load(own, tmp_path, "tests.cuda.stackedges", "600", "quiet")
    assert load.gate() == "ready"
    it.cuda.stacks.process_seen(load.process.pid)
    load.go()
    assert load.gate() == "done"
    pids = {load.process.pid}
    until(lambda: (it.step(), len(allocations(it, pids)) == 4)[1], "they have come")
    stacks = _settled(it, pids)
    load.end()
    sentences = [said(stacks[s]) for _, s in allocations(it, pids)]
    assert sentences.count([]) == 3
    assert sentences[-1] == ["lost: the thread is not among the first 512 of its process"]


def test_interpreters_within(it: Tracing, python: Python, tmp_path: Path) -> None:
    """Which of several interpreters a thread runs is not known: it is right, or said."""
    load = Load(python, tmp_path, "tests.cuda.stackinterpreters")
    assert load.gate() == "ready"
    it.cuda.stacks.process_seen(load.process.pid)
    load.go()
    assert load.gate() == "done"
    pids = {load.process.pid}
    sizes = [1000, 2000, 3000, 3001, 4000, 4001, 5000]
    until(lambda: (it.step(), len(allocations(it, pids)) == len(sizes))[1], "they have come")
    stacks = _settled(it, pids)
    load.end()
    within = ["within", "calls_within", "<module>"]
    for size, number in allocations(it, pids):
        stack = stacks[number]
        names = [name for name, _, _ in places(stack)]
        if size == 2000:
            assert names[:5] == ["Driver.call", "Driver.ok", "Driver.get", "outside", "main"] or (
                python.version == "3.10" and names[:5] == ["call", "ok", "get", "outside", "main"]
            )
        if not names and size != 1000:
            assert said(stack) == ["lost: the thread runs several interpreters"]
        elif size in (3000, 4000):
            assert names == within
        elif size != 1000:
            assert "outside" in names
            assert "within" not in names


def test_target_in_a_pid_namespace(it: Tracing, own: Python, tmp_path: Path) -> None:
    load = Load(
        own, tmp_path, "tests.simgpu.workloads.stacks", "gate=1", "repeat=1",
        prefix=["unshare", "-pf", "--mount-proc"],
    )  # fmt: skip
    assert load.gate() == "ready"
    children = Path(f"/proc/{load.process.pid}/task/{load.process.pid}/children").read_text()
    it.cuda.stacks.process_seen(int(children))
    load.go()
    assert load.gate() == "done"
    load.end()
    want = [r for r in load.truth() if r["symbol"] == "cuMemAlloc_v2" and r["bytes"] != 4096]
    until(lambda: (it.step(), len(_by_size(it, want)) == len(want))[1], "they have come")
    stacks = _settled(it, {r["pid"] for r in want})
    got = _by_size(it, want)
    for row in want:
        assert told(row) in [places(stacks[s]) for s in got[row["bytes"]]]


def _by_size(it: Tracing, rows: list[dict[str, int]]) -> dict[int, list[int]]:
    found: dict[int, list[int]] = {}
    for size, stack in allocations(it, {r["pid"] for r in rows}):
        found.setdefault(size, []).append(stack)
    return found


def run_until_done(it: Tracing, load: Load) -> None:
    load.go()
    until(lambda: (it.step(), _ready(load))[1], "it has done its work")
    assert load.gate() == "done"
    load.end()


def test_a_version_that_is_not_known(it: Tracing, own: Python, tmp_path: Path) -> None:
    """A Python that says it is another: its stacks say why they are not read, and no more."""
    program = tmp_path / "python3.11"
    shutil.copy(own.program, program)
    with program.open("r+b") as f:
        library = Library(f.fileno())
        address = library.addresses("Py_Version")["Py_Version"]
        offset = next(o for o in range(0, program.stat().st_size, 4096)
                      if _address(library, o) == address // 4096 * 4096)  # fmt: skip
        f.seek(offset + address % 4096)
        f.write((0x031402F0).to_bytes(8, "little"))
    load = Load(
        Python("3.11", str(program)), tmp_path, "tests.simgpu.workloads.stacks", "gate=1",
        "repeat=1", env_more={"PYTHONHOME": "/usr"},
    )  # fmt: skip
    assert load.gate() == "ready"
    reason = "Python 3.20.2 is not known; those from 3.10 to 3.15 are"
    assert it.cuda.stacks.process_seen(load.process.pid) == reason
    run_until_done(it, load)
    pids = {load.process.pid}
    until(lambda: (it.step(), allocations(it, pids))[1], "its allocations have come")
    stacks = _settled(it, pids)
    for _, stack in allocations(it, pids):
        assert places(stacks[stack]) == []
        assert said(stacks[stack]) == [reason]
    them = it.rows("meta.process")
    assert set(them[them["pid"] == load.process.pid]["python"]) == {reason}


def _address(library: Library, offset: int) -> int:
    try:
        return library.address_of(offset)
    except ElfError:
        return -1


def test_before_it_was_looked_at(it: Tracing, own: Python, tmp_path: Path) -> None:
    """Stacks from before say so; those after are whole."""
    load = Load(own, tmp_path, "tests.simgpu.workloads.stacks", "gate=1", "repeat=1")
    assert load.gate() == "ready"
    load.go()  # nobody has looked at it: that happens when its first call has been seen
    assert load.gate() == "done"
    load.end()
    pids = {load.process.pid}
    until(lambda: (it.step(), allocations(it, pids))[1], "its allocations have come")
    stacks = _settled(it, pids)
    for _, stack in allocations(it, pids):
        assert places(stacks[stack]) == []
        assert said(stacks[stack]) == ["Python not looked at yet"]


def test_a_program_without_python(it: Tracing, tmp_path: Path) -> None:
    """Its caller, and nothing about Python."""
    process = subprocess.Popen(
        workload("forks", children=1, count=5, gate=1), env=environment(tmp_path),
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
    )  # fmt: skip
    assert process.stdout
    assert process.stdout.readline()
    assert it.cuda.stacks.process_seen(process.pid) == ""
    process.communicate("")
    pids = {p.pid for p in truth.read_all(tmp_path)}
    until(lambda: (it.step(), allocations(it, pids))[1], "its allocations have come")
    stacks = _settled(it, pids)
    for _, stack in allocations(it, pids):
        assert stacks[stack][0][0] == NATIVE
        assert not [x for x in said(stacks[stack]) if "Python" in x]  # it may have ended


def test_native_frames_below_python(own: Python, tmp_path: Path) -> None:
    """With unwinding: how Python came to call the driver, down to the interpreter."""
    with tracing(Memory, unwind=True) as it:
        load = Load(own, tmp_path, "tests.simgpu.workloads.stacks", "gate=1", "repeat=1",
                    "shapes=plain,through_c,generator,thread")  # fmt: skip
        assert load.gate() == "ready"
        it.cuda.stacks.process_seen(load.process.pid)
        load.go()
        assert load.gate() == "done"
        stacks = compare(it, load, 9, waits=False)  # it lives until its addresses have names
        load.end()
        for stack in stacks.values():
            modules = [r["module"] for kind, r in stack if kind == NATIVE]
            assert len(modules) >= 3, "libffi and _ctypes are between the driver and Python"
            assert any("_ctypes" in m for m in modules)
            assert not any(m == own.program for m in modules[1:])
            assert said(stack) == []


def test_traced_from_a_pid_namespace() -> None:
    """Some of this file again, with us in a PID namespace of our own."""
    done = subprocess.run(
        ["unshare", "-pf", "--mount-proc", sys.executable, "-m", "pytest", "-q", "-x", __file__,
         "-p", "no:cacheprovider", "-k", "equal_truth and 3.11 or descendants and 3.11"],
        capture_output=True, text=True, timeout=120, env=os.environ | {"CI": "true"},
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]
    assert "2 passed" in done.stdout
