"""Run as a process in a terminal: the screen on a scenario, in one of a few situations."""

from __future__ import annotations

import os
import sys
import threading
import time

from dsprobe.tui.app import run
from tests.tui.memory import MemorySession
from tests.tui.scenario import Scenario


class Growing(MemorySession):
    """One tick of the scenario arrives with each refresh: no clock is involved."""

    def __init__(self) -> None:
        super().__init__(live=True)
        self.scenario = Scenario(self)
        self.scenario.run(120)
        super().refresh()
        self.left = -1

    def refresh(self) -> bool:
        if self.left != 0:
            self.scenario.advance()
            self.scenario.advance()
            self.left -= 1
        return super().refresh()


class Failing(Growing):
    def refresh(self) -> bool:
        if self.scenario.tick > 490:
            raise RuntimeError("the source broke")
        return super().refresh()


class Hanging(Growing):
    def refresh(self) -> bool:
        if self.scenario.tick > 490:
            threading.Event().wait()
        return super().refresh()


def main(situation: str, hz: float) -> int:
    session = {"live": Growing, "failing": Failing, "hanging": Hanging}[situation]()
    started = time.process_time()
    code = run(session, save=None, start="live", hz=hz)
    if os.environ.get("REPORT"):
        with open(os.environ["REPORT"], "w") as f:
            f.write(f"{time.process_time() - started} {session.scenario.tick}")
    return code


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], float(sys.argv[2])))
