"""What one refresh of a screen takes, on a session with many processes that use CUDA."""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterator

import numpy as np

from benchlib.model import Context, Row
from dsprobe.tui.control import every_screen
from dsprobe.tui.draw import columns, draw
from dsprobe.tui.glyphs import BLOCKS
from dsprobe.tui.observer import Observer
from dsprobe.tui.player import Player
from tests.tui.memory import MemorySession

_SECOND = 10**9
_BOOT = 1_000 * _SECOND
_PROCESSES, _STACKS, _DEPTH, _FRAMES = 64, 5_000, 20, 20_000
_THREADS = 4 * _PROCESSES
_SIZE = (160, 50)


class _Host:
    """Every stack changes every ten seconds, one in five each second."""

    def __init__(self) -> None:
        self.session = s = MemorySession(live=True)
        self._random = np.random.default_rng(1)
        self._process = np.arange(_STACKS) % _PROCESSES + 1
        self._live = self._random.integers(1 << 10, 1 << 30, _STACKS)
        self._thread = np.arange(1, _THREADS + 1)
        self._second = 0
        s.append("meta.coverage", t=_BOOT, probe=["memory", "launches", "calls"], program="",
                 status=0)  # fmt: skip
        s.append("meta.process", t=_BOOT, id=np.arange(1, _PROCESSES + 1), comm="python3",
                 pid=np.arange(_PROCESSES) + 1000)  # fmt: skip
        s.append("meta.thread", t=_BOOT, id=self._thread, process=self._owner, comm="worker",
                 tid=self._thread + 5000)  # fmt: skip
        frames = np.arange(1, _FRAMES + 1)
        names = np.array([f"function_{i}" for i in frames], object)
        s.append(
            "meta.frame",
            t=_BOOT,
            id=frames,
            kind=frames % 3 == 0,
            function=names,
            file="/srv/module.py",
            line=frames % 500,
            module="/usr/lib/library.so",
        )
        # The outermost eight frames are the same in all; the others fork as calls do.
        stack = np.repeat(np.arange(1, _STACKS + 1), _DEPTH)
        depth = np.tile(np.arange(_DEPTH), _STACKS)
        fork = stack * 37 // (depth + 1) ** 2 * 7 + depth * 101
        frame = np.where(depth >= 12, depth, fork % _FRAMES) + 1
        s.append("meta.stack", t=_BOOT, id=stack, depth=depth, frame=frame)

    @property
    def _owner(self) -> np.ndarray:  # type: ignore[type-arg]
        return (self._thread - 1) // 4 + 1

    def advance(self) -> None:
        """Another second."""
        self._second += 1
        t, s = _BOOT + self._second * _SECOND, self.session
        some = np.arange(_STACKS)
        if self._second % 10:
            some = self._random.choice(_STACKS, _STACKS // 5, replace=False)
        grown = self._live[some] + self._random.integers(-(1 << 20), 1 << 20, len(some))
        self._live[some] = np.maximum(grown, 1)
        s.append("gpu.stack", t=t, dt=_SECOND, process=self._process[some], stack=some + 1,
                 live=self._live[some], blocks=5, allocs=1, frees=1, born=_BOOT)  # fmt: skip
        whole = np.bincount(self._process, self._live, _PROCESSES + 1)[1:].astype(np.uint64)
        s.append("gpu.memory", t=t, dt=_SECOND, process=np.arange(1, _PROCESSES + 1), live=whole,
                 blocks=400, allocs=100, frees=100)  # fmt: skip
        hist = np.zeros((_THREADS, 32), np.uint32)
        hist[:, 13] = 1000
        s.append("cuda.thread", t=t, dt=_SECOND, process=self._owner, thread=self._thread,
                 count=1000, hist=hist, longest=10**6, longest_end=t)  # fmt: skip
        s.append("cuda.stream", t=t, dt=_SECOND, process=self._owner, stream=self._thread,
                 count=1000, hist=hist, longest=10**6)  # fmt: skip
        s.append("meta.clock", t=t, wall=t, uncertainty=1)


def refresh(ctx: Context) -> Iterator[Row]:
    """Seconds of CPU from new rows to the lines of the screen; leaks are looked for now and then,
    which the worst of the refreshes shows."""
    host = _Host()
    for _ in range(130):
        host.advance()
    host.session.refresh()
    for screen in every_screen():
        player = Player(lambda: 0, *host.session.span(), growing=True, live=True)
        player.resize(columns(screen, *_SIZE))
        observer = Observer(host.session, player, screen)
        took = []
        for _ in range(8 if ctx.quick else 40):
            host.advance()
            began = time.thread_time()
            draw(observer.look(), screen, BLOCKS, *_SIZE)
            took.append(1000 * (time.thread_time() - began))
        first, *others = took
        note = f"the first {first:.0f}, the worst after it {max(others):.0f}"
        what = f"{_PROCESSES} processes, {_STACKS:,} stacks"
        yield Row(f"{screen.id}, {what}: refresh", "ms", statistics.median(others), 50, note=note)
