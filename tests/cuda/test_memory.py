"""What gpu.memory says is live equals truth after every step, whatever kind, thread or end."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from dsprobe.recordings.cudastreams import MEMORY_KINDS
from tests.cuda.memoryhost import Host, Traced, tracing
from tests.simgpu.run import environment
from tests.simgpu.target import OUT, Target
from tests.support.wait import until

pytestmark = [pytest.mark.bpf, pytest.mark.tools("gcc")]

MIB = 1 << 20
PAGE = 2 * MIB
ON_0 = {"prop": 0}


@pytest.fixture(scope="module")
def host() -> Iterator[Host]:
    with tracing() as it:
        yield it


MakeTraced = Callable[..., Traced]


@pytest.fixture
def make(host: Host, tmp_path: Path) -> Iterator[MakeTraced]:
    made: list[Traced] = []

    def one(**tables: Any) -> Traced:
        made.append(Traced(host, tmp_path, **tables))
        return made[-1]

    yield one
    for t in made:
        t.close()


@pytest.fixture
def target(make: MakeTraced) -> Traced:
    return make(gpu={"memory": "8GiB"})


@pytest.mark.parametrize(
    ("kind", "alloc", "free"),
    [
        ("device", ("cuMemAlloc_v2", OUT, 1000), ("cuMemFree_v2",)),
        ("pitch", ("cuMemAllocPitch_v2", OUT, OUT, 100, 10, 4), ("cuMemFree_v2",)),
        ("managed", ("cuMemAllocManaged", OUT, 1000, 1), ("cuMemFree_v2",)),
        ("async", ("cuMemAllocAsync", OUT, 1000, 0), ("cuMemFreeAsync", 0)),
        ("async", ("cuMemAllocAsync_ptsz", OUT, 1000, 0), ("cuMemFreeAsync_ptsz", 0)),
        ("async", ("cuMemAllocAsync", OUT, 1000, 0), ("cuMemFree_v2",)),
        ("host", ("cuMemHostAlloc", OUT, 1000, 0), ("cuMemFreeHost",)),
        ("host", ("cuMemAllocHost_v2", OUT, 1000), ("cuMemFreeHost",)),
        ("reserved", ("cuMemAddressReserve", OUT, PAGE, 0, 0, 0), ("cuMemAddressFree", PAGE)),
        ("physical", ("cuMemCreate", OUT, PAGE, ON_0, 0), ("cuMemRelease",)),
    ],
)
def test_a_block_of_each_kind(
    target: Traced, kind: str, alloc: tuple[object, ...], free: tuple[object, ...]
) -> None:
    name, *args = alloc
    give, *rest = free
    address = target.ok(str(name), *args)
    assert set(target.check()) == {kind}
    assert target.call(str(give), address + 1, *rest)[0] != 0  # not where it begins
    assert target.check()
    target.ok(str(give), address, *rest)
    assert target.check() == {}
    assert target.call(str(give), address, *rest)[0] != 0  # twice
    null = target.call(str(give), 0, *rest)[0]
    assert target.check() == {}
    for column, count in (("allocs", 1), ("frees", 1), ("failed", 2 + (null != 0)), ("unknown", 0)):
        assert target.host.total(target.pid, column) == count, column


def test_single_events(target: Traced) -> None:
    stream = 0
    a = target.ok("cuMemAllocAsync", OUT, 5000, stream)
    assert target.call("cuMemAlloc_v2", OUT, 1 << 62)[0] == 2
    assert target.call("cuMemFreeAsync", a + 8, stream)[0] == 1
    target.ok("cuMemFreeAsync", a, stream)
    target.check()
    rows = target.host.rows("gpu.alloc")
    mine = rows[rows["process"] == target.host.process(target.pid)]
    told = [(int(r["op"]), MEMORY_KINDS[r["kind"]], int(r["result"]), int(r["bytes"]),
             int(r["address"])) for r in mine]  # fmt: skip
    assert told == [(0, "async", 0, 5000, a), (0, "device", 2, 1 << 62, 0),
                    (1, "async", 1, 0, a + 8), (1, "async", 0, 5000, a)]  # fmt: skip
    events = target.truth.of("cuMemAllocAsync", "cuMemAlloc_v2", "cuMemFreeAsync")
    assert (mine["t"] >= events["begun"]).all()
    assert (mine["stack"] != 0).tolist() == [True, False, False, False]
    names = {int(r["id"]): r["text"] for r in target.host.rows("meta.string")}
    assert [names[int(r["function"])] for r in mine[:2]] == ["cuMemAllocAsync", "cuMemAlloc_v2"]


def test_single_events_within_a_budget(make: MakeTraced, host: Host) -> None:
    """The rest are counted, and live bytes are right."""
    target = make()
    host.cuda.set_budget(30)  # 4 in 134 ms
    try:
        for _ in range(100):
            target.ok("cuMemFree_v2", target.ok("cuMemAlloc_v2", OUT, 500))
        assert target.call("cuMemFree_v2", 1)[0] == 1
        assert target.check() == {}
    finally:
        host.cuda.set_budget(20_000)
    rows = host.rows("gpu.alloc")
    single = int((rows["process"] == host.process(target.pid)).sum())
    assert single + host.total(target.pid, "shed") == 201
    assert 0 < single < 100
    assert host.total(target.pid, "allocs") == host.total(target.pid, "frees") == 100


def test_pool_memory(target: Traced) -> None:
    pool = target.ok("cuMemPoolCreate", OUT, ON_0)
    block = target.ok("cuMemAllocFromPoolAsync", OUT, 4096, pool, 0)
    assert target.check() == {"pool": (4096, 1)}
    target.ok("cuMemFreeAsync", block, 0)
    assert target.check() == {}


def test_registered_memory(target: Traced) -> None:
    target.ok("cuMemHostRegister_v2", 0x10000, 4096, 0)
    assert target.call("cuMemHostRegister_v2", 0x10000, 4096, 0)[0] == 712
    assert target.check() == {"registered": (4096, 1)}
    target.ok("cuMemHostUnregister", 0x10000)
    assert target.call("cuMemHostUnregister", 0x10000)[0] == 713
    assert target.check() == {}


def test_a_pitched_allocation_that_calls_another_is_one(make: MakeTraced) -> None:
    target = make(library={"nested": 1})
    address = target.ok("cuMemAllocPitch_v2", OUT, OUT, 100, 10, 4)
    target.host.poll()
    assert target.host.live(target.pid) == {"pitch": (5120, 1)}
    assert target.truth.bytes() == 5120
    target.ok("cuMemFree_v2", address)
    assert target.check() == {}


def test_expandable_segments(target: Traced) -> None:
    """In PyTorch's order: reserve, and for each page create, map, allow; unmap, release."""
    base = target.ok("cuMemAddressReserve", OUT, 8 * PAGE, 0, 0, 0)
    handles = []
    for i in range(3):
        handles.append(target.ok("cuMemCreate", OUT, PAGE, ON_0, 0))
        target.check()
        target.ok("cuMemMap", base + i * PAGE, PAGE, 0, handles[i], 0)
        target.ok("cuMemSetAccess", base + i * PAGE, PAGE, ON_0, 1)
        target.check()
    assert target.call("cuMemMap", base, PAGE, 0, handles[0], 0)[0] == 1  # there is something
    assert target.call("cuMemAddressFree", base, 8 * PAGE)[0] == 1  # mapped
    assert target.call("cuMemUnmap", base, PAGE // 2)[0] == 1  # a part
    target.check()
    target.ok("cuMemUnmap", base, 2 * PAGE)  # two at once
    assert target.check() == {"physical": (3 * PAGE, 3), "mapped": (PAGE, 1),
                              "reserved": (8 * PAGE, 1)}  # fmt: skip
    for handle in handles[:2]:
        target.ok("cuMemRelease", handle)
        target.check()
    target.ok("cuMemRelease", handles[2])  # still mapped: it stays
    assert target.call("cuMemRelease", handles[2])[0] == 1
    assert target.check()["physical"] == (PAGE, 1)
    target.ok("cuMemUnmap", base + 2 * PAGE, PAGE)
    assert target.check() == {"reserved": (8 * PAGE, 1)}
    target.ok("cuMemAddressFree", base, 8 * PAGE)
    assert target.check() == {}


def test_memory_released_before_it_is_unmapped(target: Traced) -> None:
    base = target.ok("cuMemAddressReserve", OUT, 64 * PAGE, 0, 0, 0)
    for i in range(40):  # more than BPF goes through
        handle = target.ok("cuMemCreate", OUT, PAGE, ON_0, 0)
        target.ok("cuMemMap", base + i * PAGE, PAGE, 0, handle, 0)
        target.ok("cuMemRelease", handle)
    assert target.check()["physical"] == (40 * PAGE, 40)
    assert target.call("cuMemUnmap", base, 41 * PAGE)[0] == 1
    assert target.check()["mapped"] == (40 * PAGE, 40)
    target.ok("cuMemUnmap", base, 40 * PAGE)
    assert target.check() == {"reserved": (64 * PAGE, 1)}


def test_memory_mapped_twice_and_a_retained_handle(target: Traced) -> None:
    base = target.ok("cuMemAddressReserve", OUT, 4 * PAGE, 0, 0, 0)
    handle = target.ok("cuMemCreate", OUT, PAGE, ON_0, 0)
    for i in range(2):
        target.ok("cuMemMap", base + i * PAGE, PAGE, 0, handle, 0)
    assert target.ok("cuMemRetainAllocationHandle", OUT, base + 100) == handle
    assert target.call("cuMemUnmap", base, 3 * PAGE)[0] == 1
    target.check()
    target.ok("cuMemRelease", handle)
    target.ok("cuMemUnmap", base, 2 * PAGE)
    assert target.check()["physical"] == (PAGE, 1)
    target.ok("cuMemRelease", handle)
    assert set(target.check()) == {"reserved"}


def test_a_free_that_fails_keeps_the_block(make: MakeTraced) -> None:
    fail = {"call": 1, "times": 1, "result": 700}
    names = ("cuMemFree_v2", "cuMemFreeAsync", "cuMemUnmap", "cuMemRelease", "cuMemAddressFree")
    target = make(failures=dict.fromkeys(names, fail))
    base = target.ok("cuMemAddressReserve", OUT, PAGE, 0, 0, 0)
    handle = target.ok("cuMemCreate", OUT, PAGE, ON_0, 0)
    target.ok("cuMemMap", base, PAGE, 0, handle, 0)
    steps: list[tuple[object, ...]] = [
        ("cuMemFree_v2", target.ok("cuMemAlloc_v2", OUT, 100)),
        ("cuMemFreeAsync", target.ok("cuMemAllocAsync", OUT, 100, 0), 0),
        ("cuMemRelease", handle), ("cuMemUnmap", base, PAGE), ("cuMemAddressFree", base, PAGE),
    ]  # fmt: skip
    for name, *args in steps:
        before = target.check()
        assert target.call(str(name), *args)[0] == 700
        assert target.check() == before
        target.ok(str(name), *args)
        target.check()
    assert target.check() == {}


def test_an_address_that_is_given_again(target: Traced) -> None:
    first = target.ok("cuMemAlloc_v2", OUT, 5000)
    target.ok("cuMemFree_v2", first)
    assert target.ok("cuMemAlloc_v2", OUT, 6000) == first
    assert target.check() == {"device": (6000, 1)}


def test_freed_by_another_thread(target: Traced) -> None:
    ctx = target.ok("cuCtxGetCurrent", OUT)
    for t in ("one", "two"):
        target.ok("cuCtxSetCurrent", ctx, thread=t)
    block = target.ok("cuMemAlloc_v2", OUT, 3000, thread="one")
    target.end_thread("one")
    assert target.check() == {"device": (3000, 1)}  # it belongs to the process
    target.ok("cuMemFree_v2", block, thread="two")
    assert target.check() == {}
    rows = target.host.rows("gpu.alloc")
    mine = rows[rows["process"] == target.host.process(target.pid)]
    assert len(set(mine["thread"].tolist())) == 2


def test_a_forked_child_has_nothing(make: MakeTraced, host: Host, tmp_path: Path) -> None:
    target = make()
    block = target.ok("cuMemAlloc_v2", OUT, 7000)
    target.check()
    pid, results = target.fork(["cuMemFree_v2", block], ["cuMemAlloc_v2", OUT, 10], start=False)
    assert all(results)
    assert target.check() == {"device": (7000, 1)}
    host.poll()
    assert host.total(pid, "failed") == 2
    assert host.live(pid) == {}


@pytest.mark.parametrize("how", ["exit", "kill"])
def test_the_last_row_of_a_process(host: Host, tmp_path: Path, how: str) -> None:
    target = Traced(host, tmp_path)
    base = target.ok("cuMemAddressReserve", OUT, PAGE, 0, 0, 0)
    handle = target.ok("cuMemCreate", OUT, PAGE, ON_0, 0)
    target.ok("cuMemMap", base, PAGE, 0, handle, 0)
    for size in (100, 200):
        target.ok("cuMemAlloc_v2", OUT, size)
        target.ok("cuMemHostAlloc", OUT, size, 0)
    before = target.check()
    assert len(before) == 5
    target.kill() if how == "kill" else target.close()
    host.poll()
    last = host.last(target.pid)
    assert host.live(target.pid) == host.stacks(target.pid) == {}
    assert {k: int(r["frees"]) for k, r in last.items()} == {k: n for k, (_, n) in before.items()}
    assert {k: int(r["freed"]) for k, r in last.items()} == {k: n for k, (n, _) in before.items()}
    for name, of in (("reclaimed", "frees"), ("reclaimed_bytes", "freed")):
        assert {k: r[name] for k, r in last.items()} == {k: r[of] for k, r in last.items()}
    host.poll()
    assert {k: int(r["t"]) for k, r in host.last(target.pid).items()} == {
        k: int(r["t"]) for k, r in last.items()
    }
    number = host.process(target.pid)
    until(lambda: _polled(host) and number not in host.processes_in_tables(), "tables are emptied")


def test_a_process_that_becomes_another_program(host: Host, tmp_path: Path) -> None:
    text = """
        import os, sys
        from tests.simgpu.driver import Driver
        sys.stdin.readline()
        driver = Driver()
        driver.start()
        for kind in ("cuMemAlloc_v2", "cuMemAlloc_v2"):
            driver.get(kind, 4000)
        print("allocated", flush=True)
        sys.stdin.readline()
        os.execlp("sh", "sh", "-c", "echo here; exec cat")
    """
    child = subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(text)], env=environment(tmp_path), text=True,
        stdin=subprocess.PIPE, stdout=subprocess.PIPE,
    )  # fmt: skip
    assert child.stdin
    assert child.stdout
    host.want(child.pid)
    child.stdin.write("\n")
    child.stdin.flush()
    assert child.stdout.readline() == "allocated\n"
    host.poll()
    assert host.live(child.pid) == {"device": (8000, 2)}
    child.stdin.write("\n")
    child.stdin.flush()
    assert child.stdout.readline() == "here\n"
    host.poll()
    assert child.poll() is None
    assert host.live(child.pid) == {}
    assert host.total(child.pid, "freed") == 8000
    child.communicate(timeout=20)


