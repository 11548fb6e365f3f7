"""A program that allocates from many functions, twice.

Standard library only, and any Python from 3.10 on: it runs inside targets.
"""

from __future__ import annotations

import sys

from tests.simgpu.driver import Driver
from tests.simgpu.workloads import stacks


def main() -> None:
    driver = Driver()
    shapes = stacks.Shapes(driver, driver.start(), 5)
    functions = stacks.distinct(shapes, int(sys.argv[1]))
    for word in ("first", "second"):
        print(word, flush=True)
        sys.stdin.readline()
        for f in functions:
            f()
    print("done", flush=True)
    sys.stdin.readline()


if __name__ == "__main__":
    main()
