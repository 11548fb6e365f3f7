"""Where probes cannot go, or must not: the kernel refuses, a trial failed, a filter would kill."""
# ruff: noqa: F811 (fixtures that another file of tests has)

from __future__ import annotations

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


@pytest.mark.parametrize("survives", [True, False])
def test_no_probe_on_a_return_where_a_seccomp_filter_may_kill_for_it(
    tmp_path: Path, library: Path, survives: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In no library, whoever maps it: a process may set its filter at any time."""
    monkeypatch.setattr(Vetting, "survives", lambda _: survives)
    counter = Counter()
    with Target(tmp_path / "truth", prefix=at(library)) as t, watched(counter) as w:
        t.start()
        until(lambda: attached(w, str(library)), "it is found")
        work(t)
        assert counter.counts()["cuMemAlloc_v2"] == CALLS
        assert counter.counts("returns") == (counter.counts() if survives else {})
        assert counter.returns == [survives]
        [reason] = [s for s in said(w, "attached") if "functions" in s]
        assert ("; on entry only: calls are counted, not timed" in reason) == (not survives)
