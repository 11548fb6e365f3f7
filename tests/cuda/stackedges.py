"""A program that allocates where Python is at its oddest: with the GIL held, in a signal handler,
in a finaliser, in a thread among very many.

Standard library only, and any Python from 3.10 on: it runs inside targets.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys
import threading

from tests.simgpu.driver import Driver
from tests.simgpu.workloads import stacks


def holding(shapes: stacks.Shapes) -> None:
    """No other thread runs Python during the call."""
    lib, shapes.driver.lib = shapes.driver.lib, ctypes.PyDLL("libcuda.so.1")
    shapes.driver.lib.simgpu_symbol.restype = ctypes.c_char_p
    shapes.plain()
    shapes.driver.lib = lib


def in_a_handler(shapes: stacks.Shapes) -> None:
    signal.signal(signal.SIGUSR1, lambda *_: shapes.plain())
    os.kill(os.getpid(), signal.SIGUSR1)


class Finalised:
    def __init__(self, shapes: stacks.Shapes) -> None:
        self.shapes = shapes

    def __del__(self) -> None:
        self.shapes.plain()


def in_a_finaliser(shapes: stacks.Shapes) -> None:
    found = Finalised(shapes)
    del found


def among_many(shapes: stacks.Shapes, count: int) -> None:
    """The states of new threads come first in Python's list, the main thread's last."""
    done = threading.Event()
    threads = [threading.Thread(target=done.wait) for _ in range(count)]
    for t in threads:
        t.start()
    shapes.thread()
    shapes.plain()
    done.set()
    for t in threads:
        t.join()


def main() -> None:
    driver = Driver()
    shapes = stacks.Shapes(driver, driver.start(), 5)
    stacks._open_truth()
    print("ready", flush=True)
    sys.stdin.readline()
    driver.on_call(stacks.record)
    quiet = sys.argv[2:] == ["quiet"]  # the main thread's first call is the one behind the others
    for shape in () if quiet else (holding, in_a_handler, in_a_finaliser):
        stacks._shape.name = shape.__name__
        shape(shapes)
    stacks._shape.name = "among_many"
    among_many(shapes, int(sys.argv[1]))
    print("done", flush=True)
    sys.stdin.readline()


if __name__ == "__main__":
    main()
