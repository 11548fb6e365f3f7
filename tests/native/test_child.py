"""The process that reads hostile files: it can do nothing, and nothing that it does stops us."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from dsprobe.probes.native.link import Link
from dsprobe.probes.native.maps import Process, Range
from dsprobe.probes.native.symbolizer import Symbolizer
from tests.native.targets import (
    Snapshot,
    answer,
    ask,
    build,
    running,
    symbolizer,
    unwind,
)
from tests.support.wait import until

pytestmark = [pytest.mark.root, pytest.mark.tools("gcc")]


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def own(snapshot: Snapshot, path: Path) -> list[int]:
    """Return addresses in the program itself: those of its first frames."""
    ranges = [
        [int(x, 16) for x in line.split()[0].split("-")]
        for line in Path(f"/proc/{snapshot.pid}/maps").read_text().splitlines()
        if line.endswith(str(path))
    ]
    return [a for a in snapshot.truth if any(low <= a < high for low, high in ranges)]


def functions(s: Symbolizer, snapshot: Snapshot, path: Path) -> list[str]:
    return [f.function for f in ask(s, snapshot, own(snapshot, path)).frames]


@pytest.fixture(scope="module")
def chain(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build(tmp_path_factory.mktemp("child") / "chain", "chain.c")


_TRY = """
import os, socket, sys, resource
from dsprobe.probes.native import sandbox
if sys.argv[1] == "user": sandbox._CALLS.clear()
held = os.open("/etc/hostname", os.O_RDONLY)
sandbox.enter(os.getppid())
def attempt(what, action):
    try: action()
    except OSError as e: print(what, e.errno)
    else: print(what, 0)
attempt("shadow", lambda: os.open("/etc/shadow", os.O_RDONLY))
attempt("write", lambda: os.open("/etc/dsprobe-escaped", os.O_WRONLY | os.O_CREAT))
attempt("kill", lambda: os.kill(os.getppid(), 0))
attempt("root", lambda: os.setresuid(0, 0, 0))
attempt("held", lambda: os.pread(held, 4, 0))
if sys.argv[1] == "seccomp":
    attempt("hostname", lambda: os.open("/etc/hostname", os.O_RDONLY))
    attempt("socket", socket.socket)
    attempt("fork", os.fork)
    attempt("run", lambda: os.execv("/bin/true", ["true"]))
"""


@pytest.mark.parametrize("which", ["user", "seccomp"])
def test_it_can_do_nothing_but_read_what_it_holds(which: str) -> None:
    done = subprocess.run([sys.executable, "-c", _TRY, which], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    result = {w[0]: int(w[1]) for line in done.stdout.splitlines() if (w := line.split())}
    assert result.pop("held") == 0
    assert len(result) == (8 if which == "seccomp" else 4)
    assert all(result.values()), result
    assert not Path("/etc/dsprobe-escaped").exists()


def test_the_running_child_is_nobody(chain: Path) -> None:
    with running(chain) as process, symbolizer() as s:
        snapshot = Snapshot.read(process)
        assert "innermost" in functions(s, snapshot, chain)
        status = dict(
            line.split(":\t", 1)
            for line in Path(f"/proc/{s.child}/status").read_text().splitlines()
            if ":\t" in line
        )
        limits = Path(f"/proc/{s.child}/limits").read_text()
    assert set(status["Uid"].split()) == set(status["Gid"].split()) == {"65534"}
    assert status["Groups"].strip() == ""
    assert {int(status[k], 16) for k in ("CapInh", "CapPrm", "CapEff", "CapAmb")} == {0}
    assert (status["NoNewPrivs"], status["Seccomp"]) == ("1", "2")
    for line in limits.splitlines():
        if line.startswith(
            ("Max cpu time", "Max address space", "Max file size", "Max open files")
        ):
            assert "unlimited" not in line


def test_it_is_small(chain: Path) -> None:
    """After it has read the symbols of an interpreter, a C library and a C++ runtime."""
    with running(chain) as process, symbolizer() as s:
        snapshot = Snapshot.read(process)
        assert "innermost" in functions(s, snapshot, chain)
        ask(s, snapshot, snapshot.truth)
        rollup = Path(f"/proc/{s.child}/smaps_rollup").read_text()
    pss = next(int(x.split()[1]) for x in rollup.splitlines() if x.startswith("Pss:"))
    assert 1000 < pss < 20_000


def test_it_ends_with_the_agent() -> None:
    script = """
