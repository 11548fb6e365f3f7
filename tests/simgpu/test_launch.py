"""Launches: what is logged of them, names, what is refused, and failures on demand."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.simgpu import truth
from tests.simgpu.conftest import MakeTarget, Script
from tests.simgpu.target import OUT, Target


@pytest.fixture
def kernel(target: Target) -> int:
    module = target.ok("cuModuleLoadData", OUT, "image")
    return target.ok("cuModuleGetFunction", OUT, module, "k")


@pytest.mark.parametrize(
    "name",
    ["cuLaunchKernel", "cuLaunchKernel_ptsz", "cuLaunchCooperativeKernel",
     "cuLaunchCooperativeKernel_ptsz"],
)  # fmt: skip
def test_arguments_are_logged_as_they_were_given(target: Target, kernel: int, name: str) -> None:
    stream = target.ok("cuStreamCreate", OUT, 1)
    words = [kernel, 7, 6, 5, 32, 4, 2, 1234, stream]
    target.ok(name, *words, 0, 0)
    (event,) = target.truth.of(name)
    assert event["args"].tolist() == words
    assert event["tid"] == target.own_pid
    assert event["begun"] <= event["gpu_start"] < event["gpu_end"]


@pytest.mark.parametrize("name", ["cuLaunchKernelEx", "cuLaunchKernelEx_ptsz"])
def test_a_launch_by_configuration_runs(script: Script, tmp_path: Path, name: str) -> None:
    script(
        f"""
        import struct
        from tests.simgpu.driver import Driver
        driver = Driver()
        driver.start()
        stream, kernel = driver.get("cuStreamCreate", 1), driver.kernel("k")
        # CUlaunchConfig: seven dimensions, stream, attributes and their number
        config = struct.pack("7I4xQQI4x", 3, 1, 1, 32, 1, 1, 0, stream, 0, 0)
        driver.ok({name!r}, config, kernel, 0, 0)
        assert driver.call("cuStreamQuery", stream) == 600
        """,
        kernels={"k": {"us": 1000, "us_per_block": 100_000}},
    )
    (process,) = truth.read_all(tmp_path)
    (event,) = process.of(name)
    assert event["gpu_end"] - event["gpu_start"] == 301_000_000


@pytest.mark.parametrize(
    ("words", "result"),
    [
        ((1, 1, 1, 32, 1, 1, 0, 0), 0),
        ((0, 1, 1, 32, 1, 1, 0, 0), 1),
        ((1, 1, 1, 1024, 2, 1, 0, 0), 1),
        ((1, 1, 1, 32, 1, 1, 1 << 20, 0), 1),
        ((1, 1, 1, 32, 1, 1, 0, 12345), 400),
    ],
)
def test_what_a_launch_may_ask_for(
    target: Target, kernel: int, words: tuple[int, ...], result: int
) -> None:
    assert target.call("cuLaunchKernel", kernel, *words, 0, 0)[0] == result
    assert target.call("cuLaunchKernel", kernel + 8, *words, 0, 0)[0] == 400
    counts = target.truth.counts["cuLaunchKernel"]
    assert (counts.calls, counts.failed) == (2, 1 + (result != 0))


def test_functions_have_names(script: Script) -> None:
    names = script(
        """
        import ctypes, json
        from tests.simgpu.driver import Driver
        driver = Driver()
        driver.start()
        library = driver.get("cuLibraryLoadData", b"image", 0, 0, 0, 0, 0, 0)
        kernel = driver.get("cuLibraryGetKernel", library, b"from_library")
        function = driver.get("cuKernelGetFunction", kernel)
        assert function != kernel
        module = driver.get("cuModuleLoadData", b"image")
        other = driver.get("cuModuleGetFunction", module, b"from_module")
        assert driver.get("cuModuleGetFunction", module, b"from_module") == other
        assert driver.call("cuModuleGetFunction", 0, module, b"x") == 1
        for f in (function, other, kernel):
            driver.launch(f)
        names = [driver.get("cuFuncGetName", function), driver.get("cuFuncGetName", other),
                 driver.get("cuKernelGetName", kernel)]
        print(json.dumps([ctypes.string_at(n).decode() for n in names]))
        driver.ok("cuModuleUnload", module)
        assert driver.call("cuLaunchKernel", other, *[1] * 6, 0, 0, 0, 0) == 400
        """
    )
    assert names == ["from_library", "from_module", "from_library"]


def test_a_function_can_be_missing(target: Target) -> None:
    module = target.ok("cuModuleLoadData", OUT, "image")
    assert target.call("cuModuleGetFunction", OUT, module, "missing_kernel")[0] == 500
    assert target.call("cuModuleGetFunction", OUT, module + 1, "k")[0] == 400


def test_the_nth_call_fails_when_it_is_told_to(make_target: MakeTarget) -> None:
    target = make_target(
        failures={
            "cuMemAlloc_v2": {"call": 3, "result": 2},
            "cuMemFree_v2": {"call": 1, "times": 2, "result": 700},
            "cuStreamSynchronize": {"call": 1, "result": 999},
        }
    )
    target.start()
    got = [target.call("cuMemAlloc_v2", OUT, 100) for _ in range(4)]
    assert [result for result, _ in got] == [0, 0, 2, 0]
    address = got[0][1][0]
    assert [target.call("cuMemFree_v2", address)[0] for _ in range(4)] == [700, 700, 0, 1]
    assert target.call("cuStreamSynchronize", 0)[0] == 999
    assert target.truth.bytes("device") == 200  # what failed has done nothing
    assert target.truth.counts["cuMemAlloc_v2"].failed == 1
    assert target.truth.counts["cuMemFree_v2"].failed == 3


def test_there_is_no_work_without_a_context(make_target: MakeTarget) -> None:
    target = make_target()
    target.ok("cuInit", 0)
    assert target.call("cuMemAlloc_v2", OUT, 100)[0] == 201
    assert target.call("cuStreamSynchronize", 0)[0] == 201
    target.start()
    target.ok("cuMemAlloc_v2", OUT, 100)
    target.start(thread="a")
    target.ok("cuMemAlloc_v2", OUT, 100, thread="a")
    assert target.call("cuMemAlloc_v2", OUT, 100, thread="b")[0] == 201  # contexts are of threads
