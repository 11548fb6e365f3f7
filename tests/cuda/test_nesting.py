"""A call counts once, whatever the driver calls in turn, and however a call is left."""

from __future__ import annotations

import json
import subprocess
from collections import Counter
from pathlib import Path

import numpy as np
import pytest

from dsprobe.probes.calls import Calls
from dsprobe.probes.functions import of_symbol
from dsprobe.probes.launches import Launches
from tests.cuda.tracing import Tracing, tracing
from tests.simgpu import truth
from tests.simgpu.build import FLAVOURS, gcc
from tests.simgpu.run import environment
from tests.simgpu.scenario import Scenario, parse
from tests.simgpu.target import OUT, Target

pytestmark = [pytest.mark.bpf, pytest.mark.tools("gcc")]


def returned(tr: Tracing, pid: int) -> dict[str, int]:
    """Calls whose return was seen, by function."""
    rows, names = tr.rows("cuda.calls"), tr.names()
    found: Counter[str] = Counter()
    for row in rows[rows["process"] == tr.process(pid)]:
        found[names[row["function"]]] += int(row["hist"].sum())
    return dict(found)


@pytest.mark.parametrize("flavour", FLAVOURS)
def test_what_the_driver_calls_itself_is_not_counted(tmp_path: Path, flavour: str) -> None:
    nested = parse({"library": {"nested": True, "flavour": flavour}})
    with tracing(Launches, Calls, flavour=flavour) as tr, Target(tmp_path, nested) as t:
        t.start()
        p = t.ok("cuMemAlloc_v2", OUT, 1 << 20)
        for _ in range(20):
            t.ok("cuMemcpyHtoD_v2", p, {"buffer": 4096}, 4096)
            t.ok("cuMemcpyHtoD_v2_ptds", p, {"buffer": 4096}, 4096)
        t.ok("cuStreamSynchronize", 0)
        tr.step()
        seen = tr.calls(t.own_pid)
        events = t.truth.events
        outer = Counter(t.truth.symbols[s] for s in events["symbol"][events["depth"] == 1].tolist())
        traced = {n: c for n, c in outer.items() if (f := of_symbol(n)) and f.cls in tr.cuda.serves}
        assert seen == traced
        assert t.truth.calls("cuStreamSynchronize") > seen["cuStreamSynchronize"] == 1
        assert returned(tr, t.own_pid) == traced


def test_calls_left_by_longjmp_and_calls_inside_calls(tmp_path: Path) -> None:
    program = tmp_path / "jumps"
    gcc("-Wno-clobbered", "-o", str(program), str(Path(__file__).with_name("jumps.c")), "-ldl",
        "-lpthread")  # fmt: skip
    with tracing(Calls) as tr:
        done = subprocess.Popen(
            [program], env=environment(tmp_path, Scenario()), stdout=subprocess.PIPE, text=True
        )
        out, _ = done.communicate(timeout=60)
        tr.settle()
        told = json.loads(out)
        (process,) = truth.read_all(tmp_path)
        seen, back = tr.calls(process.pid), returned(tr, process.pid)
        assert {n: [seen[n], back[n]] for n in told} == told
        # What was left is not in the way of what came after.
        rows = tr.rows("cuda.call")
        assert (rows["duration"] < 1_000_000_000).all()
        assert np.count_nonzero(rows["duration"]) == len(rows)
        # Four at a time look as if they were still open, and are given up.
        lost = sum(x.lost for x in tr.losses)
        assert lost in (16, 20)
        assert {x.stream for x in tr.losses} == {"cuda.call"}
        tr.losses.clear()


JUMPING = """
.macro F name
.globl \\name
.type \\name, @function
\\name: push %rbp
pop %rbp
.endm
.text
F cuInit
xor %eax, %eax
ret
.size cuInit, .-cuInit
F cuMemcpy
mov $7, %eax
ret
.size cuMemcpy, .-cuMemcpy
F cuMemcpyHtoD_v2
jmp cuMemcpy@PLT
.size cuMemcpyHtoD_v2, .-cuMemcpyHtoD_v2
.section .note.GNU-stack,"",@progbits
"""
CALLING = """
int cuInit(unsigned), cuMemcpy(void *, void *, long), cuMemcpyHtoD_v2(void *, void *, long);
int main(void) {
    int sum = cuInit(0);
    for (int i = 0; i < 10; i++) sum += cuMemcpyHtoD_v2(0, 0, 16);
    return sum + cuMemcpy(0, 0, 16) != 77;
}
"""


def test_an_entry_that_jumps_to_another_is_one_call(tmp_path: Path) -> None:
    library, program = tmp_path / "libcuda.so.1", tmp_path / "calling"
    (tmp_path / "jumping.S").write_text(JUMPING)
    (tmp_path / "calling.c").write_text(CALLING)
    gcc("-shared", "-o", str(library), str(tmp_path / "jumping.S"), "-Wl,-soname,libcuda.so.1")
    gcc("-o", str(program), str(tmp_path / "calling.c"), str(library), f"-Wl,-rpath,{tmp_path}")
    with tracing(Calls) as tr:
        tr.attach(library)
        child = subprocess.Popen([program])
        assert child.wait(20) == 0
        tr.settle()
        assert tr.calls(child.pid) == {"cuInit": 1, "cuMemcpyHtoD_v2": 10, "cuMemcpy": 1}
        assert returned(tr, child.pid) == {"cuInit": 1, "cuMemcpyHtoD_v2": 10, "cuMemcpy": 1}
        assert tr.calls(child.pid, "failed") == {"cuMemcpyHtoD_v2": 10, "cuMemcpy": 1}


def test_without_probes_on_returns_calls_are_still_counted(tmp_path: Path) -> None:
    with tracing(Launches, Calls) as tr:
        from tests.simgpu.build import libcuda

        path = libcuda() / "libcuda.so.1"
        tr.tracer.detach_library(str(path))
        tr.attach(path, returns=False)
        with Target(tmp_path) as t:
            t.start()
            for _ in range(7):
                t.ok("cuCtxSynchronize")
            tr.step()
            assert tr.calls(t.own_pid) == {"cuInit": 1, "cuCtxSynchronize": 7}
            assert not tr.calls(t.own_pid, "busy")
            assert not tr.cuda.threads.live["depth"].any()
