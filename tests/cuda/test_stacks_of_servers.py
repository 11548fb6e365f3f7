"""Stacks of programs that ran before the agent did, as a viewer of the agent gets them."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from dsprobe.recordings.cudastreams import FRAME_KINDS
from tests.cuda.stackview import Load, told
from tests.support import pythons
from tests.support.agents import Watched, watched
from tests.support.wait import until

pytestmark = pytest.mark.bpf


def attached(w: Watched) -> bool:
    """Whether probes are in a library."""
    return any(program.endswith(")") and "libcuda" in program and status.status == "attached"
               for (_, program), status in w.coverage().items())  # fmt: skip


def test_several_that_share_a_library(tmp_path: Path) -> None:
    """Not one stack of them is from before its process was looked at."""
    python = pythons.find("3.11")
    assert python
    loads = [
        Load(python, tmp_path / str(i), "tests.simgpu.workloads.stacks", "gate=1", "repeat=1",
             "shapes=plain,deep,through_c,thread") for i in range(4)
    ]  # fmt: skip
    for load in loads:
        assert load.gate() == "ready"
    with watched("memory") as w:
        until(lambda: attached(w), "probes are in the library")
        for load in loads:
            load.go()
        for load in loads:
            assert load.gate() == "done"
        w.pass_by()
        until(lambda: _whole(w, loads), "all stacks have come")
        frames = {int(f["id"]): f for f in w.rows("meta.frame")}
        stacks = w.rows("meta.stack")
        them = w.rows("meta.process")
        for load in loads:
            mine = them[them["pid"] == load.process.pid]
            assert str(mine["python"][-1]).startswith("3.11.")
            got = {}
            for row in _allocations(w, load):
                rows = np.sort(stacks[stacks["id"] == row["stack"]], order="depth")
                found = [frames[i] for i in rows["frame"].tolist()]
                assert not [f["function"] for f in found if FRAME_KINDS[f["kind"]] == "status"]
                got[int(row["bytes"])] = [
                    (f["function"], f["file"], int(f["line"]))
                    for f in found
                    if FRAME_KINDS[f["kind"]] == "python"
                ]
            truth = {r["bytes"]: told(r) for r in load.truth() if r["symbol"] == "cuMemAlloc_v2"}
            assert got == truth
        for load in loads:
            load.end()


def _allocations(w: Watched, load: Load) -> np.ndarray:
    them = w.rows("meta.process")
    ids = set(them[them["pid"] == load.process.pid]["id"].tolist())
    rows = w.rows("gpu.alloc")
    return rows[np.isin(rows["process"], list(ids)) & (rows["op"] == 0)]


def _whole(w: Watched, loads: list[Load]) -> bool:
    told_ = set(w.rows("meta.stack")["id"].tolist())
    rows = [_allocations(w, load) for load in loads]
    return all(
        len(r) == sum(x["symbol"] == "cuMemAlloc_v2" for x in load.truth())
        and set(r["stack"].tolist()) <= told_
        for r, load in zip(rows, loads, strict=True)
    )
