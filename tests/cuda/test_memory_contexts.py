"""Memory goes with its context: destroyed, reset, or released by its last user."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from dsprobe.recordings.cudastreams import MEMORY_KINDS
from tests.cuda.memoryhost import Host, Traced, tracing
from tests.simgpu.target import OUT, Target
from tests.support.wait import until

pytestmark = [pytest.mark.bpf, pytest.mark.tools("gcc")]

PAGE = 2 << 20
ON_0 = {"prop": 0}


@pytest.fixture(scope="module")
def host() -> Iterator[Host]:
    with tracing() as it:
        yield it


@pytest.fixture
def target(host: Host, tmp_path: Path) -> Iterator[Traced]:
    with Traced(host, tmp_path, gpu={"devices": 2}) as it:
        yield it


def emptied(host: Host) -> None:
    """Wait until blocks of ended contexts are out of the tables."""

    def swept() -> bool:
        host.poll()
        return not host.probe._ended

    until(swept, "blocks of ended contexts are taken out")


def test_a_context_takes_all_its_memory_along(target: Traced) -> None:
    target.ok("cuMemAlloc_v2", OUT, 100)
    ctx = target.ok("cuCtxCreate_v2", OUT, 0, 0)
    target.ok("cuMemAlloc_v2", OUT, 1000)
    target.ok("cuMemAllocAsync", OUT, 2000, 0)
    target.ok("cuMemHostAlloc", OUT, 10, 0)
    target.ok("cuMemHostRegister_v2", 0x10000, 4096, 0)
    target.ok("cuMemCreate", OUT, PAGE, ON_0, 0)  # of the process
    assert len(target.check()) == 5
    stacks = sum(n for n, _ in target.host.stacks(target.pid).values())
    target.ok("cuCtxDestroy_v2", ctx)
    assert target.check() == {"device": (100, 1), "physical": (PAGE, 1)}
    rows = target.host.rows("gpu.alloc")
    gone = rows[(rows["op"] == 2) & (rows["process"] == target.host.process(target.pid))]
    assert {MEMORY_KINDS[r["kind"]]: int(r["bytes"]) for r in gone} == {
        "device": 1000, "async": 2000, "host": 10, "registered": 4096,
    }  # fmt: skip
    assert set(gone["address"].tolist()) == {ctx}
    emptied(target.host)
    target.check()
    target.host.poll(after=1)
    left = target.host.stacks(target.pid)
    assert sum(n for n, _ in left.values()) == 100 + PAGE < stacks
    target.ok("cuMemAlloc_v2", OUT, 5)
    assert target.check()["device"] == (105, 2)
    assert target.host.total(target.pid, "frees") == 4
    assert target.host.total(target.pid, "reclaimed") == 4


def test_addresses_of_an_ended_context_are_given_again(target: Traced) -> None:
    ctx = target.ok("cuCtxCreate_v2", OUT, 0, 0)
    old = {target.ok("cuMemAlloc_v2", OUT, 1000) for _ in range(20)}
    target.ok("cuCtxDestroy_v2", ctx)
    new = [target.ok("cuMemAlloc_v2", OUT, 600) for _ in range(20)]
    assert set(new) & old
    assert target.check() == {"device": (20 * 600, 20)}
    emptied(target.host)
    target.check()
    for address in new:
        target.ok("cuMemFree_v2", address)
    assert target.check() == {}
    assert not [x for x in target.host.losses if x.stream == "gpu.memory"]


def test_a_primary_context_is_reset(target: Traced) -> None:
    target.ok("cuMemAlloc_v2", OUT, 100)
    other = target.ok("cuDevicePrimaryCtxRetain", OUT, 1)
    target.ok("cuCtxPushCurrent_v2", other)
    target.ok("cuMemAlloc_v2", OUT, 2000)
    target.ok("cuCtxPopCurrent_v2", OUT)
    target.ok("cuMemAlloc_v2", OUT, 30)
    target.ok("cuDevicePrimaryCtxReset_v2", 1)
    assert target.check() == {"device": (130, 2)}
    target.ok("cuDevicePrimaryCtxReset_v2", 0)
    assert target.check() == {}
    assert target.call("cuMemAlloc_v2", OUT, 100)[0] == 201
    target.check()
    target.start()
    target.ok("cuMemAlloc_v2", OUT, 77)
    assert target.check() == {"device": (77, 1)}


def test_the_last_user_of_a_primary_context_ends_it(target: Traced) -> None:
    again = target.ok("cuDevicePrimaryCtxRetain", OUT, 0)
    target.ok("cuMemAlloc_v2", OUT, 100)
    target.ok("cuDevicePrimaryCtxRelease_v2", 0)
    assert target.check() == {"device": (100, 1)}
    target.ok("cuDevicePrimaryCtxRelease_v2", 0)
    assert target.check() == {}
    assert target.call("cuDevicePrimaryCtxRelease_v2", 0)[0] == 201
    assert target.ok("cuDevicePrimaryCtxRetain", OUT, 0)
    assert target.check() == {}
    assert again


def test_each_thread_has_its_own_current_context(target: Traced) -> None:
    one = target.ok("cuCtxCreate_v2", OUT, 0, 0, thread="one")
    two = target.ok("cuCtxCreate_v2", OUT, 0, 0, thread="two")
    target.ok("cuMemAlloc_v2", OUT, 100, thread="one")
    target.ok("cuMemAlloc_v2", OUT, 20, thread="two")
    target.ok("cuCtxSetCurrent", two, thread="one")
    target.ok("cuMemAlloc_v2", OUT, 3, thread="one")
    target.ok("cuCtxDestroy_v2", two, thread="two")
    assert target.check() == {"device": (100, 1)}
    assert target.call("cuCtxDestroy_v2", two)[0] == 201
    target.ok("cuCtxDestroy_v2", one)
    assert target.check() == {}


def test_contexts_from_before_the_attach(tmp_path: Path) -> None:
    """With one context it is clear whose memory it is; who else uses it is not known."""
    with Target(tmp_path) as early:
        early.start()
        with tracing() as host:
            host.want(early.pid)
            early.ok("cuMemAlloc_v2", OUT, 100)
            early.ok("cuDevicePrimaryCtxRetain", OUT, 0)
            early.ok("cuDevicePrimaryCtxRelease_v2", 0)  # there is another user, unseen
            host.poll()
            assert host.live(early.pid) == {"device": (100, 1)}
            assert sum(x.lost for x in host.losses if "context" in x.reason) == 1
            early.ok("cuDevicePrimaryCtxReset_v2", 0)
            host.poll()
            assert host.live(early.pid) == {}
