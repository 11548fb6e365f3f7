"""Memory: what is live after each step, what may be freed, and a size that runs out."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.simgpu.conftest import MakeTarget, Script
from tests.simgpu.target import OUT, Target

MIB, GIB = 1 << 20, 1 << 30
ON_0 = {"prop": 0}


def live(target: Target) -> dict[str, int]:
    return {k: v.bytes for k, v in target.truth.live.items() if v.bytes}


def free_bytes(target: Target) -> int:
    result, (free, total) = target.call("cuMemGetInfo_v2", OUT, OUT)
    assert (result, total) == (0, target_size(target))
    return free


def target_size(target: Target) -> int:
    return target.ok("cuDeviceTotalMem_v2", OUT, 0)


@pytest.mark.parametrize(
    ("kind", "alloc", "free", "bytes_"),
    [
        ("device", ("cuMemAlloc_v2", OUT, 1000), ("cuMemFree_v2",), 1000),
        ("pitch", ("cuMemAllocPitch_v2", OUT, OUT, 100, 10, 4), ("cuMemFree_v2",), 5120),
        ("managed", ("cuMemAllocManaged", OUT, 1000, 1), ("cuMemFree_v2",), 1000),
        ("async", ("cuMemAllocAsync", OUT, 1000, 0), ("cuMemFreeAsync", 0), 1000),
        ("async", ("cuMemAllocAsync_ptsz", OUT, 1000, 0), ("cuMemFreeAsync_ptsz", 0), 1000),
        ("async", ("cuMemAllocAsync", OUT, 1000, 0), ("cuMemFree_v2",), 1000),
        ("host", ("cuMemHostAlloc", OUT, 1000, 0), ("cuMemFreeHost",), 1000),
        ("host", ("cuMemAllocHost_v2", OUT, 1000), ("cuMemFreeHost",), 1000),
    ],
)
def test_live_bytes_after_each_step(
    target: Target, kind: str, alloc: tuple[object, ...], free: tuple[object, ...], bytes_: int
) -> None:
    before = free_bytes(target)
    name, *args = alloc
    address = target.ok(str(name), *args)
    assert live(target) == {kind: bytes_}
    assert before - free_bytes(target) == (0 if kind == "host" else bytes_)
    name, *rest = free
    assert target.call(str(name), address + 1, *rest)[0] != 0  # not where it begins
    assert live(target) == {kind: bytes_}
    target.ok(str(name), address, *rest)
    assert target.call(str(name), address, *rest)[0] != 0  # twice
    assert target.call(str(name), 0, *rest)[0] == 0  # NULL is nothing
    assert live(target) == {}
    assert free_bytes(target) == before
    assert target.truth.counts[str(name)].failed == 2


def test_pool_memory(target: Target) -> None:
    pool = target.ok("cuMemPoolCreate", OUT, ON_0)
    default = target.ok("cuDeviceGetDefaultMemPool", OUT, 0)
    blocks = [target.ok("cuMemAllocFromPoolAsync", OUT, 4096, p, 0) for p in (pool, default)]
    assert live(target) == {"pool": 8192}
    for b in blocks:
        target.ok("cuMemFreeAsync", b, 0)
    target.ok("cuMemPoolTrimTo", pool, 0)
    target.ok("cuMemPoolDestroy", pool)
    assert target.call("cuMemPoolDestroy", default)[0] == 1
    assert live(target) == {}


def test_a_freed_address_is_given_again(target: Target) -> None:
    first = target.ok("cuMemAlloc_v2", OUT, 5000)
    other = target.ok("cuMemAlloc_v2", OUT, 5000)
    target.ok("cuMemFree_v2", first)
    assert target.ok("cuMemAlloc_v2", OUT, 6000) == first
    assert live(target) == {"device": 11000}
    assert other != first


def test_nothing_and_too_much_are_refused(target: Target) -> None:
    assert target.call("cuMemAlloc_v2", OUT, 0)[0] == 1
    assert target.call("cuMemAlloc_v2", OUT, 1 << 63)[0] == 2
    assert target.call("cuMemAllocPitch_v2", OUT, OUT, 1 << 62, 1 << 62, 4)[0] == 1
    assert target.call("cuMemAllocManaged", OUT, 4096, 0)[0] == 1
    assert live(target) == {}


def test_memory_runs_out_and_comes_back(make_target: MakeTarget) -> None:
    target = make_target(gpu={"memory": "1GiB", "devices": 2})
    target.start()
    blocks = [target.ok("cuMemAlloc_v2", OUT, 256 * MIB) for _ in range(4)]
    for call in (("cuMemAlloc_v2", OUT, 1), ("cuMemAllocAsync", OUT, 1, 0),
                 ("cuMemCreate", OUT, 2 * MIB, ON_0, 0)):  # fmt: skip
        assert target.call(*call)[0] == 2
    assert free_bytes(target) == 0
    assert target.ok("cuMemCreate", OUT, 2 * MIB, {"prop": 1}, 0)  # the other device has its own
    target.ok("cuMemFree_v2", blocks.pop())
    assert free_bytes(target) == 256 * MIB
    target.ok("cuMemAlloc_v2", OUT, 256 * MIB)
    assert target.truth.bytes("device") == GIB
    assert target.truth.live["device"].peak == GIB


def test_processes_share_the_device_and_a_killed_one_gives_back(make_target: MakeTarget) -> None:
    one, two = (make_target(gpu={"memory": "1GiB"}) for _ in range(2))
    for t in (one, two):
        t.start()
        t.ok("cuMemAlloc_v2", OUT, 512 * MIB)
    assert one.call("cuMemAlloc_v2", OUT, 1)[0] == two.call("cuMemAlloc_v2", OUT, 1)[0] == 2
    one.kill()
    assert free_bytes(two) == 512 * MIB
    two.ok("cuMemAlloc_v2", OUT, 512 * MIB)
    assert one.truth.bytes() == 512 * MIB  # as it was when it was killed


def test_another_thread_frees_and_threads_end(target: Target) -> None:
    target.start(thread="a")
    target.start(thread="b")
    mine = target.ok("cuMemAlloc_v2", OUT, 1000, thread="a")
    target.ok("cuMemAlloc_v2", OUT, 500, thread="a")
    target.end_thread("a")
    assert live(target) == {"device": 1500}
    target.ok("cuMemFree_v2", mine, thread="b")
    assert live(target) == {"device": 500}
    tids = target.truth.of("cuMemAlloc_v2", "cuMemFree_v2")["tid"]
    assert len(set(tids)) == 2
    assert target.pid not in tids


def test_mapping_in_the_order_of_expandable_segments(target: Target) -> None:
    """As PyTorch's allocator does it: reserve much, create and map as needed, unmap, release."""
    segment, page = 16 * MIB, 2 * MIB
    base = target.ok("cuMemAddressReserve", OUT, segment, 0, 0, 0)
    handles = []
    for i in range(3):
        handles.append(target.ok("cuMemCreate", OUT, page, ON_0, 0))
        assert target.truth.bytes() == (i + 1) * page
        target.ok("cuMemMap", base + i * page, page, 0, handles[i], 0)
        target.ok("cuMemSetAccess", base + i * page, page, ON_0, 1)
    assert live(target) == {"physical": 3 * page, "mapped": 3 * page, "reserved": segment}
    assert target.call("cuMemMap", base, page, 0, handles[0], 0)[0] == 1  # there is something
    assert target.call("cuMemMap", base + segment, page, 0, handles[0], 0)[0] == 1  # not ours
    assert target.call("cuMemAddressFree", base, segment)[0] == 1  # mapped
    assert target.call("cuMemUnmap", base, page // 2)[0] == 1  # a part
    target.ok("cuMemUnmap", base, 2 * page)  # two at once
    assert live(target) == {"physical": 3 * page, "mapped": page, "reserved": segment}
    target.ok("cuMemRelease", handles[0])
    target.ok("cuMemRelease", handles[1])
    assert target.truth.bytes() == page
    target.ok("cuMemRelease", handles[2])  # still mapped: it stays
    assert target.call("cuMemRelease", handles[2])[0] == 1
    assert target.call("cuMemMap", base, page, 0, handles[2], 0)[0] == 1
    assert target.truth.bytes() == page
    target.ok("cuMemUnmap", base + 2 * page, page)
    assert target.truth.bytes() == 0
    target.ok("cuMemAddressFree", base, segment)
    assert live(target) == {}


def test_a_retained_handle_keeps_memory(target: Target) -> None:
    page = 2 * MIB
    base = target.ok("cuMemAddressReserve", OUT, page, 0, 0, 0)
    handle = target.ok("cuMemCreate", OUT, page, ON_0, 0)
    target.ok("cuMemMap", base, page, 0, handle, 0)
    assert target.ok("cuMemRetainAllocationHandle", OUT, base + 100) == handle
    target.ok("cuMemUnmap", base, page)
    target.ok("cuMemRelease", handle)
    assert target.truth.bytes() == page
    target.ok("cuMemRelease", handle)
    assert target.truth.bytes() == 0


def test_memory_goes_with_its_context(target: Target) -> None:
    target.ok("cuMemAlloc_v2", OUT, 100)
    ctx = target.ok("cuCtxCreate_v2", OUT, 0, 0)
    target.ok("cuMemAlloc_v2", OUT, 1000)
    target.ok("cuMemHostAlloc", OUT, 10, 0)
    target.ok("cuCtxDestroy_v2", ctx)
    assert live(target) == {"device": 100}
    target.ok("cuDevicePrimaryCtxReset_v2", 0)
    assert live(target) == {}
    assert target.call("cuMemAlloc_v2", OUT, 100)[0] == 201


def test_registered_memory(target: Target) -> None:
    target.ok("cuMemHostRegister_v2", 0x10000, 4096, 0)
    assert target.call("cuMemHostRegister_v2", 0x10000, 4096, 0)[0] == 712
    assert live(target) == {"registered": 4096}
    target.ok("cuMemHostUnregister", 0x10000)
    assert target.call("cuMemHostUnregister", 0x10000)[0] == 713


def test_memory_of_another_process(make_target: MakeTarget) -> None:
    giver, taker = make_target(), make_target()
    giver.start()
    taker.start()
    handle = giver.ipc(giver.ok("cuMemAlloc_v2", OUT, 1 << 16))
    assert giver.call("cuIpcOpenMemHandle_v2", OUT, handle, 1)[0] == 201
    address = taker.ok("cuIpcOpenMemHandle_v2", OUT, handle, 1)
    assert live(taker) == {"ipc": 1 << 16}
    assert taker.truth.bytes() == 0  # it is the giver's
    assert taker.call("cuMemFree_v2", address)[0] == 1
    taker.ok("cuIpcCloseMemHandle", address)
    assert live(taker) == {}


def test_host_and_managed_memory_can_be_touched(script: Script, tmp_path: Path) -> None:
    assert script(
        """
        import ctypes
        from tests.simgpu.driver import Driver
        driver = Driver()
        driver.start()
        for name, flags in (("cuMemHostAlloc", 0), ("cuMemAllocManaged", 1)):
            address = driver.get(name, 5000, flags)
            ctypes.memset(address, 7, 5000)
            assert ctypes.string_at(address, 5000) == bytes([7]) * 5000
            driver.ok("cuMemFreeHost" if flags == 0 else "cuMemFree_v2", address)
        print("true")
        """
    )
