"""What an agent that is behind has not told yet when a recording ends is told, or said to lack."""

from __future__ import annotations

import os
import signal
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

from dsprobe.agent.commands import record
from dsprobe.recordings.filesession import open_file
from dsprobe.recordings.session import FOREVER
from tests.agent.recording import info
from tests.support.box import Box, Process


class Agent:
    """A connection and what came through it: it tells of ``behind`` s before now, and ends once
    ``ends`` steps were taken."""

    def __init__(self, behind: float, ends: int = 0, silence: str = "") -> None:
        self.behind, self.ends, self.silence = behind, ends, silence
        self.ended, self.lived, self.steps = "", 0, 0
        self.sent: list[str] = []

    def send(self, kind: str) -> None:
        self.sent.append(kind)

    def step(self, seconds: float) -> None:
        time.sleep(seconds / 10)
        self.steps += 1
        self.lived = time.monotonic_ns() - int(self.behind * 1e9)
        if self.steps == self.ends:
            self.ended = "the agent has gone"


@pytest.mark.parametrize(
    ("agent", "own", "asked", "said"),
    [
        (Agent(0.0), False, 0, ""),
        (Agent(0.02), False, 0, ""),
        (Agent(0.02, ends=9), True, 0, ""),
        (Agent(0.0), True, 0, ""),  # others look at it too, so it goes on
        (Agent(9.0), False, 0, "it is too slow to tell in time"),
        (Agent(9.0), True, 0, "it is too slow to tell in time"),
        (Agent(9.0), False, 1, "it is too slow to tell in time"),
        (Agent(9.0, ends=3), True, 0, "the agent has gone"),
        (Agent(9.0, ends=3), False, 0, "the agent has gone"),
        (Agent(9.0, silence="it has said nothing for 3.0 s"), False, 0, "it has said nothing"),
    ],
)
def test_the_rest_is_there_or_said_to_be_missing(
    agent: Agent, own: bool, asked: int, said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(record, "LAST_ROWS_SECONDS", 0.05)
    monkeypatch.setattr(record, "BEHIND_SECONDS", 0.1)
    stop = SimpleNamespace(times=asked)
    why = record._take_the_rest(agent, agent, own, stop)  # type: ignore[arg-type]
    assert said in why
    assert bool(why) == bool(said)
    assert agent.sent == ["stop"] * own


@pytest.mark.bpf
def test_an_agent_that_hardly_runs(here: Box, agent: Process, tmp_path: Path) -> None:
    """It gets a twentieth of the time: the file reaches to the end of the command, or record says
    that it does not."""
    path, ended = tmp_path / "r.mcap", tmp_path / "ended"
    over = threading.Event()

    def hinder() -> None:
        while not over.wait(0.06):
            os.kill(agent.pid, signal.SIGSTOP)
            over.wait(1.2)
            os.kill(agent.pid, signal.SIGCONT)

    thread = threading.Thread(target=hinder)
    thread.start()
    try:
        script = f"python3 -c 'import time; print(time.monotonic_ns())' > {ended}"
        code, _, err = here.run("record", "-o", str(path), "--", "sh", "-c", script, timeout=60)
    finally:
        over.set()
        thread.join()
    if code == 0:
        with open_file(str(path)) as f:
            assert int(f.read("cpu.usage", 0, FOREVER)["t"][-1]) >= int(ended.read_text())
    else:
        assert (code, "what the agent saw last is missing" in err) == (3, True), err
        assert "ended early" in "".join(info(here, path)[1]["problems"])


@pytest.mark.bpf
def test_an_agent_that_stands_still(here: Box, agent: Process, tmp_path: Path) -> None:
    path = tmp_path / "r.mcap"
    try:
        code, _, err = here.run("record", "-o", str(path), "--", "kill", "-STOP", str(agent.pid))
    finally:
        os.kill(agent.pid, signal.SIGCONT)
    assert code == 3
    assert "what the agent saw last is missing" in err
    assert info(here, path)[0] == 3
