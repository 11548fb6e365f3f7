"""A process that uses CUDA, written by hand: what it allocates goes in, rows as the agent writes
them come out."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from dsprobe.recordings import cudastreams as cuda
from dsprobe.recordings import streams as st
from tests.tui.memory import MemorySession

SECOND = 10**9
BOOT = 1_000 * SECOND
MIB = 1 << 20
KIND = {name: i for i, name in enumerate(cuda.MEMORY_KINDS)}
CALL = {name: i for i, name in enumerate(cuda.CALL_KINDS)}
COPY = {name: i for i, name in enumerate(cuda.COPIES)}


class Stack:
    """Blocks that one stack of one process holds, oldest first: (bytes, time of allocation)."""

    def __init__(self, process: int, stack: int, kind: str = "device") -> None:
        self.process, self.stack, self.kind = process, stack, KIND[kind]
        self.held: list[tuple[int, int]] = []
        self.since = [0, 0, 0, 0]  # allocs, frees, allocated, freed
        self.changed = False

    def alloc(self, t: int, size: int) -> None:
        self.held.append((size, t))
        self._did(1, 0, size, 0)

    def free(self, index: int = 0) -> None:
        size, _ = self.held.pop(index)
        self._did(0, 1, 0, size)

    def _did(self, *amounts: int) -> None:
        self.since = [a + b for a, b in zip(self.since, amounts, strict=True)]
        self.changed = True

    @property
    def live(self) -> int:
        return sum(size for size, _ in self.held)

    @property
    def born(self) -> int:
        return self.live and sum(size * t for size, t in self.held) // self.live


class CudaHost:
    """``session`` gets what the agent would write: rows of gpu.memory and gpu.stack once a second
    (gpu.stack of what changed, every ten seconds of all that is live)."""

    def __init__(self, live: bool = False) -> None:
        self.session = MemorySession(live=live)
        self.now = BOOT
        self.stacks: list[Stack] = []
        self.frames: dict[str, int] = {}
        s = self.session
        s.append("meta.session", t=BOOT, key=["host", "boot_id"], value=["gpu-07", "b-1"])
        s.append("meta.clock", t=BOOT, wall=BOOT, uncertainty=200)
        probes = ["memory", "launches", "calls"]
        s.append("meta.coverage", t=BOOT, probe=probes, program="", status=0, reason="")

    def process(self, id: int, pid: int, comm: str = "python3", **more: object) -> None:
        self.session.append("meta.process", t=self.now, id=id, pid=pid, comm=comm, **more)

    def thread(self, id: int, process: int, tid: int, comm: str = "engine") -> None:
        self.session.append("meta.thread", t=self.now, id=id, process=process, tid=tid, comm=comm)

    def stack(
        self, id: int, frames: Sequence[str], process: int = 1, kind: str = "device"
    ) -> Stack:
        """A stack with Python ``frames``, innermost first, as ``function@file:line``."""
        for depth, text in enumerate(frames):
            function, _, place = text.partition("@")
            file, _, line = place.partition(":")
            number = self.frames.setdefault(text, 100 + len(self.frames))
            self.session.append("meta.frame", t=self.now, id=number, kind=0, function=function,
                                file=file, line=int(line or 0))  # fmt: skip
            self.session.append("meta.stack", t=self.now, id=id, depth=depth, frame=number)
        self.stacks.append(Stack(process, id, kind))
        return self.stacks[-1]

    def string(self, id: int, text: str) -> int:
        self.session.append("meta.string", t=self.now, id=id, text=text)
        return id

    def run(self, seconds: int, act: Callable[[int, int], None] = lambda second, t: None) -> None:
        """``act(second, t)`` allocates and frees at moment ``t`` in each second."""
        for second in range(seconds):
            act(second, self.now + SECOND // 2)
            self.now += SECOND
            self._rows()
        self.session.refresh()

    def _rows(self) -> None:
        number = (self.now - BOOT) // SECOND
        sums: dict[tuple[int, int], list[int]] = {}
        for s in self.stacks:
            total = sums.setdefault((s.process, s.kind), [0] * 6)
            for i, amount in enumerate((s.live, len(s.held), *s.since)):
                total[i] += amount
            if s.changed or (s.held and number % 10 == 0):
                self._append("gpu.stack", (s.live, len(s.held), *s.since), process=s.process,
                             stack=s.stack, kind=s.kind, born=s.born)  # fmt: skip
            s.since, s.changed = [0, 0, 0, 0], False
        for (process, kind), total in sums.items():
            self._append("gpu.memory", total, process=process, kind=kind)

    def _append(self, stream: str, amounts: Sequence[int], **more: int) -> None:
        names = ("live", "blocks", "allocs", "frees", "allocated", "freed")
        columns = dict(zip(names, amounts, strict=True))
        self.session.append(stream, t=self.now, dt=SECOND, **columns, **more)

    def end(self, process: int) -> None:
        """The process ends: all it held is given back."""
        self.process(process, 4242, ended=self.now)
        for s in self.stacks:
            if s.process == process:
                while s.held:
                    s.free()
                s.changed = False
        self.session.refresh()


def hist(**slots: int) -> list[int]:
    """A log2 histogram: ``hist(s10=5)`` has five in slot 10."""
    found = [0] * st.HIST_SLOTS
    for name, n in slots.items():
        found[int(name[1:])] = n
    return found
