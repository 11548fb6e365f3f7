"""Processes that use CUDA are found however they come, and let go of when they have gone.

Truth is what the simulated driver writes down of each call.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from dsprobe.probes import driver
from tests.cuda.counter import Counter
from tests.simgpu import build, truth
from tests.simgpu.run import environment, workload
from tests.simgpu.target import OUT, Target
from tests.support.agents import Watched, watched
from tests.support.wait import until

pytestmark = [pytest.mark.bpf, pytest.mark.tools("gcc", "unshare")]

CALLS = 7


def attached(w: Watched, path: str = "") -> list[int]:
    """When each library (at ``path``) got its probes."""
    rows = w.rows("meta.placement")
    return sorted({int(r["t"]) for r in rows if path in r["library"]})


def said(w: Watched, status: str) -> list[str]:
    """Reasons of the programs of the probe in that state."""
    return [s.reason for (_, program), s in w.coverage().items() if program and s.status == status]


def work(target: Target) -> None:
    for _ in range(CALLS):
        address = target.ok("cuMemAlloc_v2", OUT, 4096)
        target.ok("cuMemFree_v2", address)


def true_counts(*processes: truth.Process, since: int = 0) -> dict[str, int]:
    """Calls of each function that began from ``since`` on."""
    out: dict[str, int] = {}
    for p in processes:
        assert p.lost == 0
        for e in p.events[p.events["begun"] >= since]:
            name = p.symbols[e["symbol"]]
            out[name] = out.get(name, 0) + 1
    return out


def found_in_time(w: Watched, p: truth.Process) -> None:
    """Its library had probes within a second of being mapped."""
    late = attached(w)[-1] - p.opened
    assert late < 1_000_000_000, f"attached {late / 1e6:.0f} ms after it was mapped"


@pytest.fixture(autouse=True)
def _nobody_else(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Whatever else this host runs with a driver library is none of these tests' business."""
    real = driver.libraries_of

    def ours(pid: int, proc: Path = Path("/proc")) -> list[driver.Mapped]:
        return [m for m in real(pid, proc) if m.path.startswith(str(tmp_path))]

    monkeypatch.setattr(driver, "libraries_of", ours)


@pytest.fixture
def library(tmp_path: Path) -> Path:
    """A folder with a driver library of this test alone, so that nobody else maps it."""
    made = tmp_path / "library"
    shutil.copytree(build.libcuda(), made, symlinks=True)
    return made


def at(library: Path, *prefix: str) -> list[str]:
    """Words before a command that have it find the driver in ``library``."""
    return [*prefix, "env", f"LD_LIBRARY_PATH={library}"]


IN_NAMESPACE = ("unshare", "--pid", "--fork", "--kill-child", "--mount-proc")


@contextmanager
def script(folder: Path, library: Path, text: str) -> Iterator[subprocess.Popen[str]]:
    """Python text with a driver; it is told to go on by lines on its standard input, and ends when
    that does."""
    driver = "import sys; from tests.simgpu.driver import Driver\n"
    process = subprocess.Popen(
        [*at(library), sys.executable, "-c", driver + textwrap.dedent(text)],
        env=environment(folder), text=True, stdin=subprocess.PIPE, stdout=subprocess.PIPE,
    )  # fmt: skip
    try:
        yield process
    finally:
        process.communicate("", timeout=20)


def test_one_that_was_running_before(tmp_path: Path, library: Path) -> None:
    counter = Counter()
    with Target(tmp_path / "truth", prefix=at(library)) as t:
        t.start()
        work(t)
        with watched(counter) as w:
            until(lambda: attached(w, str(library)), "it is found")
            since = attached(w, str(library))[0]
            work(t)
            work(t)
            assert counter.counts() == true_counts(t.truth, since=since)
            assert counter.counts()["cuMemAlloc_v2"] == 2 * CALLS
            assert counter.counts("returns") == counter.counts()
            assert w.coverage()["counter", ""].status == "attached"
            assert (t.pid, str(library / "libcuda.so.1")) in [(p, d.path) for p, d in counter.seen]


@pytest.mark.parametrize("prefix", [(), IN_NAMESPACE], ids=["host", "first of a namespace"])
def test_one_that_loads_it_later(tmp_path: Path, library: Path, prefix: tuple[str, ...]) -> None:
    counter = Counter()
    with watched(counter) as w, Target(tmp_path / "truth", prefix=at(library, *prefix)) as t:
        assert "no process has libcuda.so mapped" in w.coverage()["counter", ""].reason
        t.start()
        until(lambda: attached(w, str(library)), "it is found")
        found_in_time(w, t.truth)
        before = sum(true_counts(t.truth, since=attached(w)[0]).values())
        work(t)
        assert counter.counts() == true_counts(t.truth, since=attached(w)[0])
        assert sum(counter.counts().values()) == before + 2 * CALLS


