"""Calls that can block: synchronising, copies, graphs, modules.

The slow ones are all here, with the stack; the others while a process makes few enough.  A call
that has not returned for long is told of while it lasts.
"""

from __future__ import annotations

from typing import ClassVar

from dsprobe.probes.cuda import Cuda
from dsprobe.probes.functions import Class
from dsprobe.probes.probe import Batch, BpfProbe, Program
from dsprobe.recordings.cudastreams import CUDA_CALL, CUDA_OPEN

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
        Program("calls_batch", "tail", "calls_programs"),
        Program("calls_tell", "tail", "stack_users[0]"),
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
        them = self._cuda.open_calls(now)
        columns = {name: them[name] for name in ("process", "thread", "function", "since")}
        return [(CUDA_OPEN, CUDA_OPEN.rows(t=[now] * len(them), **columns))] if len(them) else []
