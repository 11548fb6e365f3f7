"""Time: streams are queues, engines take turns, and calls that block do."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from tests.simgpu import truth
from tests.simgpu.conftest import MakeTarget, Script
from tests.simgpu.target import OUT, Target

MS = 1_000_000
KERNELS = {"short": {"us": 2000}, "long": {"us": 150_000}, "grid": {"us": 100, "us_per_block": 1}}


GPU = {"kernels_at_once": 4, "copy_us": 10, "h2d_gb_per_s": 1, "d2h_gb_per_s": 1, "d2d_gb_per_s": 1}


class Device:
    """A target with kernels of known durations, and a stream or two."""

    def __init__(self, target: Target) -> None:
        target.start()
        self.t = target
        module = target.ok("cuModuleLoadData", OUT, "image")
        self.kernels = {k: target.ok("cuModuleGetFunction", OUT, module, k) for k in KERNELS}
        self.a, self.b = (target.ok("cuStreamCreate", OUT, 1) for _ in range(2))

    def launch(self, kernel: str, stream: int, grid: int = 1, name: str = "cuLaunchKernel") -> None:
        self.t.ok(name, self.kernels[kernel], grid, 1, 1, 32, 1, 1, 0, stream, 0, 0)

    def last(self, *names: str, n: int = 1) -> Any:
        """The last events of symbols, together with what they put on the device."""
        found = self.t.truth.of(*names)[-n:]
        assert len(found) == n
        return found[0] if n == 1 else found


@pytest.fixture
def device(make_target: MakeTarget) -> Device:
    return Device(make_target(kernels=KERNELS, gpu=GPU))


def test_a_stream_runs_its_work_in_order_and_for_its_time(device: Device) -> None:
    for kernel in ("long", "short", "long", "grid"):
        device.launch(kernel, device.a, grid=500)
    ran = device.last("cuLaunchKernel", n=4)
    assert (ran["gpu_end"] - ran["gpu_start"]).tolist() == [150 * MS, 2 * MS, 150 * MS, 600_000]
    assert (ran["gpu_start"][1:] == ran["gpu_end"][:-1]).all()
    assert (ran["ended"] < ran["gpu_end"][0]).all()  # launching does not wait


@pytest.mark.parametrize("at_once", [1, 2])
def test_engines_bound_what_runs_at_once(make_target: MakeTarget, at_once: int) -> None:
    device = Device(make_target(kernels=KERNELS, gpu={"kernels_at_once": at_once}))
    for stream in (device.a, device.b):
        device.launch("long", stream)
    first, second = device.last("cuLaunchKernel", n=2)
    assert (second["gpu_start"] >= first["gpu_end"]) == (at_once == 1)


@pytest.mark.parametrize("name", ["cuStreamSynchronize", "cuStreamSynchronize_ptsz"])
def test_waiting_for_a_stream_takes_until_its_work_is_done(device: Device, name: str) -> None:
    device.launch("long", device.a)
    assert device.t.call("cuStreamQuery", device.a)[0] == 600
    device.t.ok(name, device.b)  # nothing there
    device.t.ok(name, device.a)
    launch, idle, wait = device.last("cuLaunchKernel", name, n=3)
    assert idle["ended"] < launch["gpu_end"] <= wait["ended"]
    assert wait["gpu_end"] == launch["gpu_end"]
    assert device.t.call("cuStreamQuery", device.a)[0] == 0


def test_others_go_on_while_one_waits(script: Script, tmp_path: Any) -> None:
    script(
        """
        import threading
        from tests.simgpu.driver import Driver
        driver = Driver()
        ctx = driver.start()
        stream = driver.get("cuStreamCreate", 1)
        driver.launch(driver.kernel("long"), stream)
        waiting = threading.Event()
        driver.on_call(lambda name, *_: name == "cuStreamSynchronize" and waiting.set())
        def other():
            driver.ok("cuCtxSetCurrent", ctx)
            waiting.wait()
            for _ in range(50):
                driver.get("cuMemAlloc_v2", 64)
        thread = threading.Thread(target=other)
        thread.start()
        driver.ok("cuStreamSynchronize", stream)
        thread.join()
        """,
        kernels={"long": {"us": 300_000}},
    )
    (process,) = truth.read_all(tmp_path)
    wait, work = process.of("cuStreamSynchronize")[0], process.of("cuMemAlloc_v2")
    assert len(work) == 50
    assert (work["begun"] > wait["begun"]).all()
    assert (work["ended"] < wait["ended"]).all()
    assert set(work["tid"]) & {wait["tid"]} == set()


def test_contexts_and_frees_wait_for_the_device(device: Device) -> None:
    block = device.t.ok("cuMemAlloc_v2", OUT, 4096)
    for call in (("cuCtxSynchronize",), ("cuMemFree_v2", block)):
        device.launch("long", device.a)
        device.launch("short", device.b)
        device.t.ok(*call)
        launched = device.last("cuLaunchKernel", n=2)
        assert device.last(call[0])["ended"] >= launched["gpu_end"].max()


def test_events_mark_points_of_a_stream(device: Device) -> None:
    t = device.t
    before, after = (t.ok("cuEventCreate", OUT, 0) for _ in range(2))
    t.ok("cuEventRecord", before, device.a)
    device.launch("long", device.a)
    t.ok("cuEventRecord", after, device.a)
    assert t.call("cuEventQuery", after)[0] == 600
    assert t.call("cuEventElapsedTime", OUT, before, after)[0] == 600
    t.ok("cuStreamWaitEvent", device.b, after, 0)
    device.launch("short", device.b)
    t.ok("cuEventSynchronize", after)
    first, second, wait = device.last("cuLaunchKernel", "cuEventSynchronize", n=3)
    assert wait["ended"] >= first["gpu_end"]
    assert second["gpu_start"] >= first["gpu_end"]  # it waited on the device
    bits = t.ok("cuEventElapsedTime", OUT, before, after) & 0xFFFFFFFF
    assert 150 <= np.uint32(bits).view(np.float32) < 1000
    t.ok("cuEventDestroy_v2", after)
    assert t.call("cuEventSynchronize", after)[0] == 400


def test_the_default_stream_and_the_others_wait_for_each_other(device: Device) -> None:
    ordered = device.t.ok("cuStreamCreate", OUT, 0)
    device.launch("long", ordered)
    device.launch("short", device.a)  # made to stay apart
    device.launch("short", 0)
    device.launch("short", 0, name="cuLaunchKernel_ptsz")  # this thread's own, which is ordered
    device.launch("short", 2)
    every = device.last("cuLaunchKernel", "cuLaunchKernel_ptsz", n=5)
    first, apart, default, own, again = every
    assert apart["gpu_start"] < first["gpu_end"] <= default["gpu_start"]
    assert default["gpu_end"] <= own["gpu_start"]
    assert own["gpu_end"] <= again["gpu_start"]


def test_a_full_queue_blocks_the_launching_thread(script: Script, tmp_path: Any) -> None:
    script(
        """
        from tests.simgpu.driver import Driver
        driver = Driver()
        driver.start()
        stream, kernel = driver.get("cuStreamCreate", 1), driver.kernel("k")
        for _ in range(1100):
            driver.launch(kernel, stream)
        """,
        kernels={"k": {"us": 200}},
    )
    (process,) = truth.read_all(tmp_path)
    launches = process.of("cuLaunchKernel")
    assert len(launches) == 1100
    assert (launches["ended"][1024:] >= launches["gpu_end"][:-1024]).all()
    assert launches["ended"][1023] < launches["gpu_end"][1023]


SIZE = 50 * 10**6  # 50 ms at 1 GB/s


@pytest.mark.parametrize(
    ("name", "host", "blocks"),
    [
        ("cuMemcpyHtoD_v2", "pinned", True),
        ("cuMemcpyDtoH_v2", "pinned", True),
        ("cuMemcpyHtoDAsync_v2", "pinned", False),
        ("cuMemcpyHtoDAsync_v2_ptsz", "pinned", False),
        ("cuMemcpyHtoDAsync_v2", "pageable", True),
        ("cuMemcpyDtoHAsync_v2", "pinned", False),
        ("cuMemcpyDtoHAsync_v2", "pageable", True),
        ("cuMemcpy", "pinned", True),
        ("cuMemcpyAsync", "pinned", False),
        ("cuMemcpyDtoD_v2", "", False),
        ("cuMemcpyDtoDAsync_v2", "", False),
        ("cuMemsetD8_v2", "", False),
    ],
)
def test_copies_take_their_time_and_block_when_they_must(
    device: Device, name: str, host: str, blocks: bool
) -> None:
    t = device.t
    on_device = t.ok("cuMemAlloc_v2", OUT, SIZE)
    other: object = t.ok("cuMemAlloc_v2", OUT, SIZE)
    if host:
        other = t.ok("cuMemHostAlloc", OUT, SIZE, 0) if host == "pinned" else {"buffer": SIZE}
    pair = [other, on_device] if "DtoH" in name else [on_device, 1 if "set" in name else other]
    stream = [device.a] if "Async" in name else []
    t.ok(name, *pair, SIZE, *stream)
    copy = device.last(name)
    assert copy["gpu_end"] - copy["gpu_start"] == 10_000 + SIZE
    assert (copy["ended"] >= copy["gpu_end"]) == blocks


def test_copy_engines_run_beside_kernels_and_each_other(device: Device) -> None:
    t = device.t
    memory, host = t.ok("cuMemAlloc_v2", OUT, SIZE), t.ok("cuMemHostAlloc", OUT, SIZE, 0)
    streams = [t.ok("cuStreamCreate", OUT, 1) for _ in range(4)]
    device.launch("long", device.b)
    t.ok("cuMemcpyHtoDAsync_v2", memory, host, SIZE, streams[0])
    t.ok("cuMemcpyHtoDAsync_v2", memory, host, SIZE, streams[1])
    t.ok("cuMemcpyDtoHAsync_v2", host, memory, SIZE, streams[2])
    names = ("cuLaunchKernel", "cuMemcpyHtoDAsync_v2", "cuMemcpyDtoHAsync_v2")
    kernel, first, second, out = device.last(*names, n=4)
    assert kernel["gpu_start"] < first["gpu_start"] < kernel["gpu_end"]
    assert second["gpu_start"] >= first["gpu_end"]  # one engine for each direction
    assert out["gpu_start"] < first["gpu_end"]


def test_graphs_are_captured_instantiated_and_run(device: Device) -> None:
    t = device.t
    t.ok("cuStreamBeginCapture_v2", device.a, 0)
    for kernel in ("short", "long"):
        device.launch(kernel, device.a)
    assert t.ok("cuStreamIsCapturing", device.a, OUT) == 1
    assert t.call("cuStreamSynchronize", device.a)[0] == 900
    assert not device.last("cuLaunchKernel", n=2)["gpu_end"].any()  # nothing has run
    graph = t.ok("cuStreamEndCapture", device.a, OUT)
    exec_ = t.ok("cuGraphInstantiateWithFlags", OUT, graph, 0)
    t.ok("cuGraphDestroy", graph)
    for _ in range(2):
        t.ok("cuGraphLaunch", exec_, device.a)
    t.ok("cuStreamSynchronize", device.a)
    one, two = device.last("cuGraphLaunch", n=2)
    assert one["gpu_end"] - one["gpu_start"] == 152 * MS
    assert two["gpu_start"] == one["gpu_end"]
    assert device.last("cuStreamSynchronize")["ended"] >= two["gpu_end"]
    t.ok("cuGraphExecDestroy", exec_)
    assert t.call("cuGraphLaunch", exec_, device.a)[0] == 1


def test_instantiating_and_loading_take_the_time_of_the_scenario(make_target: MakeTarget) -> None:
    gpu = {"graph_node_us": 5000, "module_load_us": 20_000}
    device = Device(make_target(kernels=KERNELS, gpu=gpu))
    t = device.t
    t.ok("cuStreamBeginCapture_v2", device.a, 0)
    for _ in range(3):
        device.launch("short", device.a)
    graph = t.ok("cuStreamEndCapture", device.a, OUT)
    t.ok("cuGraphInstantiate_v2", OUT, graph, 0, 0, 0)
    load, instantiate = device.last("cuModuleLoadData", "cuGraphInstantiate_v2", n=2)
    assert load["ended"] - load["begun"] >= 20 * MS
    assert instantiate["ended"] - instantiate["begun"] >= 15 * MS