def test_children_by_fork_of_a_process_that_has_mapped_it(tmp_path: Path, library: Path) -> None:
    counter = Counter()
    with watched(counter) as w, Target(tmp_path / "truth", prefix=at(library)) as t:
        t.start()
        until(lambda: attached(w, str(library)), "it is found")
        since = attached(w)[0]
        work(t)
        t.fork(["cuCtxSetCurrent", 0], ["cuCtxSetCurrent", 0], start=False)
        every = truth.read_all(tmp_path / "truth")
        assert len(every) == 2
        assert counter.counts() == true_counts(*every, since=since)
        assert counter.counts()["cuCtxSetCurrent"] == 2


@pytest.mark.parametrize("method", ["fork", "spawn", "forkserver"])
def test_worker_processes(tmp_path: Path, library: Path, method: str) -> None:
    """The library has its probes from another process: workers are seen from their first call."""
    counter, folder = Counter(), tmp_path / "truth"
    with Target(tmp_path / "first", prefix=at(library)) as t, watched(counter) as w:
        t.start()
        until(lambda: attached(w, str(library)), "it is found")
        before = counter.counts()
        command = workload("workers", method=method, workers=2, count=20)
        done = subprocess.run([*at(library), *command], env=environment(folder), timeout=60)
        assert done.returncode == 0
        every = truth.read_all(folder)
        assert len(every) >= 2
        seen = {n: c - before.get(n, 0) for n, c in counter.counts().items()}
        assert {n: c for n, c in seen.items() if c} == true_counts(*every)


def tell(process: subprocess.Popen[str], word: str) -> str:
    """Give it a line; the line it answers."""
    assert process.stdin
    assert process.stdout
    process.stdin.write(word + "\n")
    process.stdin.flush()
    answer = process.stdout.readline().strip()
    assert answer, "it has ended"
    return answer


def test_one_that_executes_another_program(tmp_path: Path, library: Path) -> None:
    counter, folder = Counter(), tmp_path / "truth"
    text = """
        import os
        Driver().call("cuInit", 0)
        sys.stdin.readline()
        code = "import sys; from tests.simgpu.driver import Driver; d = Driver(); print('up')\\n"
        code += "for _ in iter(sys.stdin.readline, ''): print(d.call('cuInit', 0))"
        os.execv(sys.executable, [sys.executable, "-u", "-c", code])
    """
    with watched(counter) as w, script(folder, library, text) as p:
        until(lambda: attached(w, str(library)), "it is found")
        since = attached(w)[0]
        assert [tell(p, word) for word in ("go on", "call", "call")] == ["up", "0", "0"]
        assert counter.counts() == true_counts(*truth.read_all(folder), since=since)
        assert counter.counts()["cuInit"] == 2
        assert {pid for pid, _ in counter.seen} == {p.pid}


def test_containers_with_copies_of_their_own(tmp_path: Path, library: Path) -> None:
    """Both see their library at the same path, where a third one lies on the host."""
    counter = Counter()
    targets = []
    with watched(counter) as w:
        for name in ("a", "b"):
            copy = tmp_path / name
            shutil.copytree(library, copy, symlinks=True)
            inside = f'mount --bind {copy} {library} && exec "$@"'
            prefix = at(library, "unshare", "--mount", "sh", "-c", inside, "sh")
            targets.append(Target(tmp_path / f"truth-{name}", prefix=prefix))
        try:
            for i, t in enumerate(targets):
                t.start()
                until(lambda i=i: len(attached(w, str(library))) == i + 1, "it is found")
                found_in_time(w, t.truth)
            first, second = attached(w)
            for t in targets:
                work(t)
            assert counter.counts()["cuMemAlloc_v2"] == 2 * CALLS
            a, b = (
                true_counts(t.truth, since=s) for t, s in zip(targets, (first, second), strict=True)
            )
            assert counter.counts() == {n: a.get(n, 0) + b.get(n, 0) for n in a.keys() | b.keys()}
            assert len([s for s in said(w, "attached") if "functions" in s]) == 2
        finally:
            for t in targets:
                t.close()


def test_a_library_that_was_removed_while_it_is_mapped(tmp_path: Path, library: Path) -> None:
    counter = Counter()
    with Target(tmp_path / "truth", prefix=at(library)) as t:
        t.start()
        shutil.rmtree(library)
        with watched(counter) as w:
            until(lambda: attached(w, "(deleted)"), "it is found")
            work(t)
            assert counter.counts()["cuMemAlloc_v2"] == CALLS


