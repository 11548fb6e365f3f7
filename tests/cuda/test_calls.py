"""Calls that can block, against what the simulated driver was really asked."""

from __future__ import annotations

import subprocess
import sys
import threading
from pathlib import Path

import numpy as np
import pytest

from dsprobe.probes.calls import EVERY_NS, Calls
from dsprobe.probes.functions import of_symbol
from dsprobe.probes.launches import Launches
from dsprobe.probes.opencalls import LONG_NS
from dsprobe.recordings.cudastreams import CALL_KINDS, COPIES
from tests.cuda.test_launches import work
from tests.cuda.tracing import last, tracing
from tests.simgpu import truth
from tests.simgpu.build import symbols
from tests.simgpu.run import environment
from tests.simgpu.scenario import Scenario, parse
from tests.simgpu.target import OUT, Target
from tests.support.wait import until

pytestmark = [pytest.mark.bpf, pytest.mark.tools("gcc")]

COPYING = """
import ctypes
from tests.simgpu.driver import Driver, Out
d = Driver()
ctx = d.start()
p, q = d.get("cuMemAlloc_v2", 1 << 20), d.get("cuMemAlloc_v2", 1 << 20)
host = ctypes.create_string_buffer(1 << 20)
s = d.get("cuStreamCreate", 0)
for end in ("", "_ptds"):
    d.ok("cuMemcpyHtoD_v2" + end, p, host, 1001)
    d.ok("cuMemcpyDtoH_v2" + end, host, p, 1002)
    d.ok("cuMemcpyDtoD_v2" + end, q, p, 1003)
    d.ok("cuMemcpy" + end, q, p, 1004)
    d.ok("cuMemcpyPeer" + end, q, ctx, p, ctx, 1005)
    d.ok("cuMemsetD8_v2" + end, p, 1, 1006)
    d.ok("cuMemsetD16_v2" + end, p, 1, 1007)
    d.ok("cuMemsetD32_v2" + end, p, 1, 1008)
for end in ("", "_ptsz"):
    for stream in (s, 0):
        d.ok("cuMemcpyHtoDAsync_v2" + end, p, host, 2001, stream)
        d.ok("cuMemcpyDtoHAsync_v2" + end, host, p, 2002, stream)
        d.ok("cuMemcpyDtoDAsync_v2" + end, q, p, 2003, stream)
        d.ok("cuMemcpyAsync" + end, q, p, 2004, stream)
        d.ok("cuMemcpyPeerAsync" + end, q, ctx, p, ctx, 2005, stream)
        d.ok("cuMemsetD8Async" + end, p, 1, 2006, stream)
        d.ok("cuMemsetD16Async" + end, p, 1, 2007, stream)
        d.ok("cuMemsetD32Async" + end, p, 1, 2008, stream)
        d.ok("cuStreamSynchronize" + end, stream)

HOST, DEVICE, UNIFIED = 1, 2, 4
def box2(a, b):
    def side(kind, at):
        return [0, 0, kind, at if kind == HOST else 0, at if kind != HOST else 0, 0, 512]
    return (ctypes.c_uint64 * 16)(*side(*a), *side(*b), 300, 7)
def box3(a, b):
    def side(kind, at):
        where = [at if kind == HOST else 0, at if kind != HOST else 0]
        return [0, 0, 0, 0, kind, *where, 0, 0, 512, 8]
    return (ctypes.c_uint64 * 25)(*side(*a), *side(*b), 300, 7, 5)
here = (HOST, ctypes.addressof(host))
for ends in ((here, (DEVICE, p)), ((DEVICE, p), here), ((DEVICE, p), (DEVICE, q)),
             ((UNIFIED, p), (DEVICE, q))):
    d.ok("cuMemcpy2D_v2", box2(*ends))
    d.ok("cuMemcpy2DUnaligned_v2_ptds", box2(*ends))
    d.ok("cuMemcpy2DAsync_v2", box2(*ends), s)
    d.ok("cuMemcpy3D_v2_ptds", box3(*ends))
    d.ok("cuMemcpy3DAsync_v2_ptsz", box3(*ends), 0)
"""

BOXES = ("HtoD", "DtoH", "DtoD", "any")


