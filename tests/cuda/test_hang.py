"""A call that does not return shows while it does not: in the lane, in the tables, in report."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from dsprobe.recordings.blocked import OpenCall, calls, open_calls
from dsprobe.recordings.identities import Identities
from dsprobe.recordings.lanes import LANES
from dsprobe.recordings.timeline import SECOND, Timeline, Window
from tests.simgpu.run import environment
from tests.simgpu.scenario import parse
from tests.support.agents import Watched, watched
from tests.support.wait import until

pytestmark = [pytest.mark.bpf, pytest.mark.tools("gcc")]

DSPROBE = str(Path(sys.executable).with_name("dsprobe"))
TOOK = 6
SPIN = """
import sys
from tests.simgpu.driver import Driver
d = Driver()
d.start()
spin = d.kernel("spin")
sys.stdin.readline()
d.launch(spin)
d.ok("cuCtxSynchronize")
print("returned", flush=True)
sys.stdin.readline()
"""


def lane(w: Watched, key: str, start: int, end: int) -> list[float]:
    """Values of the seconds from ``start`` to ``end``."""
    window = Window(start // SECOND, (end - start) // SECOND, SECOND)
    i = next(i for i, lane in enumerate(LANES) if lane.key == key)
    return Timeline(w.session).curves(window)[i].values.tolist()


def test_a_thread_that_hangs_in_a_synchronize(tmp_path: Path) -> None:
    env = environment(tmp_path, parse({"kernels": {"spin": {"us": TOOK * 1_000_000}}}))
    process = subprocess.Popen(
        [sys.executable, "-c", SPIN], env=env, text=True,
        stdin=subprocess.PIPE, stdout=subprocess.PIPE,
    )  # fmt: skip
    assert process.stdin
    assert process.stdout
    try:
        with watched("launches", "calls", pids=(process.pid,)) as w:
            until(lambda: len(w.rows("meta.placement")), "the library has its probes")
            begun = time.monotonic_ns()
            process.stdin.write("\n")
            process.stdin.flush()

            def stuck() -> OpenCall | None:
                w.session.refresh()
                found = open_calls(w.session, time.monotonic_ns())
                return next((c for c in found if c.duration > 2 * SECOND), None)

            call = until(stuck, "the call is seen to be open")
            who = Identities(w.session)
            who.refresh()
            assert who.text(call.function) == "cuCtxSynchronize"
            assert who.process(call.process).pid == process.pid
            assert who.thread(call.thread).tid == process.pid
            assert begun < call.since < time.monotonic_ns() - 2 * SECOND
            done = subprocess.run(
                [DSPROBE, "report", "--json", "--socket", w.session.name],
                capture_output=True, text=True, timeout=30,
            )  # fmt: skip
            assert done.returncode == 0, done.stderr
            (told,) = json.loads(done.stdout)["open_calls"]
            assert told["function"] == "cuCtxSynchronize"
            assert 1 < told["for_s"] <= TOOK  # as of the last row, which may be a second old
            assert process.stdout.readline() == "returned\n"
            end = w.pass_by()
            assert open_calls(w.session, end) == ()
            assert max(lane(w, "cuda.open", begun, end)) == 1
            assert max(lane(w, "cuda.open_longest", begun, end)) > (TOOK - 2) * SECOND
            w.pass_by(end + 4 * SECOND)  # the lane holds on for a second
            later = np.array(lane(w, "cuda.open", end + 3 * SECOND, end + 4 * SECOND))
            assert not later.any()
            rows = {who.text(r.function): r for r in calls(w.session, begun, end + SECOND)}
            assert rows["cuCtxSynchronize"].busy == pytest.approx(TOOK * SECOND, rel=0.1)
            assert rows["cuCtxSynchronize"].kind == "sync"
    finally:
        process.kill()
        process.wait()
        process.stdout.close()
