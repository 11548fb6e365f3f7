"""Placements tried out in a throwaway process, and what a hit costs."""

from __future__ import annotations

import os
import resource
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from dsprobe.probes import driver, functions, hitcost, trial
from dsprobe.probes.placement import Placement
from dsprobe.probes.tracer import Tracer
from tests.simgpu import build
from tests.support import genuine
from tests.support.wait import until

pytestmark = [pytest.mark.bpf, pytest.mark.tools("gcc")]


@pytest.fixture(scope="module")
def bench() -> Iterator[trial.Bench]:
    made = trial.Bench()
    yield made
    made.close()


def opened(path: Path) -> tuple[int, driver.Driver]:
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    return fd, driver.read(fd, str(path), traced=bool)


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


# What a library may try from its constructor on; each function says whether it was kept from it.
HOSTILE = r"""
#define _GNU_SOURCE
#include <fcntl.h>
#include <signal.h>
#include <stdio.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <unistd.h>
int cuInit(void) { return getuid() == 65534 && getgid() == 65534; }
int cuShadow(void) { return open("/etc/shadow", O_RDONLY) < 0 &&
                            open("/etc/passwd", O_RDONLY) < 0; }
int cuWrite(void) { return open("/tmp/x", O_CREAT | O_WRONLY, 0600) < 0 &&
                           open("/x", O_CREAT | O_WRONLY, 0600) < 0; }
int cuFork(void) { return fork() < 0; }
int cuRoot(void) { return setuid(0) < 0; }
int cuSocket(void) { return socket(AF_UNIX, SOCK_STREAM, 0) < 0 &&
                            socket(AF_INET, SOCK_STREAM, 0) < 0; }
int cuKill(void) { return kill(1, 0) < 0 && kill(-1, 0) < 0; }
int cuStay(void) { return prctl(PR_SET_PDEATHSIG, 0) < 0; }
int cuOthers(void) { return getppid() == 0 && getpid() == 1; }
int cuTrace(void) { return syscall(SYS_ptrace, 16, 1, 0, 0) < 0; }
int cuRun(void) { return execl("/bin/true", "true", (char *)0) < 0; }
"""
ENDLESS = r"""
#include <unistd.h>
int cuInit(void) { return 0; }
__attribute__((constructor)) static void begin(void) { %s }
"""
TALK = """for (;;) write(1, "{\\"name\\":[{},{}]}\\n{\\"name\\":\\"x\\"}\\n", 36);"""


def hostile(folder: Path, source: str) -> int:
    (folder / "x.c").write_text(source)
    out = folder / "libcuda.so.1"
    subprocess.run(["gcc", "-shared", "-fPIC", "-o", out, folder / "x.c"], check=True)
    return os.open(out, os.O_RDONLY)


def test_the_process_is_alone_and_has_no_privileges(tmp_path: Path) -> None:
    fd = hostile(tmp_path, HOSTILE)
    names = ["cuInit", "cuShadow", "cuWrite", "cuFork", "cuRoot", "cuSocket", "cuKill", "cuStay",
             "cuOthers", "cuTrace", "cuRun"]  # fmt: skip
    with trial.library_in_memory(fd) as copy, trial.process(copy) as target:
        results = trial._results(target.ask("call", names=names, **trial._CALL))
    os.close(fd)
    assert results == dict.fromkeys(names, 1)


@pytest.mark.parametrize("does", ["for (;;) pause();", "for (;;);", TALK])
def test_a_library_that_never_comes_back(
    tmp_path: Path, does: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(trial, "SECONDS", 0.5)
    fd = hostile(tmp_path, ENDLESS % does)
    with trial.library_in_memory(fd) as copy, trial.process(copy) as target:
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        with pytest.raises(trial.Died):
            target.ask("call", names=["cuInit"], **trial._CALL)
        assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 20 << 10  # KiB
        inner = children(target._process.pid)
        assert inner
    os.close(fd)
    until(lambda: not any(map(running, inner)), "it is gone")


def test_it_ends_with_whoever_tries(tmp_path: Path) -> None:
    """Killed in the middle, a tracer leaves nothing behind."""
    fd = hostile(tmp_path, ENDLESS % "for (;;) pause();")
    code = (
        "import sys; from dsprobe.probes import trial; t = trial.Throwaway(int(sys.argv[1]));"
        "print(t._process.pid, flush=True); t.ask('call', names=['cuInit'], **trial._CALL);"
        "import time; time.sleep(60)"
    )
    tracer = subprocess.Popen(
        [sys.executable, "-c", code.replace("t.ask", "trial.SECONDS = 60; t.ask"), str(fd)],
        pass_fds=[fd], stdout=subprocess.PIPE, text=True,
    )  # fmt: skip
    os.close(fd)
    try:
        assert tracer.stdout
        outer = int(tracer.stdout.readline())
        inner = until(lambda: children(outer), "it has shut itself in")
    finally:
        tracer.kill()
        tracer.communicate()
    until(lambda: not any(map(running, [outer, *inner])), "it is gone")


def children(pid: int) -> list[int]:
    try:
        text = Path(f"/proc/{pid}/task/{pid}/children").read_text()
    except OSError:
        return []
    return [int(x) for x in text.split()]


def running(pid: int) -> bool:
    try:
        return "Z" not in Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return False


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
