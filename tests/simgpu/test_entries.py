"""Entry points: all there, begun as a real driver's, found by name, counted."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.simgpu import truth
from tests.simgpu.build import FLAVOURS, symbols
from tests.simgpu.conftest import Script

NAMES = [s.name for s in symbols()]

WANTED = """
cuInit cuDriverGetVersion cuDeviceGet cuDeviceGetCount cuCtxCreate_v2 cuDevicePrimaryCtxRetain
cuMemAlloc_v2 cuMemAllocPitch_v2 cuMemAllocManaged cuMemHostAlloc cuMemAllocHost_v2
cuMemAllocAsync(_ptsz) cuMemAllocFromPoolAsync(_ptsz) cuMemFree_v2 cuMemFreeAsync(_ptsz)
cuMemFreeHost cuMemCreate cuMemRelease cuMemMap cuMemUnmap cuMemAddressReserve cuMemAddressFree
cuMemSetAccess cuIpcGetMemHandle cuIpcOpenMemHandle_v2 cuIpcCloseMemHandle
cuLaunchKernel(_ptsz) cuLaunchKernelEx(_ptsz) cuLaunchCooperativeKernel(_ptsz) cuGraphLaunch(_ptsz)
cuGraphInstantiate_v2 cuGraphInstantiateWithFlags cuGraphInstantiateWithParams(_ptsz)
cuStreamSynchronize(_ptsz) cuEventSynchronize cuCtxSynchronize
cuMemcpyHtoD_v2(_ptds) cuMemcpyDtoH_v2(_ptds) cuMemcpyDtoD_v2(_ptds) cuMemcpyHtoDAsync_v2(_ptsz)
cuMemcpyDtoHAsync_v2(_ptsz) cuMemcpyDtoDAsync_v2(_ptsz) cuMemcpy(_ptds) cuMemcpyAsync(_ptsz)
cuMemsetD8_v2(_ptds) cuMemsetD32Async(_ptsz) cuModuleLoadData cuModuleGetFunction
cuLibraryGetKernel cuKernelGetFunction cuFuncGetName cuStreamCreate cuStreamDestroy_v2
cuStreamQuery(_ptsz) cuEventCreate cuEventDestroy_v2 cuEventRecord(_ptsz) cuEventQuery
cuGetProcAddress cuGetProcAddress_v2
"""

FIRST_BYTES = {
    # cmpl $0x321cba00, disp(%rip); je +12; jmp *disp(%rip): as libcuda.so.535 has it, byte for byte
    "driver": rb"\x81\x3d....\x00\xba\x1c\x32\x74\x0c\xff\x25",
    "frame": rb"\x55",
    "endbr": rb"\xf3\x0f\x1e\xfa\x55",
}

READ = """
import ctypes, json
lib = ctypes.CDLL("libcuda.so.1")
address = lambda n: ctypes.cast(getattr(lib, n), ctypes.c_void_p).value
print(json.dumps({n: ctypes.string_at(address(n), 14).hex() for n in %r}))
"""


def test_every_entry_point_that_is_traced_is_there() -> None:
    wanted = set()
    for name, variant in re.findall(r"(\w+)(?:\((\w+)\))?", WANTED):
        wanted |= {name, name + variant}
    assert len(wanted) > 70
    assert wanted - set(NAMES) == set()
    assert len(NAMES) == len(set(NAMES))


@pytest.mark.parametrize("flavour", FLAVOURS)
def test_entry_points_begin_as_their_flavour_says(script: Script, flavour: str) -> None:
    found = script(READ % NAMES, library={"flavour": flavour})
    assert len(found) == len(NAMES)
    shape = re.compile(FIRST_BYTES[flavour], re.DOTALL)
    assert [n for n, octets in found.items() if not shape.match(bytes.fromhex(octets))] == []


@pytest.mark.parametrize("flavour", FLAVOURS)
def test_each_call_is_counted_and_refused_before_cuinit(
    script: Script, tmp_path: Path, flavour: str
) -> None:
    late = [
        s.name for s in symbols() if s.section != "any-time" and "struct ipc" not in s.parameters
    ]
    results = script(
        f"""
        import json
        from tests.simgpu.driver import Driver
        driver = Driver()
        print(json.dumps([driver.call(n, *[0] * 11) for n in {late!r}]))
        """,
        library={"flavour": flavour},
    )
    assert set(results) == {3}  # CUDA_ERROR_NOT_INITIALIZED
    (process,) = truth.read_all(tmp_path)
    assert {n: (c.calls, c.failed) for n, c in process.counts.items()} == dict.fromkeys(
        late, (1, 1)
    )
    assert [process.symbols[e["symbol"]] for e in process.events] == late


def test_no_call_crashes_for_want_of_arguments(script: Script) -> None:
    every = [s.name for s in symbols() if "Destroy" not in s.name and "Reset" not in s.name]
    results = script(
        f"""
        import json
        from tests.simgpu.driver import Driver
        driver = Driver()
        driver.start()
        print(json.dumps({{n: driver.call(n, *[0] * 11) for n in {every!r}}}))
        """
    )
    assert len(results) == len(every)
    assert {n for n, r in results.items() if r == 0} < {
        "cuInit", "cuCtxSetCurrent", "cuMemFree_v2", "cuMemFreeAsync", "cuMemFreeAsync_ptsz",
        "cuMemFreeHost", "cuCtxSynchronize", "cuStreamSynchronize", "cuStreamSynchronize_ptsz",
        "cuStreamQuery", "cuStreamQuery_ptsz", "cuCtxPopCurrent_v2", "cuDevicePrimaryCtxRelease_v2",
    }  # fmt: skip


def test_look_up_by_name_gives_the_exported_addresses(script: Script) -> None:
    asked = [
        ("cuMemAlloc", 12000, 0, "cuMemAlloc_v2"),
        ("cuLaunchKernel", 12000, 0, "cuLaunchKernel"),
        ("cuLaunchKernel", 12000, 2, "cuLaunchKernel_ptsz"),
        ("cuMemcpyHtoD", 12000, 2, "cuMemcpyHtoD_v2_ptds"),
        ("cuMemcpyHtoD", 12000, 0, "cuMemcpyHtoD_v2"),
        ("cuMemFree", 12000, 2, "cuMemFree_v2"),
        ("cuGetProcAddress", 11080, 0, "cuGetProcAddress"),
        ("cuGetProcAddress", 12000, 0, "cuGetProcAddress_v2"),
        ("cuCtxCreate", 11000, 0, "cuCtxCreate_v2"),
        ("cuCtxCreate", 12000, 0, "cuCtxCreate_v3"),
        ("cuGraphInstantiate", 11000, 0, "cuGraphInstantiate_v2"),
        ("cuGraphInstantiate", 12000, 0, "cuGraphInstantiateWithFlags"),
    ]
    found = script(
        f"""
        import ctypes, json
        from tests.simgpu.driver import Driver, Out
        driver, out = Driver(), []
        for name, version, flags, symbol in {asked!r}:
            address = ctypes.cast(getattr(driver.lib, symbol), ctypes.c_void_p).value
            got = [Out(), Out(), Out()]
            r = driver.call("cuGetProcAddress", name.encode(), got[0], version, flags)
            q = driver.call("cuGetProcAddress_v2", name.encode(), got[1], version, flags, got[2])
            good = got[0].value == got[1].value == address and got[2].value == 0
            out.append([symbol, r, q, good])
        none, status = Out(), Out()
        r = driver.call("cuGetProcAddress_v2", b"cuNothing", none, 12000, 0, status)
        print(json.dumps([out, r, none.value, status.value]))
        """
    )
    assert found == [[[symbol, 0, 0, True] for *_, symbol in asked], 500, 0, 1]
