"""Worker processes of multiprocessing, started by ``method``: fork, spawn or forkserver.

Each makes ``count`` allocations and launches and leaves ``keep`` allocated, as LLM servers' workers
do; the parent touches no driver before it forks.
"""

from __future__ import annotations

import multiprocessing
import sys

from tests.simgpu.driver import Driver
from tests.simgpu.workloads.options import gate, options


def work(number: int, count: int, keep: int) -> None:
    driver = Driver()
    driver.start()
    function = driver.kernel(f"worker_{number}")
    for i in range(count):
        address = driver.get("cuMemAlloc_v2", (1 + number) << 12)
        driver.launch(function)
        if i >= keep:
            driver.ok("cuMemFree_v2", address)
    driver.ok("cuCtxSynchronize")


def main() -> None:
    found = options(method="spawn", workers=3, count=50, keep=2)
    gate(found, "ready")
    multiprocessing.set_start_method(found["method"])
    workers = [
        multiprocessing.Process(target=work, args=(i, int(found["count"]), int(found["keep"])))
        for i in range(int(found["workers"]))
    ]
    for w in workers:
        w.start()
    for w in workers:
        w.join()
    gate(found, "done")
    if any(w.exitcode for w in workers):
        sys.exit(f"workers exited with {[w.exitcode for w in workers]}")


if __name__ == "__main__":
    main()
