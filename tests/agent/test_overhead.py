"""What the agent says it costs holds the processes that it has started."""

from __future__ import annotations

import subprocess
import sys
import time

from dsprobe.agent.overhead import Overhead
from dsprobe.probes.tracer import Tracer

BUSY = """
import sys, time
while time.process_time() < 0.4: pass
room = b"x" * (64 << 20)
print("done", flush=True)
sys.stdin.read()
"""


def test_helpers_count_while_they_live_and_after() -> None:
    tracer = Tracer([])
    overhead = Overhead()
    try:
        (_, alone) = overhead.collect(time.monotonic_ns(), tracer, 0, 0)[0]
        child = subprocess.Popen(
            [sys.executable, "-c", BUSY], stdin=subprocess.PIPE, stdout=subprocess.PIPE
        )
        assert child.stdout is not None
        child.stdout.readline()
        (_, both) = overhead.collect(time.monotonic_ns(), tracer, 0, 0)[0]
        child.communicate()
        (_, after) = overhead.collect(time.monotonic_ns(), tracer, 0, 0)[0]
    finally:
        overhead.close()
        tracer.close()
    assert both["agent_cpu"][0] >= 4e8
    assert both["rss"][0] > alone["rss"][0] + (64 << 20)
    assert after["rss"][0] < both["rss"][0] - (64 << 20)
    # It was counted once: its time has passed from the living to the ended.
    assert after["agent_cpu"][0] < 4e8
