"""Allocations and frees from many threads at once (workloads/storm.c)."""

from __future__ import annotations

import subprocess
from pathlib import Path
from types import TracebackType

from tests.cuda.memoryhost import Host
from tests.simgpu import truth
from tests.simgpu.run import environment, workload


class Storm:
    """It has loaded the driver; :meth:`begin` lets it go, :meth:`finished` says when its threads
    have ended.  It keeps what it has until :meth:`close`."""

    def __init__(self, host: Host, folder: Path, **options: int) -> None:
        self._folder = folder
        self._process = subprocess.Popen(
            workload("storm", gate=1, **options), env=environment(folder), text=True,
            stdin=subprocess.PIPE, stdout=subprocess.PIPE,
        )  # fmt: skip
        self.pid = self._process.pid
        self._hear("begun")
        host.want(self.pid)
        self._go()
        self._hear("ready")

    def __enter__(self) -> Storm:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, e: BaseException | None, tb: TracebackType | None
    ) -> None:
        self.close()

    def _hear(self, word: str) -> None:
        assert self._process.stdout
        assert self._process.stdout.readline().strip() == word

    def _go(self) -> None:
        assert self._process.stdin
        self._process.stdin.write("\n")
        self._process.stdin.flush()

    def begin(self) -> None:
        self._go()

    def finished(self) -> str:
        """What it says of itself; waits for its threads."""
        assert self._process.stdout
        said = self._process.stdout.readline()
        self._hear("done")
        return said

    def run(self) -> str:
        self.begin()
        return self.finished()

    @property
    def truth(self) -> truth.Process:
        return truth.of_pid(self._folder, self.pid)

    def close(self) -> None:
        if self._process.poll() is None:
            assert self._process.stdin
            self._process.stdin.close()
            assert self._process.wait(20) == 0
        if self._process.stdout:
            self._process.stdout.close()