import os, time
from dsprobe.probes.native.symbolizer import Symbolizer
s = Symbolizer()
s.ask("x", 1, os.getpid(), time.monotonic_ns(), [0x400000])
while not s.answers(): time.sleep(0.01)
print(s.child, flush=True)
time.sleep(1000)
"""
    with running(sys.executable, "-c", script) as agent:
        assert agent.stdout is not None
        child = int(agent.stdout.readline())
        assert alive(child)
        agent.send_signal(signal.SIGKILL)
        until(lambda: not alive(child), "the child's end", 5)


def test_closing_ends_it(chain: Path) -> None:
    with running(chain) as process, symbolizer() as s:
        snapshot = Snapshot.read(process)
        functions(s, snapshot, chain)
        child = s.child
        s.close()
        assert not s.ask("late", 1, process.pid, snapshot.t, snapshot.truth)
        assert not Path(f"/proc/{child}").exists()


def test_a_killed_child_is_replaced(chain: Path) -> None:
    with running(chain) as process, symbolizer() as s:
        snapshot = Snapshot.read(process)
        assert "innermost" in functions(s, snapshot, chain)
        first = s.child
        os.kill(first, signal.SIGKILL)
        assert "innermost" in functions(s, snapshot, chain)
        found = unwind(s, snapshot)
        assert [f.function for f in found.frames][1] == "innermost"
        assert s.child not in (0, first)


def test_a_child_that_hangs_is_replaced_and_nobody_waits(chain: Path) -> None:
    with running(chain) as process, symbolizer(wall_s=0.5) as s:
        snapshot = Snapshot.read(process)
        assert "innermost" in functions(s, snapshot, chain)
        first = s.child
        os.kill(first, signal.SIGSTOP)
        begun = time.monotonic()
        s.unwind("hung", 1, process.pid, snapshot.t, snapshot.registers, snapshot.copy)
        s.answers()
        assert time.monotonic() - begun < 0.4  # the thread waits, and we do not
        assert "innermost" in [f.function for f in answer(s, "hung").frames]
        until(lambda: not alive(first), "the hung child's end", 5)


def bomb(levels: int) -> str:
    """A mangled name of some hundred characters that stands for 2**levels of them: each template
    argument is twice the one before (Itanium C++ ABI, 5.1.9)."""

    def reference(n: int) -> str:
        digits = "0123456789ABCDEFGHIJKLMNOPQRSTUVWXYZ"
        text = ""
        while True:
            text = digits[n % 36] + text
            n //= 36
            if not n:
                return f"S{text}_"

    return "_Z1f1PIiiE" + "".join(f"S_I{reference(k)}{reference(k)}E" for k in range(levels))


def test_a_file_that_hangs_the_parser_is_put_aside(tmp_path: Path, chain: Path) -> None:
    source = tmp_path / "bomb.c"
    source.write_text(
        '#include "snapshot.h"\n'
        f'__attribute__((noipa)) int evil(void) __asm__("{bomb(60)}");\n'
        "int evil(void) { take_snapshot(); return 1; }\n"
        "int main(void) { return evil() + 1; }\n"
    )
    evil = build(tmp_path / "evil", source, "-Wl,--build-id")
    with running(evil) as process, running(chain) as good, symbolizer(cpu_s=0.4) as s:
        snapshot, healthy = Snapshot.read(process), Snapshot.read(good)
        where = own(snapshot, evil)
        s.ask("evil", 1, process.pid, snapshot.t, where)
        s.ask("good", 2, good.pid, healthy.t, own(healthy, chain))
        s.ask("again", 1, process.pid, snapshot.t, snapshot.truth)
        answers = []
        until(lambda: answers.extend(s.answers()) or len(answers) == 3, "all answers", 30)
        child = s.child
        by_key = {a.key: a for a in answers}
        assert "innermost" in [f.function for f in by_key["good"].frames]
        for frame in by_key["evil"].frames:
            assert (frame.function, frame.module) == ("", str(evil))
            assert frame.offset > 0
        # What else it maps is read on, by the same child.
        again = {f.function for f in by_key["again"].frames if f.module != str(evil)}
        assert any("libc_start" in f for f in again)
        assert ask(s, snapshot, where).frames == by_key["evil"].frames
        assert s.child == child


def test_more_questions_than_fit_are_refused_and_counted(chain: Path) -> None:
    with running(chain) as process, symbolizer() as s:
        snapshot = Snapshot.read(process)
        copy = bytes(60_000)
        taken = 0
        for i in range(400):
            taken += s.unwind(i, 1, process.pid, snapshot.t, snapshot.registers, copy)
        assert taken < 400
        assert s.refused == 400 - taken
        keys: list[object] = []
        until(lambda: keys.extend(a.key for a in s.answers()) or len(keys) == taken, "answers", 30)
    assert keys == sorted(keys)  # type: ignore[type-var]


def test_a_file_that_hangs_when_opened_is_left_out(
    tmp_path: Path, chain: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As one does on a file system of somebody's own making that does not answer."""
    stuck = build(tmp_path / "stuck", "chain.c")
    let_go = threading.Event()
    opened = Process.open

    def hanging(self: Process, r: Range) -> tuple[int, os.stat_result]:
        if r.path == str(stuck):
            let_go.wait()
        return opened(self, r)

    monkeypatch.setattr(Process, "open", hanging)
    try:
        with running(stuck) as process, running(chain) as good, symbolizer(stuck_s=0.5) as s:
            snapshot, healthy = Snapshot.read(process), Snapshot.read(good)
            begun = time.monotonic()
            s.ask("stuck", 1, process.pid, snapshot.t, own(snapshot, stuck))
            s.ask("good", 2, good.pid, healthy.t, own(healthy, chain))
            s.answers()
            assert time.monotonic() - begun < 0.4
            answers = []
            until(lambda: answers.extend(s.answers()) or len(answers) == 2, "both answers", 30)
            by_key = {a.key: a for a in answers}
            assert "innermost" in [f.function for f in by_key["good"].frames]
            assert by_key["stuck"].note == "a file cannot be opened"
            # From now on it is known by file and offset alone, and the rest has names.
            later = ask(s, snapshot, snapshot.truth)
            assert {f.function for f in later.frames if f.module == str(stuck)} == {""}
            assert any("libc_start" in f.function for f in later.frames)
    finally:
        let_go.set()


def test_a_child_that_has_worked_for_long_is_renewed(
    chain: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its CPU limit would end it in the middle of some file, which would be blamed."""
    with running(chain) as process, symbolizer() as s:
        snapshot = Snapshot.read(process)
        assert "innermost" in functions(s, snapshot, chain)
        first = s.child
        used = Link.cpu
        monkeypatch.setattr(Link, "cpu", lambda it: 3000.0 if it.pid == first else used(it))
        assert unwind(s, snapshot).frames[1].function == "innermost"
        assert s.child != first
        assert not alive(first)
