"""The probe on a simulated NVML, driven by the test instead of an agent."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import numpy as np

from dsprobe.probes.nvml import Nvml
from dsprobe.recordings import streams as st
from dsprobe.recordings.model import Rows
from tests.simgpu.nvml import State
from tests.support.wait import until

SLOW = 200_000_000


class Bench:
    """``clock`` is added to the probe's time: what takes minutes is over at once."""

    def __init__(self, state: State, library: str, again: int = 1) -> None:
        self.state, self.clock = state, 0
        self.probe = Nvml(library, now=lambda: time.monotonic_ns() + self.clock, again=again,
                          slow=SLOW)  # fmt: skip
        self._rows: dict[str, list[Rows]] = {}
        self._started = False

    def collect(self) -> None:
        if not self._started:
            self._started = True
            self.probe.start()
        for stream, rows in self.probe.collect(time.monotonic_ns()):
            self._rows.setdefault(stream.name, []).append(rows)

    def rows(self, stream: str) -> Rows:
        """All that has come so far."""
        return np.concatenate(self._rows.get(stream) or [st.STREAMS[stream].empty()])

    def until(self, condition: Callable[[], Any], what: str) -> Any:
        """Collect until ``condition()`` is true."""

        def met() -> Any:
            self.collect()
            return condition()

        return until(met, what)

    def standing(self, status: str) -> str:
        """Wait for that status; the reason."""
        self.until(lambda: self.probe.standing[0] == status, status)
        return self.probe.standing[1]

    def device(self, condition: Callable[[Any], Any], what: str) -> Any:
        """Wait for a row of nvml.device after now that meets ``condition``."""
        now = time.monotonic_ns()

        def met() -> Any:
            rows = self.rows("nvml.device")
            return [r for r in rows[rows["t"] > now] if condition(r)]

        return self.until(met, what)[0]

    def gpus(self) -> dict[str, Any]:
        """The last row of meta.gpu for each UUID."""
        return {str(r["uuid"]): r for r in self.rows("meta.gpu")}
