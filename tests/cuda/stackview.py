"""Stacks that were traced, beside those that Python itself saw inside the calls."""

from __future__ import annotations

import json
import subprocess
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from dsprobe.recordings.cudastreams import FRAME_KINDS
from tests.cuda.tracing import Tracing
from tests.simgpu.run import environment
from tests.support.pythons import Python
from tests.support.wait import until

Place = tuple[str, str, int]
"""Qualified name (plain in 3.10), file, line."""
PYTHON, NATIVE, STATUS = FRAME_KINDS


class Load:
    """A Python program on the simulated driver that waits at gates (workloads/options.py)."""

    def __init__(
        self, python: Python, folder: Path, module: str, *words: str,
        prefix: Sequence[str] = (), env_more: Mapping[str, str] | None = None,
    ) -> None:  # fmt: skip
        self.folder = folder
        self.process = subprocess.Popen(
            [*prefix, *python.command("-m", module, *words)],
            env=environment(folder) | dict(env_more or {}),
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
        )  # fmt: skip

    def gate(self) -> str:
        """What it says at its next gate."""
        assert self.process.stdout
        line = self.process.stdout.readline()
        assert line, f"it ended with {self.process.wait(10)}"
        return line.strip()

    def go(self) -> None:
        """Open the gate."""
        assert self.process.stdin
        self.process.stdin.write("\n")
        self.process.stdin.flush()

    def end(self) -> None:
        """Open every gate, and wait."""
        assert self.process.stdin
        self.process.stdin.close()
        assert self.process.wait(60) == 0

    def truth(self) -> list[dict[str, Any]]:
        """Calls with their stacks, of all processes."""
        rows = []
        for path in sorted(self.folder.glob("*.stacks")):
            for line in path.read_text().splitlines():
                rows.append(json.loads(line) | {"pid": int(path.stem)})
        return rows


def frames(it: Tracing) -> dict[int, list[tuple[str, Any]]]:
    """(kind, row) of each frame of each stack, innermost first."""
    rows = it.rows("meta.frame")
    known = {int(r["id"]): (FRAME_KINDS[int(r["kind"])], r) for r in rows}
    assert len(known) == len(rows), "a frame's number was used twice"
    stacks: dict[int, dict[int, tuple[str, Any]]] = {}
    for r in it.rows("meta.stack"):
        own = stacks.setdefault(int(r["id"]), {})
        assert int(r["depth"]) not in own, "a stack's number was used twice"
        own[int(r["depth"])] = known[int(r["frame"])]
    return {id: [own[d] for d in range(len(own))] for id, own in stacks.items()}


def places(stack: list[tuple[str, Any]]) -> list[Place]:
    """Python's frames of a stack."""
    return [(r["function"], r["file"], int(r["line"])) for kind, r in stack if kind == PYTHON]


def said(stack: list[tuple[str, Any]]) -> list[str]:
    """Its sentences on what is missing."""
    return [r["function"] for kind, r in stack if kind == STATUS]


def allocations(it: Tracing, pids: set[int]) -> list[tuple[int, int]]:
    """(bytes, stack) of each allocation in these processes."""
    ids = {int(r["id"]) for r in it.rows("meta.process") if int(r["ns_pid"]) in pids}
    rows = it.rows("gpu.alloc")
    return [(int(r["bytes"]), int(r["stack"])) for r in rows
            if int(r["process"]) in ids and r["op"] == 0 and r["result"] == 0]  # fmt: skip


def synchronisations(it: Tracing, pids: set[int]) -> list[int]:
    """Stacks of cuCtxSynchronize in these processes."""
    ids = {int(r["id"]) for r in it.rows("meta.process") if int(r["ns_pid"]) in pids}
    names = it.names()
    calls = [r for r in it.rows("cuda.call") if int(r["process"]) in ids]
    return [int(r["stack"]) for r in calls if names[int(r["function"])] == "cuCtxSynchronize"]


def told(row: dict[str, Any]) -> list[Place]:
    """A stack of the truth, as we name functions."""
    return [(qualified or name, file, line) for name, qualified, file, line in row["frames"]]


def compare(
    it: Tracing, load: Load, least: int, waits: bool = True
) -> dict[int, list[tuple[str, Any]]]:
    """Every stack of a load against its truth, of which there must be ``least``; all stacks.

    ``waits``: those of synchronisations too.
    """
    truth = load.truth()
    pids = {row["pid"] for row in truth}
    allocated = [r for r in truth if r["symbol"] == "cuMemAlloc_v2" and r["bytes"] != 4096]
    waited = [r for r in truth if r["symbol"] == "cuCtxSynchronize"]
    assert len(allocated) >= least

    def whole() -> bool:
        it.step()
        them = allocations(it, pids)
        stacks = {int(i) for i in it.rows("meta.stack")["id"]}
        return len(them) == len(allocated) and all(s in stacks for _, s in them)

    until(whole, "all allocations have come, with their stacks")
    stacks = frames(it)
    got = Counter((size, tuple(places(stacks[s]))) for size, s in allocations(it, pids))
    want = Counter((r["bytes"], tuple(told(r))) for r in allocated)
    assert got == want
    if not waits:
        return {s: stacks[s] for _, s in allocations(it, pids)}
    got_waits = Counter(tuple(places(stacks[s])) for s in synchronisations(it, pids))
    assert got_waits == Counter(tuple(told(r)) for r in waited)
    return {s: stacks[s] for _, s in allocations(it, pids)}
