"""A million launches a second, as an agent of its own sees them: nothing grows, and it is said."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from dsprobe.recordings.connection import Connection
from dsprobe.recordings.filesession import open_file
from dsprobe.recordings.live import LiveSession
from dsprobe.recordings.session import coverage
from tests.simgpu.run import environment, workload
from tests.simgpu.scenario import parse
from tests.support.wait import until

pytestmark = [pytest.mark.bpf, pytest.mark.tools("gcc")]

DSPROBE = [sys.executable, "-I", "-m", "dsprobe.agent.commands.main"]
BURST = 1_000_003
GROWTH = 24 << 20
"""The flight ring keeps what was told of a burst: counts, and the launches within the budget."""


def test_memory_stays_and_shedding_is_said_everywhere(tmp_path: Path) -> None:
    fast = parse({"gpu": {"kernel_us": 0.01}, "library": {"log_launches": False}})
    socket, file = str(tmp_path / "socket"), tmp_path / "file.mcap"
    child = subprocess.Popen(
        workload("launches", count=1 << 40), env=environment(tmp_path / "truth", fast),
        stdout=subprocess.DEVNULL,
    )  # fmt: skip
    command = [*DSPROBE, "agent", "--socket", socket, "--probes", "launches"]
    command += ["--pid", str(child.pid)]
    agent = subprocess.Popen(command, stderr=subprocess.DEVNULL)
    try:
        until(lambda: Path(socket).exists(), "it listens")
        session = LiveSession(Connection(socket))

        def counted() -> int:
            session.refresh()
            return int(session.read("cuda.thread", 0, 1 << 63)["count"].sum())

        def shed() -> bool:
            session.refresh()
            return coverage(session)["launches", ""].status == "shed"

        until(lambda: counted() > BURST, "a million has come")
        until(shed, "shedding is said")
        rss, maps, first = resident(agent.pid), of_maps(agent.pid), counted()
        until(lambda: counted() > first + 2 * BURST, "two million more have come")
        assert maps > 0
        assert of_maps(agent.pid) == maps
        assert resident(agent.pid) < rss + GROWTH
        once = [*DSPROBE, "top", "--once", "--width", "160", "--socket", socket]
        screen = subprocess.run(once, capture_output=True, text=True, timeout=60, check=True).stdout
        header = screen.splitlines()[0]
        assert "SHED " in header
        assert f"of PID {child.pid}" in header
        save = [*DSPROBE, "save", "--last", "1m", "-o", str(file), "--socket", socket]
        assert subprocess.run(save, capture_output=True, timeout=60).returncode in (0, 3)
        session.close()
    finally:
        for process in (child, agent):
            process.kill()
            process.wait()
    with open_file(str(file)) as kept:
        status = coverage(kept)["launches", ""]
    assert status.status == "shed"
    assert f"process {child.pid}" in status.reason


def resident(pid: int) -> int:
    """Bytes of memory that a process has."""
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return 1024 * next(int(line.split()[1]) for line in lines if line.startswith("VmRSS"))


def of_maps(pid: int) -> int:
    """Bytes that the BPF maps take which a process holds."""
    total = 0
    for info in Path(f"/proc/{pid}/fdinfo").iterdir():
        words = info.read_text().split()
        if "map_id:" in words and "memlock:" in words:
            total += int(words[words.index("memlock:") + 1])
    return total
