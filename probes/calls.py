"""Calls that can block: synchronising, copies, graphs, modules.

The slow ones are all here, with the stack; the others while a process makes few enough.  A call
that has not returned for long is told of while it lasts.
"""

from __future__ import annotations

from typing import ClassVar

import numpy as np

from dsprobe.probes.cuda import Cuda
from dsprobe.probes.functions import Class, Flag
from dsprobe.probes.probe import Batch, BpfProbe, Program
from dsprobe.recordings.cudastreams import CUDA_CALL, CUDA_OPEN
from dsprobe.recordings.model import Rows

OPEN_NS = 100_000_000
EVERY_NS = 1_000_000_000


class Calls(BpfProbe):
    name = "calls"
    doc = (
        "driver calls that can block: synchronising, copies, graphs, modules; slow ones with stack"
    )
    requires = (Cuda,)
    streams = (CUDA_CALL, CUDA_OPEN)
    source = "calls.bpf.c"
    programs = (
        Program("calls_enter", "uprobe"),
        Program("calls_return", "uretprobe"),
    )
    rings: ClassVar = {"cuda_call": CUDA_CALL}

    def __init__(self) -> None:
        self._last = 0

    def build_on(self, required: BpfProbe) -> None:
        assert isinstance(required, Cuda)
        self._cuda = required
        required.serves[Class.CALL] = ("calls_enter", "calls_return")

    def collect(self, now: int) -> list[Batch]:
        if now - self._last < EVERY_NS:
            return []
        self._last = now
        rows = self._open(now)
        return [(CUDA_OPEN, rows)] if len(rows) else []

    def _open(self, now: int) -> Rows:
        """Calls that go on since long, as the threads' own tables have them."""
        threads = self._cuda.threads.live
        threads = threads[(threads["depth"] > 0) & (threads["ended"] == 0)]
        calls = threads["open"]
        level = np.arange(calls.shape[1])
        is_open = (level < threads["depth"][:, None]) & (calls["t"] + OPEN_NS <= now)
        which, depth = np.nonzero(is_open)
        them = calls[which, depth]
        functions = self._cuda.functions(them["cookie"])
        seen = functions["flags"] & Flag.ENTRY_ONLY == 0  # else nobody would say that it returned
        which, them, functions = which[seen], them[seen], functions[seen]
        if not len(which):
            return CUDA_OPEN.empty()
        return CUDA_OPEN.rows(
            t=[now] * len(which), process=threads["process"][which], thread=threads["id"][which],
            function=functions["name"], since=them["t"],
        )  # fmt: skip