def _polled(host: Host) -> bool:
    host.poll()
    return True


def test_memory_of_another_process(make: MakeTraced) -> None:
    giver, taker = make(), make()
    handle = giver.ipc(giver.ok("cuMemAlloc_v2", OUT, 1 << 16))
    address = taker.ok("cuIpcOpenMemHandle_v2", OUT, handle, 1)
    assert taker.check() == {"ipc": (0, 1)}
    assert taker.call("cuMemFree_v2", address)[0] == 1
    assert taker.check() == {"ipc": (0, 1)}
    taker.ok("cuIpcCloseMemHandle", address)
    assert taker.check() == {}
    assert giver.check() == {"device": (1 << 16, 1)}


def test_memory_from_before_the_attach_is_unknown(tmp_path: Path) -> None:
    early = Target(tmp_path)
    early.start()
    old = [early.ok("cuMemAlloc_v2", OUT, 100) for _ in range(2)]
    with tracing() as host:
        host.want(early.pid)
        new = early.ok("cuMemAlloc_v2", OUT, 500)
        early.ok("cuMemFree_v2", old[0])
        host.poll()
        assert host.live(early.pid) == {"device": (500, 1)}
        assert host.total(early.pid, "unknown") == 1
        early.ok("cuMemFree_v2", new)
        early.close()
        host.poll()
        assert host.total(early.pid, "frees") == 1


