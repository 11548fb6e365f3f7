"""What an agent's viewers read: calls of all processes, in whatever way they came, equal truth."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

from dsprobe.agent import libraries
from dsprobe.probes.functions import of_symbol
from tests.cuda.test_targets import IN_NAMESPACE, at, attached, work
from tests.simgpu import build, truth
from tests.simgpu.run import environment, workload
from tests.simgpu.target import OUT, Target
from tests.support.agents import Watched, watched
from tests.support.wait import until

pytestmark = [pytest.mark.bpf, pytest.mark.tools("gcc", "unshare")]


def told(w: Watched, processes: set[int]) -> dict[str, int]:
    """Calls of these processes by function, from ``cuda.calls``."""
    names = {int(r["id"]): str(r["text"]) for r in w.rows("meta.string")}
    out: dict[str, int] = {}
    for r in w.rows("cuda.calls"):
        if int(r["process"]) in processes:
            name = names[int(r["function"])]
            out[name] = out.get(name, 0) + int(r["count"])
    return out


def numbers(w: Watched, every: list[truth.Process], *first: Target) -> set[int]:
    """Session numbers of these processes; ``first`` have a namespace of their own."""
    pids = {p.pid for p in every} - {1}
    parents = {t.pid for t in first}
    rows = w.rows("meta.process")
    return {int(r["id"]) for r in rows if r["pid"] in pids or r["parent"] in parents}


def true_calls(processes: list[truth.Process], since: int) -> dict[str, int]:
    """Traced calls from outside the library that began from ``since`` on."""
    out: dict[str, int] = {}
    for p in processes:
        assert p.lost == 0
        for e in p.events[(p.events["begun"] >= since) & (p.events["depth"] == 1)]:
            name = p.symbols[e["symbol"]]
            if of_symbol(name):
                out[name] = out.get(name, 0) + 1
    return out


def test_processes_of_every_kind(tmp_path: Path) -> None:
    """One was running, one forks, one is a namespace's first, one has a copy of its own, workers
    come by every way, one is killed."""
    library, copy, folder = tmp_path / "library", tmp_path / "copy", tmp_path / "truth"
    for x in (library, copy):
        shutil.copytree(build.libcuda(), x, symlinks=True)
    running = Target(folder / "running", prefix=at(library))
    running.start()
    work(running)
    with watched("calls", "launches", "memory") as w:
        until(lambda: attached(w, str(library)), "the running one is found")
        own = Target(folder / "own", prefix=at(copy))
        own.start()
        until(lambda: attached(w, str(copy)), "the copy is found")
        since = max(attached(w, str(tmp_path)))
        first = Target(folder / "first", prefix=at(library, *IN_NAMESPACE))
        first.start()
        for t in (running, own, first):
            work(t)
        running.fork(["cuMemGetInfo_v2", OUT, OUT], ["cuMemAlloc_v2", OUT, 1], start=False)
        own.start(thread="another")
        own.ok("cuMemAlloc_v2", OUT, 4096, thread="another")
        for method in ("fork", "spawn", "forkserver"):
            command = [*at(library), *workload("workers", method=method, workers=2, count=20)]
            subprocess.run(command, env=environment(folder / method), check=True, timeout=60)
        work(first)
        own.kill()
        first.close()
        running.close()
        w.pass_by()
        every = [p for f in folder.iterdir() for p in truth.read_all(f)]
        assert len(every) >= 10
        want = true_calls(every, since)
        assert want["cuMemAlloc_v2"] >= 6 * 20 + 4 * 7 + 2
        assert told(w, numbers(w, every, first)) == want
        libraries = {int(r["pid"]): str(r["library"]) for r in w.rows("meta.process")}
        assert libraries[running.pid] == str(library / "libcuda.so.1")
        assert libraries[own.pid] == str(copy / "libcuda.so.1")
        assert not [r for r in w.rows("meta.loss") if str(r["stream"]).startswith(("cuda", "gpu"))]


def test_builds_that_follow_one_another(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each takes the places in the table of functions that the ones before have left."""
    monkeypatch.setattr(libraries, "FORGET_NS", 0)
    with watched("calls", "launches", "memory") as w:
        for flavour in build.FLAVOURS:
            library, folder = tmp_path / flavour, tmp_path / f"truth-{flavour}"
            shutil.copytree(build.libcuda(flavour), library, symlinks=True)
            with Target(folder, prefix=at(library)) as t:
                t.start()
                until(lambda x=str(library): attached(w, x), "it is found")  # type: ignore[misc]
                [since] = attached(w, str(library))
                work(t)
                w.pass_by()
                every = truth.read_all(folder)
                assert told(w, numbers(w, every)) == true_calls(every, since)
            name = f"{library}/libcuda.so.1"
            until(lambda n=name: taken_off(w, n), "it is let go")  # type: ignore[misc]


def taken_off(w: Watched, library: str) -> bool:
    return any(
        program.startswith(library) and s.status == "detached"
        for (_, program), s in w.coverage().items()
    )
