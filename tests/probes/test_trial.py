"""Placements tried out in a throwaway process, and what a hit costs."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from dsprobe.probes import driver, functions, hitcost, trial
from dsprobe.probes.placement import Placement
from dsprobe.probes.tracer import Tracer
from tests.simgpu import build
from tests.support import genuine

pytestmark = [pytest.mark.bpf, pytest.mark.tools("gcc")]


@pytest.fixture(scope="module")
def bench() -> Iterator[trial.Bench]:
    made = trial.Bench()
    yield made
    made.close()


def opened(path: Path) -> tuple[int, driver.Driver]:
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    return fd, driver.read(fd, str(path))


# Entries that lie to whoever only decodes them, beside one that does not: what each must end as.
LIARS = r"""
__asm__(".data; guard: .long 0; .text");
#define NAKED(name, text) __attribute__((naked)) int name(void) { __asm__(text); }
NAKED(cuInit, "push %rbp; pop %rbp; xor %eax, %eax; ret")
NAKED(cuGood, "cmpl $0x321cba00, guard(%rip); je 1f; 1: mov $7, %eax; ret")
NAKED(cuNever, "cmpl $0, guard(%rip); push %rbx; pop %rbx; jne 2f; 2: mov $3, %eax; ret")
NAKED(cuDies, "cmpl $0, guard(%rip); je 1f; 1: xor %eax, %eax; mov (%rax), %rax; ret")
NAKED(cuReads, "9: movzbl 9b(%rip), %eax; ret")
"""


@pytest.fixture(scope="module")
def liars(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("liars")
    (folder / "liars.c").write_text(LIARS)
    out = folder / "libcuda.so.1"
    subprocess.run(
        ["gcc", "-shared", "-fPIC", "-Wl,-z,notext", "-o", out, folder / "liars.c"],
        check=True, capture_output=True,
    )  # fmt: skip
    return out


def test_entries_of_the_simulated_driver(bench: trial.Bench) -> None:
    fd, found = opened(build.libcuda("driver") / "libcuda.so.1")
    try:
        names = [n for n in found.functions if n.startswith(("cuMem", "cuLaunch", "cuStream"))]
        verdict = bench.try_out(fd, found, names)
    finally:
        os.close(fd)
    assert verdict.refused == {}
    assert verdict.entries == {n: found.entries[n] for n in names}
    assert all(p.offset == 10 for p in verdict.entries.values())


def test_a_place_that_is_wrong_falls_back_to_the_first_instruction(
    bench: trial.Bench, liars: Path
) -> None:
    fd, found = opened(liars)
    after_push = Placement(8, True, "pop rbx", ("cmp", "push rbx"))
    wrong = replace(found, entries={**found.entries, "cuNever": after_push})
    try:
        verdict = bench.try_out(fd, wrong, ["cuGood", "cuNever"])
    finally:
        os.close(fd)
    assert verdict.refused == {}
    assert verdict.entries["cuGood"] == found.entries["cuGood"]
    assert verdict.entries["cuNever"].offset == 0
    assert not verdict.entries["cuNever"].emulated
    assert "stack" in verdict.entries["cuNever"].why


def test_a_function_that_a_probe_changes_is_refused(bench: trial.Bench, liars: Path) -> None:
    fd, found = opened(liars)
    try:
        verdict = bench.try_out(fd, found, ["cuDies", "cuGood", "cuReads"])
    finally:
        os.close(fd)
    assert set(verdict.refused) == {"cuReads"}
    assert "result" in verdict.refused["cuReads"]
    assert verdict.untried == {"cuDies"}
    assert verdict.entries["cuGood"] == found.entries["cuGood"]
    assert (verdict.entries["cuDies"].offset, verdict.entries["cuDies"].emulated) == (0, False)


def test_a_file_that_is_no_library(bench: trial.Bench, liars: Path, tmp_path: Path) -> None:
    fd, found = opened(liars)
    os.close(fd)
    broken = tmp_path / "libcuda.so.1"
    broken.write_bytes(liars.read_bytes()[:4096])
    fd = os.open(broken, os.O_RDONLY)
    try:
        with pytest.raises(OSError, match="cannot be loaded"):
            bench.try_out(fd, found, ["cuGood"])
    finally:
        os.close(fd)


def test_the_process_has_no_privileges(tmp_path: Path) -> None:
    source = r"""
        #include <fcntl.h>
        #include <unistd.h>
        int cuInit(void) { return getuid() == 65534 && getgid() == 65534 ? 0 : 1; }
        int cuShadow(void) { return open("/etc/shadow", O_RDONLY) < 0; }
        int cuFork(void) { return fork() < 0; }
        int cuWrite(void) { return open("/tmp/dsprobe-thrown-away", O_CREAT | O_WRONLY, 0600) < 0
                            || write(3, "x", 1) < 0; }
        int cuRoot(void) { return setuid(0) < 0; }
    """
    (tmp_path / "x.c").write_text(source)
    out = tmp_path / "x.so"
    subprocess.run(["gcc", "-shared", "-fPIC", "-o", out, tmp_path / "x.c"], check=True)
    fd = os.open(out, os.O_RDONLY)
    with trial.library_in_memory(fd) as copy, trial.process(copy) as target:
        names = ["cuInit", "cuShadow", "cuFork", "cuRoot"]
        results = trial._results(target.ask("call", names=names, **trial._CALL))
    os.close(fd)
    assert results == {"cuInit": 0, "cuShadow": 1, "cuFork": 1, "cuRoot": 1}


def test_every_traced_entry_of_the_genuine_driver(bench: trial.Bench) -> None:
    """This is what lets its build be among the verified."""
    fd, found = opened(genuine.library())
    names = [n for n in found.functions if functions.of_symbol(n)]
    try:
        verdict = bench.try_out(fd, found, names)
    finally:
        os.close(fd)
    assert found.build_id in trial.VERIFIED
    assert len(names) > 150
    assert verdict.refused == {}
    assert all(n.startswith("cuLink") for n in verdict.untried), verdict.untried
    for n in set(names) - verdict.untried:
        assert verdict.entries[n] == found.entries[n]
    assert [n for n in names if not found.entries[n].emulated] == []


def test_what_a_hit_costs() -> None:
    tracer = Tracer([trial.Trial()])
    try:
        tracer.load()
        cost = hitcost.measure(tracer)
        survives = hitcost.returns_survive_seccomp(tracer)
    finally:
        tracer.close()
    print(cost, survives)
    assert 0 < cost.emulated < cost.with_return < 1e6
    assert 0 < cost.stepped < 1e6
