"""Threads that allocate and free as fast as they can, and steps drawn at random."""

from __future__ import annotations

import random
import subprocess
import sys
import textwrap
import threading
from pathlib import Path

import numpy as np
import pytest

from tests.cuda.memoryhost import ByCaller, Host, Traced, really, tracing
from tests.cuda.memorystorm import Storm
from tests.simgpu import truth
from tests.simgpu.run import environment
from tests.simgpu.target import OUT

pytestmark = [pytest.mark.bpf, pytest.mark.tools("gcc")]

PAGE = 2 << 20
ON_0 = {"prop": 0}


def consistent(host: Host, pid: int) -> None:
    """Each row says what the rows up to it add up to, and never less than nothing."""
    rows = host.rows("gpu.memory")
    rows = rows[rows["process"] == host.process(pid)]
    for kind in np.unique(rows["kind"]):
        mine = rows[rows["kind"] == kind]
        for live, more, less in (("live", "allocated", "freed"), ("blocks", "allocs", "frees")):
            change = mine[more].astype(np.int64) - mine[less].astype(np.int64)
            assert (np.cumsum(change) == mine[live].astype(np.int64)).all()


@pytest.mark.parametrize(
    ("sizes", "options"),
    [
        ({}, {"threads": 8, "count": 4000, "live": 1, "kinds": 1}),  # the same few addresses
        ({}, {"threads": 8, "count": 2000, "live": 9, "keep": 5, "cross": 1, "wrong": 3}),
        ({"blocks": 20, "vmm": 8}, {"threads": 4, "count": 1500, "live": 30, "keep": 9,
                                    "cross": 1, "wrong": 5}),
    ],
    ids=["reuse", "kinds", "overflow"],
)  # fmt: skip
def test_a_storm(tmp_path: Path, sizes: dict[str, int], options: dict[str, int]) -> None:
    with tracing(ByCaller(**sizes)) as host, Storm(host, tmp_path, **options) as storm:
        storm.begin()
        waits = threading.Thread(target=storm.finished)
        waits.start()
        while waits.is_alive():
            host.poll()
            waits.join(0.05)
        host.poll()
        assert host.live(storm.pid) == really(storm.truth)
        consistent(host, storm.pid)
        assert host.total(storm.pid, "unknown") == 0
        assert not [x for x in host.losses if x.stream == "gpu.memory"]
        allocated = sum(c.returned - c.failed for n, c in storm.truth.counts.items()
                        if n.startswith(("cuMemAlloc", "cuMemHostAlloc", "cuMemAddressReserve",
                                         "cuMemCreate", "cuMemMap")))  # fmt: skip
        assert host.total(storm.pid, "allocs") == allocated
        storm.close()
        host.poll()
        assert host.live(storm.pid) == {}


def test_two_threads_free_the_same_block(tmp_path: Path) -> None:
    """One of them succeeds, whichever came in first."""
    text = """
        import ctypes, sys, threading
        from tests.simgpu.driver import Driver
        sys.stdin.readline()
        driver = Driver()
        ctx = driver.start()
        free = driver.lib.cuMemFree_v2
        meet = threading.Barrier(3)
        blocks = [0]
        def work():
            driver.ok("cuCtxSetCurrent", ctx)
            for _ in range(1500):
                meet.wait()
                free(ctypes.c_uint64(blocks[0]))
                meet.wait()
        threads = [threading.Thread(target=work) for _ in range(2)]
        for t in threads:
            t.start()
        for i in range(1500):
            blocks[0] = driver.get("cuMemAlloc_v2", 1000 + i)
            meet.wait()
            meet.wait()
        for t in threads:
            t.join()
        print("done", flush=True)
        sys.stdin.readline()
    """
    with tracing() as host:
        child = subprocess.Popen(
            [sys.executable, "-c", textwrap.dedent(text)], env=environment(tmp_path), text=True,
            stdin=subprocess.PIPE, stdout=subprocess.PIPE,
        )  # fmt: skip
        assert child.stdin
        assert child.stdout
        host.want(child.pid)
        child.stdin.write("\n")
        child.stdin.flush()
        assert child.stdout.readline() == "done\n"
        host.poll()
        assert really(truth.of_pid(tmp_path, child.pid)) == {}
        assert host.live(child.pid) == {}
        assert host.total(child.pid, "frees") == host.total(child.pid, "failed") == 1500
        assert host.total(child.pid, "unknown") == 0
        assert not [x for x in host.losses if x.stream == "gpu.memory"]
        child.communicate("\n", timeout=20)


