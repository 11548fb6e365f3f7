"""A program whose descendants allocate: forked, forked from a thread, started anew.

Standard library only, and any Python from 3.10 on: it runs inside targets.
"""

from __future__ import annotations

import os
import subprocess
import sys
import threading

from tests.simgpu.driver import Driver
from tests.simgpu.workloads import stacks


def allocate() -> None:
    stacks._open_truth()
    driver = Driver()
    shapes = stacks.Shapes(driver, driver.start(), 5)
    driver.on_call(stacks.record)
    shapes.plain()
    shapes.deep()
    shapes.thread()


def fork() -> None:
    pid = os.fork()
    if pid == 0:
        allocate()
        os._exit(0)
    os.waitpid(pid, 0)


def gate(word: str) -> None:
    print(word, os.getpid(), flush=True)
    sys.stdin.readline()


def main() -> None:
    if sys.argv[1:] == ["anew"]:
        Driver()
        gate("anew")
        allocate()
        return
    Driver()  # mapped, and not initialised: a child may do that
    gate("ready")
    fork()
    thread = threading.Thread(target=fork)
    thread.start()
    thread.join()
    subprocess.run([sys.executable, "-m", "tests.cuda.stackfamily", "anew"], check=True)
    gate("done")


if __name__ == "__main__":
    main()
