"""Python threads that allocate, launch, wait, and free what another one allocated."""

from __future__ import annotations

import queue
import threading

from tests.simgpu.driver import Driver
from tests.simgpu.workloads.options import gate, options


def work(
    driver: Driver,
    ctx: int,
    count: int,
    here: queue.SimpleQueue[int],
    there: queue.SimpleQueue[int],
) -> None:
    driver.ok("cuCtxSetCurrent", ctx)
    stream = driver.get("cuStreamCreate", 1)
    function = driver.kernel("work")
    for i in range(count):
        there.put(driver.get("cuMemAllocAsync", 4096 + i, stream))
        driver.launch(function, stream, grid=1 + i % 8)
        driver.ok("cuStreamSynchronize", stream)
        driver.ok("cuMemFreeAsync", here.get(), stream)
    driver.ok("cuStreamDestroy_v2", stream)


def main() -> None:
    found = options(threads=4, count=100)
    driver = Driver()
    ctx = driver.start()
    gate(found, "ready")
    n = int(found["threads"])
    queues: list[queue.SimpleQueue[int]] = [queue.SimpleQueue() for _ in range(n)]
    threads = [
        threading.Thread(
            target=work,
            args=(driver, ctx, int(found["count"]), queues[i], queues[(i + 1) % n]),
        )
        for i in range(n)
    ]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    gate(found, "done")


if __name__ == "__main__":
    main()