class Drawn:
    """Draws steps, right ones and wrong ones, from several threads."""

    def __init__(self, target: Traced, seed: int) -> None:
        self.target, self.random = target, random.Random(seed)
        self.blocks: list[tuple[str, int, tuple[int, ...]]] = []
        self.handles: list[int] = []
        self.mapped: list[int] = []
        self.base = target.ok("cuMemAddressReserve", OUT, 64 * PAGE, 0, 0, 0)
        ctx = target.ok("cuCtxGetCurrent", OUT)
        self.threads = ["main", "one", "two"]
        for t in self.threads[1:]:
            target.ok("cuCtxSetCurrent", ctx, thread=t)

    def step(self) -> None:
        r, ok = self.random, self.target.ok
        thread, size = r.choice(self.threads), r.randrange(1, 1 << 20)
        what = r.choice(["alloc", "alloc", "alloc", "free", "free", "wrong", "create", "map",
                         "unmap", "release"])  # fmt: skip
        if what == "alloc":
            name, args, free, rest = r.choice([
                ("cuMemAlloc_v2", (size,), "cuMemFree_v2", ()),
                ("cuMemAllocAsync", (size, 0), "cuMemFreeAsync", (0,)),
                ("cuMemAllocManaged", (size, 1), "cuMemFree_v2", ()),
                ("cuMemHostAlloc", (size, 0), "cuMemFreeHost", ()),
                ("cuMemAlloc_v2", (1 << 60,), "", ()),
            ])  # fmt: skip
            result, out = self.target.call(name, OUT, *args, thread=thread)
            assert (result == 0) == bool(free)
            if not result:
                self.blocks.append((free, out[0], rest))
        elif what == "free" and self.blocks:
            name, address, rest = self.blocks.pop(r.randrange(len(self.blocks)))
            ok(name, address, *rest, thread=thread)
        elif what == "wrong" and self.blocks:
            name, address, rest = r.choice(self.blocks)
            assert self.target.call(name, address + 8, *rest, thread=thread)[0]
            assert self.target.call("cuMemRelease", address)[0]
        elif what == "create":
            self.handles.append(ok("cuMemCreate", OUT, PAGE, ON_0, 0, thread=thread))
        elif what == "map" and self.handles:
            page = r.choice([p for p in range(64) if p not in self.mapped])
            handle = r.choice(self.handles)
            ok("cuMemMap", self.base + page * PAGE, PAGE, 0, handle, 0, thread=thread)
            self.mapped.append(page)
        elif what == "unmap" and self.mapped:
            first = r.choice(self.mapped)
            n = 1
            while first + n in self.mapped and r.random() < 0.7:
                n += 1
            ok("cuMemUnmap", self.base + first * PAGE, n * PAGE, thread=thread)
            self.mapped = [p for p in self.mapped if not first <= p < first + n]
        elif what == "release" and self.handles:
            ok("cuMemRelease", self.handles.pop(r.randrange(len(self.handles))), thread=thread)


@pytest.mark.parametrize("sizes", [{}, {"blocks": 12, "vmm": 6, "stacks": 3}], ids=["", "overflow"])
@pytest.mark.parametrize("seed", [1, 2])
def test_steps_at_random(tmp_path: Path, sizes: dict[str, int], seed: int) -> None:
    with tracing(ByCaller(**sizes)) as host, Traced(host, tmp_path) as target:
        drawn = Drawn(target, seed)
        for i in range(400):
            drawn.step()
            if i % 5 == 0:
                target.check()
        told = target.check()
        consistent(host, target.pid)
        host.poll(after=1)
        stacks = host.stacks(target.pid)
        for kind, sums in told.items():
            of_kind = [v for (_, k), v in stacks.items() if k == kind]
            assert tuple(map(sum, zip(*of_kind, strict=True))) == sums
        assert host.total(target.pid, "unknown") == 0
        assert not [x for x in host.losses if x.stream == "gpu.memory"]
