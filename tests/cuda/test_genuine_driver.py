"""Our probes on NVIDIA's own driver library: without a device each call fails, with all its
arguments and its result as the caller has them."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from dsprobe.probes.calls import Calls
from dsprobe.probes.launches import Launches
from tests.cuda.tracing import tracing
from tests.support import genuine

pytestmark = pytest.mark.bpf

GRID, BLOCK, SHARED, STREAM = (11, 12, 13), (14, 15, 16), 1717, 0x7770
CALLER = f"""
import ctypes, json, os, sys
lib = ctypes.CDLL(sys.argv[1])
words = lambda *a: [ctypes.c_uint64(x) for x in a]
launch = lib.cuLaunchKernel(*words(0x5550, *{GRID}, *{BLOCK}, {SHARED}, {STREAM}, 0, 0))
sync = lib.cuStreamSynchronize(*words({STREAM}))
copy = lib.cuMemcpyHtoDAsync_v2(*words(0x1000, 0x2000, 4099, {STREAM}))
print(json.dumps([os.getpid(), launch, sync, copy]))
"""


def test_dimensions_stream_and_result() -> None:
    library = genuine.library()
    with tracing(Launches, Calls) as tr:
        tr.attach(library)
        done = subprocess.run(
            [sys.executable, "-c", CALLER, str(library)], capture_output=True, text=True,
            timeout=60, check=True,
        )  # fmt: skip
        pid, launched, synced, copied = json.loads(done.stdout)
        tr.settle()
        assert 0 not in (launched, synced, copied)  # CUresult: not initialised
        (launch,) = tr.rows("cuda.launch")
        assert tuple(launch["grid"]) == GRID
        assert tuple(launch["block"]) == BLOCK
        assert (launch["shared"], launch["stream"]) == (SHARED, STREAM)
        names = tr.names()
        calls = {names[row["function"]]: row for row in tr.rows("cuda.call")}
        sync, copy = calls["cuStreamSynchronize"], calls["cuMemcpyHtoDAsync_v2"]
        assert (sync["result"], sync["stream"]) == (synced, STREAM)
        assert (copy["result"], copy["stream"], copy["bytes"]) == (copied, STREAM, 4099)
        assert tr.calls(pid, "failed") == {"cuStreamSynchronize": 1, "cuMemcpyHtoDAsync_v2": 1}
        assert set(tr.calls(pid)) >= {"cuLaunchKernel", "cuStreamSynchronize"}
