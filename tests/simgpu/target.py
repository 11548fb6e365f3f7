"""A process that a test drives call by call (workloads/console.py)."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

from tests.simgpu import truth
from tests.simgpu.run import environment, workload
from tests.simgpu.scenario import Scenario

OUT = "out"
"""An argument that the call fills."""


class Target:
    """Another process with the simulated driver; ``prefix`` runs it under another command."""

    def __init__(
        self, folder: Path, scenario: Scenario | None = None, *, python: str = sys.executable,
        prefix: Sequence[str] = (), **popen: Any,
    ) -> None:  # fmt: skip
        self.folder = folder
        self._process = subprocess.Popen(
            [*prefix, *workload("console", python=python)],
            env=environment(folder, scenario), text=True,
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, **popen,
        )  # fmt: skip
        self.own_pid = int(self._ask({"do": "pid"}))

    def __enter__(self) -> Target:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, e: BaseException | None, tb: TracebackType | None
    ) -> None:
        self.close()

    @property
    def pid(self) -> int:
        """As we see it; with a ``prefix`` that forks, that command's."""
        return self._process.pid

    def _ask(self, request: dict[str, Any]) -> Any:
        assert self._process.stdin
        assert self._process.stdout
        self._process.stdin.write(json.dumps(request) + "\n")
        self._process.stdin.flush()
        answer = self._process.stdout.readline()
        if not answer:
            raise AssertionError(f"the target has ended with {self._process.wait(10)}")
        told = json.loads(answer)
        if "error" in told:
            raise AssertionError(told["error"])
        return told["answer"]

    def start(self, device: int = 0, thread: str = "main") -> None:
        """Load the driver, initialise it, make the primary context current in ``thread``."""
        self._ask({"do": "start", "device": device, "thread": thread})

    def call(self, name: str, *args: object, thread: str = "main") -> tuple[int, list[int]]:
        """Result of a call made in ``thread``, and what it put in each :data:`OUT`.

        Arguments: integers, OUT, strings (as C strings), ``{"prop": device}`` (allocation
        properties on a device), ``{"ipc": [...]}`` (64 bytes by value), ``{"buffer": n}``.
        """
        answer = self._ask({"do": "call", "call": [name, *args], "thread": thread})
        return answer["result"], answer["out"]

    def ok(self, name: str, *args: object, thread: str = "main") -> int:
        """:meth:`call` that must return 0; what it put in its first OUT, else 0."""
        result, out = self.call(name, *args, thread=thread)
        assert result == 0, f"{name} returned {result}"
        return out[0] if out else 0

    def fork(self, *calls: Sequence[object], start: bool = True) -> tuple[int, list[int]]:
        """Fork a child that makes ``calls`` and exits; its PID and their results.

        ``start``: it initialises first, which works only where the parent has not.
        """
        answer = self._ask({"do": "fork", "calls": calls, "start": start})
        return answer["pid"], answer["results"]

    def ipc(self, address: int) -> dict[str, list[int]]:
        """An argument by which another process opens memory of this one."""
        return {"ipc": self._ask({"do": "ipc", "address": address})}

    def end_thread(self, thread: str) -> None:
        """Have a thread that made calls end."""
        self._ask({"do": "end", "thread": thread})

    @property
    def truth(self) -> truth.Process:
        return truth.of_pid(self.folder, self.own_pid)

    def kill(self) -> None:
        """SIGKILL, and wait."""
        self._process.kill()
        self._process.wait(10)

    def close(self) -> None:
        """Have it exit; AssertionError if it does not exit with 0 (or was killed)."""
        if self._process.poll() is None:
            assert self._process.stdin
            self._process.stdin.close()
            code = self._process.wait(20)
            assert code == 0, f"the target exited with {code}"
        if self._process.stdout:
            self._process.stdout.close()
