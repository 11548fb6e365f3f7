"""Arguments of functions that the simulated driver has not: those of before CUDA 3.2, batches,
launches on several devices."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from dsprobe.probes.calls import Calls
from dsprobe.probes.launches import Launches
from dsprobe.recordings.cudastreams import COPIES
from tests.cuda.tracing import tracing
from tests.simgpu.build import gcc

pytestmark = [pytest.mark.bpf, pytest.mark.tools("gcc")]

FUNCTIONS = (
    "cuInit", "cuMemcpyHtoD", "cuMemcpyDtoHAsync", "cuMemcpyAtoH", "cuMemsetD32", "cuMemsetD2D16",
    "cuMemcpy2D", "cuMemcpy3DAsync", "cuMemcpyBatchAsync_ptsz", "cuMemcpyBatchAsync_v2",
    "cuMemcpy3DBatchAsync_v2", "cuMemcpy3DPeer", "cuLaunch", "cuLaunchGrid", "cuLaunchGridAsync",
    "cuLaunchCooperativeKernelMultiDevice",
)  # fmt: skip

# Structures as cuda.h has them: those of before 3.2 under __CUDA_API_VERSION_INTERNAL.
PROGRAM = """
#include <stdint.h>
typedef uint32_t u32;
typedef uint64_t u64;
#define DIRTY 0xdeadbeef00000000u /* what the upper half of a register may hold */
struct copy2 {
    u32 sx, sy, stype; void *shost; u32 sdevice; void *sarray; u32 spitch;
    u32 dx, dy, dtype; void *dhost; u32 ddevice; void *darray; u32 dpitch;
    u32 width, height;
};
struct copy3 {
    u32 sx, sy, sz, slod, stype; void *shost; u32 sdevice; void *sarray, *sreserved;
    u32 spitch, sheight;
    u32 dx, dy, dz, dlod, dtype; void *dhost; u32 ddevice; void *darray, *dreserved;
    u32 dpitch, dheight;
    u32 width, height, depth;
};
struct peer_side {
    u64 x, y, z, lod; u32 type; void *host; u64 device; void *array, *ctx; u64 pitch, height;
};
struct peer3 { struct peer_side from, to; u64 width, height, depth; };
struct operand { u32 type; u64 words[4]; };
struct op { struct operand from, to; u64 width, height, depth; u32 order, flags; };
struct launch { void *f; u32 dims[7]; void *stream; void **params; };
int main(void) {
    cuInit(0);
    cuMemcpyHtoD(DIRTY | 1, 2, DIRTY | 1001);
    cuMemcpyDtoHAsync(1, DIRTY | 2, DIRTY | 1002, 0x30);
    cuMemcpyAtoH(1, 2, DIRTY | 3, DIRTY | 1003);
    cuMemsetD32(DIRTY | 1, 2, DIRTY | 1004);
    cuMemsetD2D16(DIRTY | 1, DIRTY | 512, 2, DIRTY | 50, DIRTY | 6);
    struct copy2 two = {.stype = 1, .dtype = 2, .width = 300, .height = 7};
    cuMemcpy2D(&two);
    struct copy3 three = {.stype = 3, .dtype = 1, .width = 300, .height = 7, .depth = 5};
    cuMemcpy3DAsync(&three, 0x40);
    u64 sizes[300];
    for (int i = 0; i < 300; i++) sizes[i] = 1000 + i;
    cuMemcpyBatchAsync_ptsz(1, 2, sizes, 20, 3, 4, 5, 6, 0);
    cuMemcpyBatchAsync_v2(1, 2, sizes, 300, 3, 4, 5, 0x50);
    struct op ops[3] = {{.width = 10, .height = 1, .depth = 1},
                        {.width = 20, .height = 2, .depth = 1},
                        {.width = 30, .height = 2, .depth = 2}};
    cuMemcpy3DBatchAsync_v2(3, ops, 0, 0x60);
    struct peer3 peer = {.from = {.type = 2}, .to = {.type = 2},
                         .width = 9, .height = 8, .depth = 7};
    cuMemcpy3DPeer(&peer);
    cuLaunch(0x100);
    cuLaunchGrid(0x100, 3, 4);
    cuLaunchGridAsync(0x100, 5, 6, 0x70);
    struct launch many[2] = {{(void *)0x200, {1, 2, 3, 4, 5, 6, 7}, (void *)0x80, 0},
                             {(void *)0x200, {9, 9, 9, 9, 9, 9, 9}, (void *)0x90, 0}};
    cuLaunchCooperativeKernelMultiDevice(many, 2, 0);
    return 0;
}
"""


def test_what_old_and_rare_functions_are_told(tmp_path: Path) -> None:
    library, program = tmp_path / "libcuda.so.1", tmp_path / "calling"
    stubs, calling = tmp_path / "stubs.c", tmp_path / "calling.c"
    stubs.write_text("".join(f"int {f}(void) {{ return 0; }}\n" for f in FUNCTIONS))
    calling.write_text("".join(f"int {f}();\n" for f in FUNCTIONS) + PROGRAM)
    gcc("-shared", "-fPIC", "-o", str(library), str(stubs), "-Wl,-soname,libcuda.so.1")
    gcc("-Wno-strict-prototypes", "-o", str(program), str(calling), str(library),
        f"-Wl,-rpath,{tmp_path}")  # fmt: skip
    with tracing(Launches, Calls) as tr:
        tr.attach(library)
        child = subprocess.Popen([program])
        assert child.wait(20) == 0
        tr.settle()
        names = tr.names()
        calls = [
            (names[r["function"]], COPIES[r["copy"]], int(r["bytes"]), int(r["stream"]))
            for r in tr.rows("cuda.call")
        ]
        assert calls == [
            ("cuInit", "none", 0, 0),
            ("cuMemcpyHtoD", "HtoD", 1001, 0),
            ("cuMemcpyDtoHAsync", "DtoH", 1002, 0x30),
            ("cuMemcpyAtoH", "DtoH", 1003, 0),
            ("cuMemsetD32", "none", 4016, 0),
            ("cuMemsetD2D16", "none", 600, 0),
            ("cuMemcpy2D", "HtoD", 2100, 0),
            ("cuMemcpy3DAsync", "DtoH", 10500, 0x40),
            ("cuMemcpyBatchAsync_ptsz", "any", sum(range(1000, 1020)), 2),
            ("cuMemcpyBatchAsync_v2", "any", sum(range(1000, 1300)), 0x50),
            ("cuMemcpy3DBatchAsync_v2", "any", 10 + 40 + 120, 0x60),
            ("cuMemcpy3DPeer", "peer", 504, 0),
        ]
        launches = [
            (names[r["function"]], r["grid"].tolist(), r["block"].tolist(), int(r["shared"]),
             int(r["stream"]))
            for r in tr.rows("cuda.launch")
        ]  # fmt: skip
        none = [0, 0, 0]
        assert launches == [
            ("cuLaunch", [1, 1, 1], none, 0, 0),
            ("cuLaunchGrid", [3, 4, 1], none, 0, 0),
            ("cuLaunchGridAsync", [5, 6, 1], none, 0, 0x70),
            ("cuLaunchCooperativeKernelMultiDevice", [1, 2, 3], [4, 5, 6], 7, 0x80),
        ]
        handles = tr.rows("meta.kernel")["handle"].tolist()
        assert handles == [0x100, 0x200]
