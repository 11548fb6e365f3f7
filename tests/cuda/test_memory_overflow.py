"""More live allocations and stacks than the kernel's tables hold: it is said, and the totals still
equal truth."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from dsprobe.probes.cuda import Cuda
from dsprobe.probes.memory import Memory
from tests.cuda.memoryhost import ByCaller, Host, Traced, tracing
from tests.cuda.memorystorm import Storm
from tests.simgpu.target import OUT, Target
from tests.support.agents import watched
from tests.support.wait import until

pytestmark = [pytest.mark.bpf, pytest.mark.tools("gcc")]

PAGE = 2 << 20
ON_0 = {"prop": 0}


def test_blocks_and_stacks_that_find_no_room(tmp_path: Path) -> None:
    with (
        tracing(ByCaller(by_size=True, blocks=40, stacks=10)) as host,
        Traced(host, tmp_path) as target,
    ):
        blocks = [target.ok("cuMemAlloc_v2", OUT, 1000 + i) for i in range(150)]
        blocks += [target.ok("cuMemAllocAsync", OUT, 5000 + i, 0) for i in range(50)]
        pinned = [target.ok("cuMemHostAlloc", OUT, 100, 0) for i in range(20)]
        told = target.check()
        assert "kept outside" in host.probe.shortage
        assert "stacks is full" in host.probe.shortage
        assert sum(x.lost for x in host.losses if x.stream == "gpu.stack") > 0
        stacks = host.stacks(target.pid)
        for kind in ("device", "async", "host"):
            of_kind = [v for (_, k), v in stacks.items() if k == kind]
            assert tuple(map(sum, zip(*of_kind, strict=True))) == told[kind]
        assert 0 in {stack for stack, _ in stacks}
        random.Random(1).shuffle(blocks)
        for i, address in enumerate(blocks):
            assert target.call("cuMemFree_v2", address + 1)[0] == 1
            target.ok("cuMemFree_v2", address)
            assert target.call("cuMemFree_v2", address)[0] == 1
            if i % 20 == 0:
                target.check()
        for address in pinned:
            target.ok("cuMemFreeHost", address)
        assert target.check() == {}
        assert host.total(target.pid, "unknown") == 0
        assert host.total(target.pid, "failed") == 2 * len(blocks)
        host.poll(after=1)
        assert host.stacks(target.pid) == {}
        assert len(host.probe.ledger) == 0
        host.poll(after=12)
        assert "kept outside" not in host.probe.shortage
        assert not [x for x in host.losses if x.stream == "gpu.memory"]


@pytest.mark.parametrize("order", ["unmap", "release"])
def test_virtual_memory_that_finds_no_room(tmp_path: Path, order: str) -> None:
    with tracing(ByCaller(vmm=12)) as host, Traced(host, tmp_path) as target:
        pages = 30
        base = target.ok("cuMemAddressReserve", OUT, 2 * pages * PAGE, 0, 0, 0)
        handles = []
        for i in range(pages):
            handles.append(target.ok("cuMemCreate", OUT, PAGE, ON_0, 0))
            target.ok("cuMemMap", base + i * PAGE, PAGE, 0, handles[i], 0)
            if i % 3 == 0:  # mapped twice
                target.ok("cuMemMap", base + (pages + i) * PAGE, PAGE, 0, handles[i], 0)
            if i % 4 == 0:
                assert target.ok("cuMemRetainAllocationHandle", OUT, base + i * PAGE) == handles[i]
            target.check()
        assert host.probe.shortage

        def unmap() -> None:
            for i in range(pages, 2 * pages, 3):
                target.ok("cuMemUnmap", base + i * PAGE, PAGE)
                target.check()
            assert target.call("cuMemUnmap", base, (pages + 1) * PAGE)[0] == 1
            target.check()
            for i in range(0, pages, 5):
                target.ok("cuMemUnmap", base + i * PAGE, 5 * PAGE)
                target.check()

        def release() -> None:
            for i, handle in enumerate(handles):
                for _ in range(1 + (i % 4 == 0)):
                    target.ok("cuMemRelease", handle)
                assert target.call("cuMemRelease", handle)[0] == 1
                target.check()

        for step in (unmap, release) if order == "unmap" else (release, unmap):
            step()
        target.ok("cuMemAddressFree", base, 2 * pages * PAGE)
        assert target.check() == {}
        assert host.total(target.pid, "unknown") == 0
        assert not [x for x in host.losses if x.stream == "gpu.memory"]


def test_contexts_and_processes_end_with_blocks_that_found_no_room(tmp_path: Path) -> None:
    with tracing(ByCaller(blocks=8)) as host:
        with Traced(host, tmp_path) as target:
            target.ok("cuMemAlloc_v2", OUT, 10)
            ctx = target.ok("cuCtxCreate_v2", OUT, 0, 0)
            blocks = [target.ok("cuMemAlloc_v2", OUT, 1000) for _ in range(30)]
            for address in blocks[15:20]:
                target.ok("cuMemFree_v2", address)
            target.check()
            target.ok("cuCtxDestroy_v2", ctx)
            assert target.check() == {"device": (10, 1)}
            for _ in range(30):
                target.ok("cuMemAlloc_v2", OUT, 7)
            assert target.check() == {"device": (220, 31)}
            assert len(host.probe.ledger)
        host.poll()
        assert host.live(target.pid) == {}
        assert len(host.probe.ledger) == 0


def test_blocks_for_which_there_is_no_room_anywhere_are_lost_and_said(tmp_path: Path) -> None:
    with tracing(ByCaller(blocks=8, kept=5)) as host:
        with Traced(host, tmp_path) as target:
            blocks = [target.ok("cuMemAlloc_v2", OUT, 100) for _ in range(40)]
            assert target.check() == {"device": (4000, 40)}
            assert host.total(target.pid, "frees") == 0
            lost = _without_a_place(host)
            assert lost >= 40 - 8 - 5 - 8  # a table of the kernel has some room to spare
            said = (f"{lost} blocks of {100 * lost:,} or more bytes of process {target.pid} found"
                    " no place")  # fmt: skip
            assert said in host.probe.shortage
            for address in blocks:
                target.ok("cuMemFree_v2", address)
            host.poll()
            assert host.total(target.pid, "frees") == 40 - lost
            assert host.total(target.pid, "unknown") == lost
            assert host.live(target.pid) == {"device": (100 * lost, lost)}
            again = [target.ok("cuMemAlloc_v2", OUT, 7) for _ in range(5)]
            host.poll()
            assert host.live(target.pid) == {"device": (100 * lost + 35, lost + 5)}
            for address in again:
                target.ok("cuMemFree_v2", address)
            host.poll()
            assert host.live(target.pid) == {"device": (100 * lost, lost)}
        host.poll()
        assert host.live(target.pid) == {}
        host.poll()
        assert "no place" not in host.probe.shortage


def test_a_context_takes_along_what_had_no_place(tmp_path: Path) -> None:
    with tracing(ByCaller(blocks=8, kept=5)) as host, Traced(host, tmp_path) as target:
        ctx = target.ok("cuCtxCreate_v2", OUT, 0, 0)
        for _ in range(40):
            target.ok("cuMemAlloc_v2", OUT, 100)
        assert target.check() == {"device": (4000, 40)}
        target.ok("cuCtxDestroy_v2", ctx)
        assert target.check() == {}
        host.poll()
        assert "no place" not in host.probe.shortage


def _without_a_place(host: Host) -> int:
    return sum(x.lost for x in host.losses if x.reason.startswith("blocks without a place"))


def test_an_agent_that_stalls(tmp_path: Path) -> None:
    """The ring for what overflows fills up: what is lost is said, stays live, and no more is freed
    than was."""
    with tracing(ByCaller(blocks=8)) as host:
        storm = Storm(host, tmp_path, threads=2, count=60_000, live=500, kinds=1)
        storm.run()
        host.poll()
        assert _without_a_place(host) > 0
        told, really = host.last(storm.pid)["device"], storm.truth
        calls = really.counts
        assert host.total(storm.pid, "allocs") == calls["cuMemAlloc_v2"].calls
        assert 0 < host.total(storm.pid, "frees") <= calls["cuMemFree_v2"].calls
        assert told["blocks"] >= really.live["device"].blocks
        assert told["live"] >= really.live["device"].bytes
        storm.close()
        host.poll()
        assert host.live(storm.pid) == {}


def test_an_agent_says_so(tmp_path: Path) -> None:
    with watched(Cuda(), Memory(blocks=8)) as it, Target(tmp_path) as target:
        target.start()

        def seen() -> bool:
            return bool(target.ok("cuMemAlloc_v2", OUT, 1000)) and (
                target.pid in it.rows("meta.process")["pid"]
            )

        until(seen, "its allocations are seen")
        for _ in range(30):
            target.ok("cuMemAlloc_v2", OUT, 1000)
        until(lambda: it.coverage()["memory", ""].status == "shed", "it says that it is short")
        assert "kept outside" in it.coverage()["memory", ""].reason
        it.pass_by()
        rows, processes = it.rows("gpu.memory"), it.rows("meta.process")
        number = processes["id"][processes["pid"] == target.pid][-1]
        mine = rows[rows["process"] == number]
        assert mine["blocks"][-1] == mine["allocs"].sum() > 30
        assert mine["live"][-1] == 1000 * mine["blocks"][-1]
