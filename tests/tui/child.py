"""Run as a process in a terminal: the screen on a scenario, in one of a few situations."""

from __future__ import annotations

import sys
import threading

from dsprobe.tui.app import run
from tests.tui.memory import MemorySession
from tests.tui.scenario import Scenario

WARM, DONE = 5, 45
"""Refreshes after which the session says "warm" and "done", where a test can see it."""


class Growing(MemorySession):
    """Half a second of the scenario arrives with each refresh: no clock is involved."""

    def __init__(self) -> None:
        super().__init__(live=True)
        self.scenario = Scenario(self)
        self.scenario.run(120)
        super().refresh()
        self.refreshes = 0

    def refresh(self) -> bool:
        self.refreshes += 1
        if self.refreshes <= DONE:
            self.scenario.run(0.5)
        if self.refreshes == WARM:
            self.problems = ("warm",)
        if self.refreshes == DONE:
            self.problems = ("done",)
        return super().refresh()


class Failing(Growing):
    def refresh(self) -> bool:
        if self.refreshes == WARM:
            raise RuntimeError("the source broke")
        return super().refresh()


class Hanging(Growing):
    def refresh(self) -> bool:
        if self.refreshes == WARM:
            threading.Event().wait()
        return super().refresh()


if __name__ == "__main__":
    session = {"growing": Growing, "failing": Failing, "hanging": Hanging}[sys.argv[1]]()
    sys.exit(run(session, save=None, start="live", hz=float(sys.argv[2])))