def test_every_copy_and_memset_with_bytes_stream_and_direction(tmp_path: Path) -> None:
    with tracing(Calls) as tr:
        env = environment(tmp_path, Scenario())
        subprocess.run([sys.executable, "-c", COPYING], env=env, check=True, timeout=60)
        tr.settle()
        rows, names = tr.rows("cuda.call"), tr.names()
        rows = rows[np.isin(rows["kind"], [CALL_KINDS.index("copy"), CALL_KINDS.index("set")])]
        (process,) = truth.read_all(tmp_path)
        want = [e for e in process.events if process.symbols[e["symbol"]].startswith(
            ("cuMemcpy", "cuMemset"))]  # fmt: skip
        assert len(rows) == len(want) == 16 + 32 + 20
        boxes = 0
        for row, event in zip(rows, want, strict=True):
            name = process.symbols[event["symbol"]]
            args = event["args"][: event["arg_count"]].tolist()
            assert names[row["function"]] == name
            f = of_symbol(name)
            assert f
            stream = args[f.stream - 1] if f.stream else 0
            own = name.endswith(("_ptsz", "_ptds"))
            assert int(row["stream"]) == (stream or 2 * own)
            if "2D" in name or "3D" in name:
                assert int(row["bytes"]) == 300 * 7 * (5 if "3D" in name else 1)
                assert COPIES[row["copy"]] == BOXES[boxes // 5]
                boxes += 1
            else:
                size = args[-2 if "Async" in name else -1]
                assert int(row["bytes"]) == size * {"D16": 2, "D32": 4}.get(name[8:11], 1)
                assert COPIES[row["copy"]] == f.copy
            assert row["result"] == event["result"] == 0
            took = int(event["ended"] - event["begun"])
            assert int(row["duration"]) >= took
            assert row["t"] >= event["ended"]
            assert row["t"] - row["duration"] <= event["begun"]
        by_name = tr.calls(process.pid, "bytes")
        assert by_name["cuMemsetD32_v2"] == 4 * 1008
        assert by_name["cuMemcpy3D_v2_ptds"] == 4 * 300 * 7 * 5


def test_counts_and_time_of_threads_that_synchronise(tmp_path: Path) -> None:
    with tracing(Launches, Calls) as tr:
        work(tmp_path, "launches", Scenario(), tr, threads=3, count=900, streams=1, sync=30)
        (process,) = truth.read_all(tmp_path)
        traced = {s.name for s in symbols() if (f := of_symbol(s.name)) and f.cls in tr.cuda.serves}
        assert tr.calls(process.pid) == {
            n: c.calls for n, c in process.counts.items() if n in traced
        }
        want = process.of("cuStreamSynchronize")
        took = want["ended"].astype(np.int64) - want["begun"].astype(np.int64)
        busy = tr.calls(process.pid, "busy")["cuStreamSynchronize"]
        assert took.sum() <= busy <= took.sum() + 90 * 1_000_000
        rows = tr.rows("cuda.calls")
        number = {name: i for i, name in tr.names().items()}["cuStreamSynchronize"]
        assert rows["hist"][rows["function"] == number].sum() == 90
        single = tr.rows("cuda.call")
        single = single[single["function"] == number]
        slow = single[single["duration"] >= 1_000_000]
        assert len(slow) >= np.count_nonzero(took >= 1_000_000)


def test_slow_calls_are_kept_when_the_budget_is_spent(tmp_path: Path) -> None:
    slow = parse({"kernels": {"k": {"us": 3000}}})
    with tracing(Launches, Calls) as tr, Target(tmp_path, slow) as t:
        tr.cuda.config["budget"] = 0
        t.start()
        module = t.ok("cuModuleLoadData", OUT, "image")
        f = t.ok("cuModuleGetFunction", OUT, module, "k")
        for _ in range(3):
            t.ok("cuLaunchKernel", f, 1, 1, 1, 1, 1, 1, 0, 0, 0, 0)
            t.ok("cuCtxSynchronize")
            t.ok("cuCtxSynchronize")
        tr.step()
        names = [tr.names()[i] for i in tr.rows("cuda.call")["function"].tolist()]
        assert names.count("cuCtxSynchronize") >= 3
        assert (tr.rows("cuda.call")["duration"] >= 1_000_000).all()
        assert tr.calls(t.own_pid)["cuCtxSynchronize"] == 6
        assert not len(tr.rows("cuda.launch"))
        assert tr.rows("cuda.thread")["shed"].sum() == 3


def test_failed_calls(tmp_path: Path) -> None:
    failing = parse({"failures": {"cuCtxSynchronize": {"call": 2, "times": 3, "result": 719},
                                  "cuMemcpyHtoD_v2": {"call": 1, "result": 1}}})  # fmt: skip
    with tracing(Calls) as tr, Target(tmp_path, failing) as t:
        t.start()
        got = [t.call("cuCtxSynchronize")[0] for _ in range(6)]
        assert got == [0, 719, 719, 719, 0, 0]
        p = t.ok("cuMemAlloc_v2", OUT, 4096)
        assert t.call("cuMemcpyHtoD_v2", p, {"buffer": 4096}, 4096)[0] == 1
        t.ok("cuMemcpyHtoD_v2", p, {"buffer": 4096}, 4096)
        tr.step()
        assert tr.calls(t.own_pid, "failed") == {"cuCtxSynchronize": 3, "cuMemcpyHtoD_v2": 1}
        assert tr.calls(t.own_pid, "bytes") == {"cuMemcpyHtoD_v2": 4096}
        names = {name: i for i, name in tr.names().items()}
        rows = tr.rows("cuda.call")
        rows = rows[rows["function"] == names["cuCtxSynchronize"]]
        assert rows["result"].tolist() == got


def test_a_call_that_does_not_return_is_told_of_while_it_lasts(tmp_path: Path) -> None:
    stuck = parse({"kernels": {"stuck": {"us": 1_500_000}}})
    with tracing(Calls) as tr, Target(tmp_path, stuck) as t:
        t.start()
        module = t.ok("cuModuleLoadData", OUT, "image")
        f = t.ok("cuModuleGetFunction", OUT, module, "stuck")
        t.ok("cuLaunchKernel", f, 1, 1, 1, 1, 1, 1, 0, 0, 0, 0)
        waiting = threading.Thread(target=lambda: t.ok("cuStreamSynchronize", 0))
        waiting.start()

        def told() -> bool:
            tr.step()
            return len(tr.rows("cuda.open")) > 0

        until(told, "the call is told of")
        (row,) = tr.rows("cuda.open")
        assert waiting.is_alive()
        assert tr.names()[row["function"]] == "cuStreamSynchronize"
        assert row["process"] == tr.process(t.own_pid)
        assert int(row["thread"]) == int(last(tr.rows("meta.thread"), ns_tid=t.own_pid)["id"])
        (event,) = t.truth.of("cuStreamSynchronize")
        assert 0 <= int(event["begun"]) - int(row["since"]) < 100_000_000
        assert row["t"] - row["since"] >= 100_000_000
        waiting.join(20)
        calls = next(p for p in tr.tracer.probes if isinstance(p, Calls))
        assert calls.collect(int(row["t"]) + 10 * EVERY_NS) == []


def test_the_time_of_a_call_is_told_while_it_lasts_and_once(tmp_path: Path) -> None:
    stuck = parse({"kernels": {"stuck": {"us": 700_000}}})
    with tracing(Calls) as tr, Target(tmp_path, stuck) as t:
        t.start()
        module = t.ok("cuModuleLoadData", OUT, "image")
        f = t.ok("cuModuleGetFunction", OUT, module, "stuck")
        t.ok("cuLaunchKernel", f, 1, 1, 1, 1, 1, 1, 0, 0, 0, 0)
        tr.step()
        waiting = threading.Thread(target=lambda: t.ok("cuStreamSynchronize", 0))
        waiting.start()
        while waiting.is_alive():
            tr.step()
            waiting.join(0.05)
        tr.step()
        (name,) = (i for i, text in tr.names().items() if text == "cuStreamSynchronize")
        rows = tr.rows("cuda.calls")
        rows = rows[rows["function"] == name]
        # One thread never stands in more than one call; the first row has what was not yet long.
        first, *rest = rows[rows["busy"] > 0]
        assert first["busy"] <= first["dt"] + LONG_NS
        assert len(rest) > 3
        assert all(row["busy"] <= row["dt"] + 1_000_000 for row in rest)
        (call,) = tr.rows("cuda.call")[tr.rows("cuda.call")["function"] == name]
        assert int(rows["busy"].sum()) == int(call["duration"])
        assert rows["count"].sum() == rows["hist"].sum() == 1
