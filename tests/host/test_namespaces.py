"""The namespaces of the tests themselves go away again, whatever happens."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support import counters, drops, loads, netns

pytestmark = [pytest.mark.netns, pytest.mark.tools("ip", "nsenter", "nft", "gcc", "iperf3")]

MAKER = """
from tests.support import netns
import time
with netns.pair() as p:
    p.left.popen("sleep", "60")
    print(p.left.name, p.right.name, flush=True)
    time.sleep(60)
"""


def test_what_a_killed_run_left_is_swept(pair: netns.Pair) -> None:
    root = Path(__file__).resolve().parents[2]
    maker = subprocess.Popen(
        [sys.executable, "-c", MAKER], cwd=root, stdout=subprocess.PIPE, text=True
    )
    assert maker.stdout
    with maker.stdout:
        names = maker.stdout.readline().split()
    paths = [Path("/run/netns", name) for name in names]
    assert len(paths) == 2
    netns.sweep()
    assert all(p.exists() for p in paths), "its maker lives"
    os.kill(maker.pid, signal.SIGKILL)
    maker.wait()
    netns.sweep()
    assert not any(p.exists() for p in paths)
    assert Path("/run/netns", pair.left.name).exists(), "this one's maker lives"


def test_they_are_removed_after_an_exception() -> None:
    kept = []

    def fail() -> None:
        with netns.pair() as p:
            kept.extend((p, p.left.popen("sleep", "60")))
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail()
    p, sleeper = kept
    assert not Path("/run/netns", p.left.name).exists()
    assert sleeper.wait(10) == -signal.SIGKILL
    sleeper.communicate()


def test_loss_is_what_was_asked_for(pair: netns.Pair) -> None:
    with drops.loss(pair.right, 10) as dropped:
        sent = loads.udp_flood(pair, 0.3).sent
        # Six standard deviations: a busy machine sends few datagrams, and chance has more say then.
        assert abs(dropped() - 0.1 * sent) < 6 * (0.09 * sent) ** 0.5
    assert counters.device(pair.right)["rx_packets"] >= sent
