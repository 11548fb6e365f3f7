"""A program that allocates in interpreters within the interpreter, and between them.

Standard library only, and any Python from 3.10 on: it runs inside targets.
"""

from __future__ import annotations

import sys
import threading
from typing import Any

from tests.simgpu.driver import Driver

WITHIN = """
import ctypes
lib = ctypes.CDLL("libcuda.so.1")
def within(n):
    assert lib.cuMemAlloc_v2(ctypes.byref(ctypes.c_uint64()), ctypes.c_size_t(n)) == 0
def calls_within(n):
    within(n)
calls_within({})
"""


def outside(driver: Driver, size: int) -> None:
    driver.get("cuMemAlloc_v2", size)


def runs(driver: Driver, context: int, size: int) -> None:
    driver.ok("cuCtxSetCurrent", context)
    made: Any
    try:
        import _interpreters as made  # type: ignore[import-not-found]
    except ImportError:
        import _xxsubinterpreters as made  # type: ignore[import-not-found]
    try:
        new = made.create(isolated=False)  # up to 3.12 ctypes does not load in others
    except TypeError:
        new = made.create()
    run = getattr(made, "exec", None) or made.run_string
    failed = run(new, WITHIN.format(size))
    assert not failed, failed
    outside(driver, size + 1)


def main() -> None:
    driver = Driver()
    context = driver.start()
    outside(driver, 1000)
    print("ready", flush=True)
    sys.stdin.readline()
    outside(driver, 2000)
    runs(driver, context, 3000)
    thread = threading.Thread(target=runs, args=(driver, context, 4000))
    thread.start()
    thread.join()
    outside(driver, 5000)
    print("done", flush=True)
    sys.stdin.readline()


if __name__ == "__main__":
    main()
