"""Probes on a simulated driver, without an agent: what they say, by stream."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from dsprobe.probes import driver
from dsprobe.probes.cuda import Cuda
from dsprobe.probes.probe import BpfProbe, Loss
from dsprobe.probes.tracer import Tracer
from dsprobe.recordings.model import Rows
from dsprobe.recordings.streams import STREAMS
from tests.simgpu.build import libcuda
from tests.support.wait import until


class Tracing:
    """``tracer`` runs with ``cuda`` and more; :meth:`rows` are all so far."""

    def __init__(self, tracer: Tracer, cuda: Cuda) -> None:
        self.tracer, self.cuda = tracer, cuda
        self.losses: list[Loss] = []
        self._rows: dict[str, list[Rows]] = {}
        self._before = dict(tracer.started)

    def attach(self, path: Path, returns: bool = True) -> None:
        """Put probes into the library at ``path``."""
        fd = os.open(path, os.O_RDONLY)
        try:
            uprobes, _ = self.cuda.library(driver.read(fd, str(path)), returns)
            errors = self.tracer.attach_library(str(path), fd, uprobes)
            assert not errors
            self.uprobes = uprobes
        finally:
            os.close(fd)

    def step(self) -> None:
        """What an agent does four times a second."""
        for stream, rows in self.tracer.drain():
            self._rows.setdefault(stream.name, []).append(rows)
        self.losses += self.tracer.losses()
        for probe in self.tracer.probes:
            now = time.monotonic_ns()
            for stream, rows in probe.collect(now):
                if "dt" in stream.by_name:
                    rows["dt"] = now - self._before[probe.name]
                self._rows.setdefault(stream.name, []).append(rows)
            self._before[probe.name] = now
            self.losses += probe.losses()

    def rows(self, stream: str) -> Rows:
        """In the order they came."""
        got = self._rows.get(stream)
        return np.concatenate(got) if got else STREAMS[stream].empty()

    def settle(self) -> None:
        """Until no process is left and all of them was said."""

        def gone() -> bool:
            self.step()
            return not self.cuda.processes

        until(gone, "all processes have ended")

    def process(self, pid: int) -> int:
        """Session number of the process that has ``pid``, as it calls itself."""
        return int(last(self.rows("meta.process"), ns_pid=pid)["id"])

    def names(self) -> dict[int, str]:
        """``meta.string``."""
        rows = self.rows("meta.string")
        return dict(zip(rows["id"].tolist(), rows["text"], strict=True))

    def kernels(self) -> dict[int, str]:
        """Names of kernels by id."""
        rows = self.rows("meta.kernel")
        return dict(zip(rows["id"].tolist(), rows["name"], strict=True))

    def calls(self, pid: int, column: str = "count") -> dict[str, int]:
        """Sum of a column of ``cuda.calls`` by function, where it is not 0."""
        rows, names = self.rows("cuda.calls"), self.names()
        rows = rows[rows["process"] == self.process(pid)]
        found: dict[str, int] = {}
        for name, value in zip(rows["function"].tolist(), rows[column].tolist(), strict=True):
            if value:
                found[names[name]] = found.get(names[name], 0) + value
        return found


def last(rows: Rows, **columns: Any) -> Any:
    """The last row in which columns have these values."""
    for name, value in columns.items():
        rows = rows[rows[name] == value]
    assert len(rows), f"no row with {columns}"
    return rows[-1]


def family(pid: int) -> list[int]:
    """A process and all that descend from it."""
    found = [pid]
    for children in Path(f"/proc/{pid}/task").glob("*/children"):
        for child in children.read_text().split():
            found += family(int(child))
    return found


@contextlib.contextmanager
def tracing(
    *probes: type[BpfProbe],
    flavour: str = "driver",
    everybody: bool = False,
    unwind: bool = False,
) -> Iterator[Tracing]:
    """``probes`` and Cuda, in the simulated driver of a flavour.  Tests that run at the same time
    share that library, so only processes of this test are seen, unless ``everybody`` is."""
    cuda = Cuda()
    cuda.stacks.unwind = unwind
    tracer = Tracer([cuda, *(kind() for kind in probes)])
    try:
        missing = [c for c in tracer.load() if c.status != "attached"]
        assert not missing or all(c.program and "uprobe" in c.reason for c in missing), missing
        it = Tracing(tracer, cuda)
        if not everybody:
            cuda.want(family(os.getpid()))
        it.attach(libcuda(flavour) / "libcuda.so.1")
        yield it
        lost = [x for x in it.losses if x.lost]
        assert not lost, lost
    finally:
        tracer.close()