@pytest.mark.parametrize("end", ["exit", "SIGKILL"])
def test_probes_are_taken_off_when_nobody_maps_it_any_more(
    tmp_path: Path, library: Path, end: str
) -> None:
    counter = Counter()
    with watched(counter) as w, Target(tmp_path / "truth", prefix=at(library)) as t:
        t.start()
        until(lambda: attached(w, str(library)), "it is found")
        t.kill() if end == "SIGKILL" else t.close()
        [why] = until(lambda: said(w, "detached"), "it is let go")
        assert why == "no process maps it any more"
        assert "no process has libcuda.so mapped" in w.coverage()["counter", ""].reason
        # The next one to map it is seen again.
        with Target(tmp_path / "again", prefix=at(library)) as again:
            again.start()
            until(lambda: len(attached(w, str(library))) == 2, "it is found again")
            work(again)
            assert counter.counts()["cuMemAlloc_v2"] == CALLS


def test_a_child_that_outlives_its_parent_keeps_them(tmp_path: Path, library: Path) -> None:
    counter, folder = Counter(), tmp_path / "truth"
    text = """
        import os
        driver = Driver()
        driver.call("cuInit", 0)
        sys.stdin.readline()
        child = os.fork()
        if child:
            print(child, flush=True)
            os._exit(0)
        for _ in iter(sys.stdin.readline, ""):
            print(driver.call("cuCtxSetCurrent", 0), flush=True)
    """
    with watched(counter) as w, script(folder, library, text) as p:
        until(lambda: attached(w, str(library)), "it is found")
        child = int(tell(p, "fork"))
        p.wait(20)
        until(lambda: child in {pid for pid, _ in counter.seen}, "the child is looked at")
        assert tell(p, "call")
        assert counter.counts()["cuCtxSetCurrent"] == 1
        assert not said(w, "detached")
    # The pipe is closed: the child ends, too.


HOLD = (
    "import mmap, sys; f = open(sys.argv[1], 'rb');"
    "m = mmap.mmap(f.fileno(), 0, prot=mmap.PROT_READ | mmap.PROT_EXEC);"
    "print('up', flush=True); sys.stdin.read()"
)


def test_what_only_calls_itself_a_driver(tmp_path: Path) -> None:
    """A process maps it as code; the others go on, and it is said."""
    fake = tmp_path / "libcuda.so.1"
    fake.write_bytes(b"not a library" * 1000)
    counter = Counter()
    with watched(counter) as w:
        command = [sys.executable, "-c", HOLD, str(fake)]
        with subprocess.Popen(command, stdin=subprocess.PIPE) as process:
            reasons = until(lambda: said(w, "missing"), "it is found")
            assert reasons == ["not a 64-bit little-endian ELF file"]
            lane = w.coverage()["counter", ""]
            assert lane.status == "missing"
            assert f"{fake} cannot be traced: not a 64-bit" in lane.reason
            process.communicate(b"")
        until(lambda: said(w, "detached"), "it is let go")
    assert counter.attached == []


def test_only_the_processes_asked_for_and_their_children(tmp_path: Path, library: Path) -> None:
    counter = Counter()
    folders = [tmp_path / name for name in ("wanted", "other")]
    wanted, other = (Target(f, prefix=at(library)) for f in folders)
    with wanted, other:
        wanted.start()
        other.start()
        with watched(counter, pids=(wanted.pid,)) as w:
            until(lambda: attached(w, str(library)), "it is found")
            work(wanted)
            work(other)
            assert counter.counts()["cuMemAlloc_v2"] == CALLS
            wanted.fork(["cuCtxSetCurrent", 0], start=False)
            other.fork(["cuCtxSetCurrent", 0], start=False)
            assert counter.counts()["cuCtxSetCurrent"] == 1
            assert {pid for pid, _ in counter.seen} == {wanted.pid}


def test_children_that_were_there_before_are_wanted_too(tmp_path: Path, library: Path) -> None:
    counter = Counter()
    with Target(tmp_path / "truth", prefix=at(library, *IN_NAMESPACE)) as t:
        t.start()
        with watched(counter, pids=(t.pid,)) as w:  # its parent
            until(lambda: attached(w, str(library)), "it is found")
            work(t)
            assert counter.counts()["cuMemAlloc_v2"] == CALLS


def test_nobody_to_be_found_is_said_with_what_to_do() -> None:
    with watched(Counter()) as w:
        lane = w.coverage()["counter", ""]
        assert lane.status == "attached"
        assert "were looked at in /proc" in lane.reason
        assert "lanes begin when one does" in lane.reason


def test_those_asked_for_may_have_none_and_may_end() -> None:
    process = subprocess.Popen(["sleep", "60"])
    with process, watched(Counter(), pids=(process.pid,)) as w:
        lane = w.coverage()["counter", ""]
        assert f"asked for (--pid {process.pid})" in lane.reason
        process.kill()
        process.wait()
        gone = f"the processes asked for (--pid {process.pid}) have ended"
        until(lambda: w.coverage()["counter", ""].reason == gone, "it is said")
