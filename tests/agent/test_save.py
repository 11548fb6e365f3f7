"""`dsprobe save`: what the agent remembers, while it goes on."""

from __future__ import annotations

import signal
import socket
import subprocess
import threading
import time
from pathlib import Path

import pytest

from dsprobe.agent.commands import capture
from dsprobe.agent.commands.errors import Failure
from dsprobe.agent.commands.save import save
from dsprobe.recordings.filesession import open_file
from dsprobe.recordings.session import FOREVER, coverage
from tests.agent.recording import assert_whole, last, recorder, small_disk
from tests.agent.test_connection import HELLO, fake
from tests.support.box import WORKS, Box, Process, end
from tests.support.wait import until

pytestmark = pytest.mark.bpf

SECOND = 10**9


def test_save_what_just_happened(here: Box, agent: Process, tmp_path: Path) -> None:
    live = here.connect()
    until(lambda: live.wait(0.1) and live.span()[1] - live.span()[0] > 2 * SECOND, "2 s have gone")
    live.close()
    now = time.monotonic_ns()
    code, _, err = here.run("save", "--last", "1s", "-o", str(tmp_path / "s.mcap"))
    assert code == 0, err
    said = assert_whole(here, tmp_path / "s.mcap")
    assert 0.7 < said["duration_s"] < 1.8
    assert last(tmp_path / "s.mcap") > now - SECOND
    assert "holds no more" not in err
    with open_file(str(tmp_path / "s.mcap")) as f:
        assert coverage(f)["softirq", ""].status in WORKS  # said long before


def test_save_of_more_than_is_held_says_so(here: Box, agent: Process, tmp_path: Path) -> None:
    code, _, err = here.run("save", "--last", "5m", "-o", str(tmp_path / "s.mcap"))
    assert code == 0
    assert "the agent holds no more than that; 300 s were asked for" in err
    assert_whole(here, tmp_path / "s.mcap")


def test_save_while_recording(here: Box, tmp_path: Path) -> None:
    """Beside the recorder's own agent; neither disturbs the other."""
    path = tmp_path / "r.mcap"
    process = recorder(here, path)
    until(lambda: path.exists() and last(path, "cpu.usage"), "rows are written")
    until(lambda: last(path, "softirq.cpu"), "and of softirqs")
    code, _, err = here.run("save", "--last", "10s", "-o", str(tmp_path / "s.mcap"))
    assert code == 0, err
    assert end(process, signal.SIGINT)[0] == 0
    assert_whole(here, path)
    assert_whole(here, tmp_path / "s.mcap")
    # What both hold is the same, row for row.
    with open_file(str(path)) as r, open_file(str(tmp_path / "s.mcap")) as s:
        for stream in ("cpu.usage", "softirq.cpu"):
            mine, theirs = r.read(stream, 0, FOREVER), s.read(stream, 0, FOREVER)
            first, final = int(mine["t"][0]), int(theirs["t"][-1])
            assert first <= final
            both = [x[(x["t"] >= first) & (x["t"] <= final)] for x in (mine, theirs)]
            assert len(both[0]) > 0
            assert (both[0] == both[1]).all()
            assert len(both[0]) == len(both[1])


def test_save_without_an_agent(here: Box, tmp_path: Path) -> None:
    code, _, err = here.run("save", "--last", "1m", "-o", str(tmp_path / "s.mcap"))
    assert code == 1
    assert err == (
        "dsprobe: no agent listens at /run/dsprobe/agent.sock: start one with dsprobe agent\n"
    )
    assert not (tmp_path / "s.mcap").exists()


def test_save_from_an_agent_that_stops_to_answer(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(capture, "SILENT_SECONDS", 0.2)
    over = threading.Event()

    def talk(sock: socket.socket) -> None:
        sock.sendall(HELLO)
        over.wait(20)

    with fake(talk) as path:
        try:
            with pytest.raises(Failure, match=r"is incomplete: the agent at .* has said nothing"):
                save(path, None, str(tmp_path / "s.mcap"))
        finally:
            over.set()
    with open_file(str(tmp_path / "s.mcap")) as f:
        assert "has said nothing for" in f.problems[0]


def test_save_onto_a_full_disk(here: Box, agent: Process, tmp_path: Path) -> None:
    small_disk(here, tmp_path, "12k")
    live = here.connect()
    until(lambda: live.wait(0.1) and live.span()[1] - live.span()[0] > SECOND, "some has gone")
    live.close()
    code, _, err = here.run("save", "--last", "1m", "-o", str(tmp_path / "s.mcap"))
    assert code == 3
    assert "No space left on device" in err
    assert "Traceback" not in err
    assert agent.poll() is None
    subprocess.run(here.argv("umount", "-l", str(tmp_path)), check=True)
