"""Where probes cannot go, or must not: the kernel refuses, a trial failed, a filter would kill."""
# ruff: noqa: F811 (fixtures that another file of tests has)

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from dsprobe.agent.vetting import Vetting
from dsprobe.probes import driver
from tests.cuda.counter import Counter
from tests.cuda.test_targets import (
    CALLS,
    _nobody_else,  # noqa: F401
    at,
    attached,
    library,  # noqa: F401
    said,
    script,
    tell,
    true_counts,
    work,
)
from tests.simgpu.target import Target
from tests.support.agents import watched
from tests.support.wait import until

pytestmark = [pytest.mark.bpf, pytest.mark.tools("gcc")]


def test_where_the_kernel_refuses_a_place(tmp_path: Path, library: Path) -> None:
    """An offset that is no instruction's of that file: the other functions have their probes."""

    class Wrong(Counter):
        def library(self, driver: Any, returns: bool) -> Any:
            uprobes, rows = super().library(driver, returns)
            size = (library / "libcuda.so.1").stat().st_size
            driver.functions["cuInit"] = type(driver.functions["cuInit"])(size + (1 << 20), 8)
            bad = driver.functions["cuInit"].offset + driver.entries["cuInit"].offset
            first = next(i for i, u in enumerate(uprobes) if u.cookie == self.numbers["cuInit"])
            uprobes[first] = type(uprobes[first])(uprobes[first].function, bad, 0)
            del uprobes[first + 1]
            return uprobes, rows

    counter = Wrong()
    with watched(counter) as w, Target(tmp_path / "truth", prefix=at(library)) as t:
        t.start()
        until(lambda: attached(w, str(library)), "it is found")
        rows = w.rows("meta.placement")
        [refused] = rows[rows["attached"] == 0]
        assert refused["function"] == "cuInit"
        assert "cannot be attached" in refused["why"]
        [reason] = [s for s in said(w, "attached") if "functions" in s]
        assert reason.startswith(f"{len(rows) - 1} of {len(rows)} functions; not in cuInit")
        work(t)
        assert counter.counts()["cuMemAlloc_v2"] == CALLS


def test_a_function_that_failed_its_trial_is_told_of(
    tmp_path: Path, library: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def places(_: Vetting, fd: int, found: driver.Driver) -> driver.Driver:
        entries = {n: p for n, p in found.entries.items() if n != "cuInit"}
        return replace(found, entries=entries, refused={"cuInit": "a probe there kills it"})

    monkeypatch.setattr(Vetting, "places", places)
    with watched(Counter()) as w, Target(tmp_path / "truth", prefix=at(library)) as t:
        t.start()
        until(lambda: attached(w, str(library)), "it is found")
        rows = w.rows("meta.placement")
        [row] = rows[rows["attached"] == 0]
        assert (row["function"], row["why"]) == ("cuInit", "a probe there kills it")
        [reason] = [s for s in said(w, "attached") if "functions" in s]
        assert reason == f"{len(rows) - 1} of {len(rows)} functions; not in cuInit"


FILTERED = """
    import ctypes, struct
    allow = ctypes.create_string_buffer(struct.pack("<HBBI", 0x06, 0, 0, 0x7FFF0000))
    program = ctypes.create_string_buffer(
        struct.pack("<H6xQ", 1, ctypes.addressof(allow)))  # struct sock_fprog
    libc = ctypes.CDLL(None)
    driver = Driver()
    driver.call("cuInit", 0)
    sys.stdin.readline()
    assert libc.prctl(38, 1, 0, 0, 0) == 0  # PR_SET_NO_NEW_PRIVS
    assert libc.prctl(22, 2, program) == 0  # PR_SET_SECCOMP, SECCOMP_MODE_FILTER
    print("filtered", flush=True)
    for _ in iter(sys.stdin.readline, ""):
        print(driver.call("cuCtxSetCurrent", 0), flush=True)
"""


@pytest.mark.parametrize("survives", [True, False])
def test_a_seccomp_filter_costs_returns_only_where_one_may_kill(
    tmp_path: Path, library: Path, survives: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Vetting, "survives", lambda _: survives)
    counter = Counter()
    with script(tmp_path / "truth", library, FILTERED) as p:
        assert tell(p, "go on") == "filtered"
        with watched(counter) as w:
            until(lambda: attached(w, str(library)), "it is found")
            assert tell(p, "call")
            assert counter.counts() == {"cuCtxSetCurrent": 1}
            assert counter.counts("returns") == ({"cuCtxSetCurrent": 1} if survives else {})
            [reason] = [s for s in said(w, "attached") if "functions" in s]
            assert ("on entry only" in reason) == (not survives)


def test_a_filtered_process_that_comes_later_takes_returns_off(
    tmp_path: Path, library: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Vetting, "survives", lambda _: False)
    counter = Counter()
    first = Target(tmp_path / "first", prefix=at(library))
    with first, watched(counter) as w:
        first.start()
        until(lambda: attached(w, str(library)), "it is found")
        work(first)
        assert counter.counts("returns")["cuMemAlloc_v2"] == CALLS
        later = FILTERED.replace("driver = Driver()\n", "").replace('driver.call("cuInit", 0)', "")
        later = later.replace('print("filtered"', 'driver = Driver(); print("filtered"')
        with script(tmp_path / "truth", library, later) as p:
            assert tell(p, "go on") == "filtered"
            until(lambda: [s for s in said(w, "attached") if f"process {p.pid}" in s], "it is said")
            until(lambda: not returns_of(work, first, counter), "probes on returns have gone")
            assert tell(p, "call")
            hits = counter.counts()
            assert hits["cuCtxSetCurrent"] == 1
            assert (
                hits["cuMemAlloc_v2"]
                == true_counts(first.truth, since=attached(w)[0])["cuMemAlloc_v2"]
            )
            assert "cuCtxSetCurrent" not in counter.counts("returns")
            assert counter.narrowed == set(counter.numbers.values())


def returns_of(load: Callable[[Target], None], target: Target, counter: Counter) -> bool:
    """Whether probes on returns see anything of a load."""
    before = counter.counts("returns")
    load(target)
    return counter.counts("returns") != before
