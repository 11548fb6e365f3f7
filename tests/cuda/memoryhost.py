"""Memory as the probe tells it, of processes on the simulated driver, without an agent."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from dsprobe.probes import driver
from dsprobe.probes.btf import Btf
from dsprobe.probes.calls import Calls
from dsprobe.probes.cuda import Cuda
from dsprobe.probes.hashmap import HashMap
from dsprobe.probes.memory import Memory
from dsprobe.probes.probe import Loss
from dsprobe.probes.tracer import Tracer
from dsprobe.recordings.cudastreams import MEMORY_KINDS
from dsprobe.recordings.model import Rows
from dsprobe.recordings.streams import STREAMS
from tests.simgpu import build, truth
from tests.simgpu.scenario import parse
from tests.simgpu.target import Target


class ByCaller(Memory):
    """Stacks are told apart by where the call returns to, or by the size that was asked for."""

    def __init__(self, *, by_size: bool = False, **sizes: int) -> None:
        super().__init__(**sizes)
        self._stack = "(u32)((c)->a[1])" if by_size else "(u32)((c)->ret >> 4)"

    def defines(self, btf: Btf | None) -> Mapping[str, int]:
        taken = {"stack_take(ctx, c, then)": f"(c)->stack = {self._stack}"}
        return {**super().defines(btf), **taken}  # type: ignore[dict-item]


class Host:
    """``now`` of a collection is the clock; rows of all collections are in :meth:`rows`."""

    def __init__(self, probe: Memory) -> None:
        self.cuda, self.probe = Cuda(), probe
        self.tracer = Tracer([self.cuda, Calls(), probe])
        self._rows: dict[str, list[Rows]] = {}
        self.losses: list[Loss] = []
        said = [c for c in self.tracer.load() if c.status != "attached"]
        assert not said, said
        self.cuda.want([])
        self.attach(build.libcuda("driver"))

    def attach(self, folder: os.PathLike[str]) -> None:
        fd = os.open(os.path.join(folder, "libcuda.so.1"), os.O_RDONLY)
        try:
            uprobes, _ = self.cuda.library(driver.read(fd, "libcuda.so.1"))
            assert not self.tracer.attach_library("simulated", fd, uprobes)
        finally:
            os.close(fd)

    def want(self, pid: int) -> None:
        """See this process and its children, not what others do with the same library."""
        self.cuda.want([pid])

    def poll(self, after: int = 0) -> None:
        """Read everything, as if that were ``after`` s from now."""
        now = time.monotonic_ns() + after * 10**9
        batches = [*self.tracer.drain()]
        for probe in self.tracer.probes:
            batches += probe.collect(now)
            self.losses += probe.losses()
        for stream, rows in batches:
            self._rows.setdefault(stream.name, []).append(rows)

    def rows(self, stream: str) -> Rows:
        return np.concatenate([STREAMS[stream].empty(), *self._rows.get(stream, [])])

    def process(self, pid: int) -> int:
        """Number of the process that has ``pid`` on the host, the latest."""
        rows = self.rows("meta.process")
        return int(rows["id"][rows["pid"] == pid][-1])

    def last(self, pid: int) -> dict[str, Rows]:
        """The last row of each kind."""
        rows = self.rows("gpu.memory")
        mine = rows[rows["process"] == self.process(pid)]
        return {MEMORY_KINDS[k]: mine[mine["kind"] == k][-1] for k in np.unique(mine["kind"])}

    def live(self, pid: int) -> dict[str, tuple[int, int]]:
        """Bytes and blocks of each kind, where there are any."""
        return {k: (int(r["live"]), int(r["blocks"])) for k, r in self.last(pid).items()
                if r["blocks"]}  # fmt: skip

    def total(self, pid: int, column: str) -> int:
        """Sum of a column over all rows of gpu.memory."""
        rows = self.rows("gpu.memory")
        return int(rows[column][rows["process"] == self.process(pid)].sum())

    def stacks(self, pid: int) -> dict[tuple[int, str], tuple[int, int]]:
        """Live bytes and blocks by stack and kind."""
        rows = self.rows("gpu.stack")
        mine = rows[rows["process"] == self.process(pid)]
        last = {(int(r["stack"]), MEMORY_KINDS[r["kind"]]): r for r in mine}
        return {k: (int(r["live"]), int(r["blocks"])) for k, r in last.items() if r["blocks"]}

    def processes_in_tables(self) -> set[int]:
        """Of whom the kernel's tables still hold something."""
        maps = self.tables()
        return {int(p) for m in maps for p in m.read()[0]["process"]}

    def tables(self) -> list[HashMap]:
        found = [self.probe._totals_map, self.probe._stacks_map, *self.probe._walk._tables]
        return [*found, self.probe._walk._contexts]

    def close(self) -> None:
        self.tracer.close()


@contextmanager
def tracing(probe: Memory | None = None) -> Iterator[Host]:
    host = Host(probe or ByCaller())
    try:
        yield host
    finally:
        host.close()


def really(process: truth.Process) -> dict[str, tuple[int, int]]:
    """What :meth:`Host.live` should say; the size of another process's memory is not known."""
    return {k: (0 if k == "ipc" else v.bytes, v.blocks)
            for k, v in process.live.items() if v.blocks}  # fmt: skip


class Traced(Target):
    """A target of which every step can be checked against truth."""

    def __init__(self, host: Host, folder: Path, **tables: Any) -> None:
        super().__init__(folder, parse(tables))
        self.host = host
        host.want(self.pid)
        self.start()

    def check(self) -> dict[str, tuple[int, int]]:
        """Live bytes and blocks by kind, which equal truth."""
        self.host.poll()
        told = self.host.live(self.pid)
        assert told == really(self.truth)
        return told