def test_every_change_has_a_row_and_every_second(target: Traced) -> None:
    host = target.host
    target.ok("cuMemAlloc_v2", OUT, 100)
    for _ in range(3):
        host.poll()
    rows = host.rows("gpu.memory")
    assert len(rows[rows["process"] == host.process(target.pid)]) == 1
    host.poll(after=1)
    rows = host.rows("gpu.memory")
    mine = rows[rows["process"] == host.process(target.pid)]
    assert len(mine) == 2
    assert mine["dt"][1] == mine["t"][1] - mine["t"][0]
    assert mine["allocs"].tolist() == [1, 0]


def test_ages(tmp_path: Path) -> None:
    with tracing() as host:
        target = Traced(host, tmp_path)
        target.ok("cuMemAlloc_v2", OUT, 100)
        target.ok("cuMemHostAlloc", OUT, 30, 0)
        target.check()
        host.poll(after=11)  # 10 s later they are said
        target.ok("cuMemAlloc_v2", OUT, 7)
        host.poll(after=70)
        rows = host.rows("gpu.age")
        number = host.process(target.pid)
        told = [(int(r["age"]), MEMORY_KINDS[r["kind"]], int(r["live"]), int(r["blocks"]))
                for r in rows[rows["process"] == number]]  # fmt: skip
        assert told == [(3, "device", 100, 1), (3, "host", 30, 1),
                        (6, "device", 107, 2), (6, "host", 30, 1)]  # fmt: skip
        target.close()


def test_numbers_of_this_process_are_not_touched(host: Host) -> None:
    assert os.getpid() not in host.rows("meta.process")["pid"].tolist()
