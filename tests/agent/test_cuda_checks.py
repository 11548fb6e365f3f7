"""What doctor says of processes that use CUDA."""

from __future__ import annotations

import contextlib
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from dsprobe.agent import cudachecks
from dsprobe.agent.check import LIMITED, OK, Check
from dsprobe.probes import driver, functions, hitcost
from tests.simgpu.target import Target
from tests.support import genuine

pytestmark = [pytest.mark.bpf, pytest.mark.tools("gcc")]


def said(word: str) -> list[Check]:
    return [c for c in cudachecks.cuda_checks(False) if word in c.detail or word in c.name]


def of_process(pid: int) -> Check:
    """What is said of the library of ``pid``; others may have it mapped too."""
    named = re.compile(rf"mapped by PID [^:]*\b{pid}\b")
    (check,) = [c for c in cudachecks.cuda_checks(False) if named.search(c.detail)]
    return check


@pytest.fixture
def target(tmp_path: Path) -> Iterator[Target]:
    with Target(tmp_path) as made:
        made.start()
        yield made


def test_a_process_and_its_library(target: Target) -> None:
    check = of_process(target.pid)
    assert check.status == OK
    assert "libcuda.so.1" in check.detail
    assert "tried out in a process of its own" in check.detail
    mapped = driver.mapped_by(target.pid)
    assert mapped
    with driver.opened(mapped) as fd:
        found = driver.read(fd, mapped.path)
    traced = [n for n in found.functions if functions.of_symbol(n)]
    assert f"{len(traced)} of its {len(found.functions)} functions are traced" in check.detail


def test_what_a_hit_costs_is_said() -> None:
    (check,) = said("probe cost")
    assert check.status == OK
    assert "a hit costs a process" in check.detail


def test_each_place_where_asked(target: Target) -> None:
    placed = [c for c in cudachecks.cuda_checks(True) if c.name == "  cuMemAlloc_v2"]
    assert placed  # others on this machine may have a library of theirs mapped
    assert all(c.status == OK and c.detail.startswith("at +10, je ") for c in placed)


def test_the_genuine_library() -> None:
    library = genuine.library()
    code = f"import ctypes, sys; ctypes.CDLL({str(library)!r}); print(flush=True); sys.stdin.read()"
    process = subprocess.Popen(
        [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    try:
        assert process.stdout
        process.stdout.readline()
        check = of_process(process.pid)
    finally:
        process.kill()
        process.communicate()
    assert check.status == OK
    assert f"driver {library.name.removeprefix('libcuda.so.')}" in check.detail
    assert "this build's entries are known" in check.detail


def test_a_kernel_on_which_a_return_probe_may_kill(monkeypatch: pytest.MonkeyPatch) -> None:
    """That such a kernel is told apart is hitcost's test."""
    assert said("seccomp") == []
    monkeypatch.setattr(hitcost, "returns_survive_seccomp", lambda tracer: False)
    (check,) = said("seccomp")
    assert check.status == LIMITED
    assert "probes on entries only" in check.detail
    assert check.fix


def test_so_many_libraries_are_tried_out_and_no_more(
    target: Target, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cudachecks, "_SHOWN_LIBRARIES", 0)
    (check,) = said("not looked at here")
    assert check.status == LIMITED
    assert said("libcuda.so.1, mapped by") == []


def test_a_process_that_holds_a_device_without_the_library(tmp_path: Path) -> None:
    devices = (Path(f"/dev/nvidia{n}") for n in range(250, 300))
    device = next(path for path in devices if not path.exists())
    device.touch()
    try:
        with device.open():
            (check,) = said("NVIDIA device")
    finally:
        with contextlib.suppress(OSError):
            device.unlink()
    assert check.status == LIMITED
    assert f"PID {os.getpid()}:" in check.detail
