"""The way in: where a screen starts, and what is said where there can be none."""

from __future__ import annotations

import subprocess
import sys

import pytest

from dsprobe.tui.app import prepare
from dsprobe.tui.viewer import Viewer
from tests.tui.scenario import BOOT, SECOND, TICK, recording


def replay(at: str | None = None, speed: float | None = None) -> Viewer:
    return prepare(recording(60), None, "start", speed, at, 0, lambda: 0)


def test_a_replay_plays_from_its_start() -> None:
    screen = replay(speed=4)
    snap = screen.observer.look()
    assert screen.player.position == BOOT + TICK
    assert (snap.mode, snap.detail) == ("PLAY", "x4")


def test_from_a_moment_it_is_paused_unless_a_speed_is_asked_for() -> None:
    for speed, mode, detail in ((None, "PAUSED", ""), (4.0, "PLAY", "x4"), (1.0, "PLAY", "x1")):
        screen = replay("14:00:30", speed)
        snap = screen.observer.look()
        assert screen.player.position == BOOT + 30 * SECOND
        assert (snap.mode, snap.detail) == (mode, detail)
        assert screen.control.message == ""


def test_a_paused_screen_shows_the_speed_that_was_chosen() -> None:
    screen = replay("14:00:30")
    screen.player.faster(2)
    assert screen.observer.look().detail == "x4"


@pytest.mark.parametrize("at", ["99h", "23:00:00", "2020-01-01 00:00"])
def test_a_moment_that_is_not_held_is_not_passed_over_in_silence(at: str) -> None:
    screen = replay(at)
    assert screen.player.position in (screen.player.start, screen.player.end)
    assert screen.control.message == f"{at} is not held: went to the nearest moment that is"


def test_what_is_no_time_is_refused() -> None:
    with pytest.raises(ValueError, match="not a time: noon"):
        replay("noon")


@pytest.mark.parametrize("verb", [("demo",), ("replay", "x.mcap")])
def test_in_a_pipe_each_verb_speaks_for_itself(verb: tuple[str, ...]) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "dsprobe.agent.commands.main", *verb],
        capture_output=True, stdin=subprocess.DEVNULL, timeout=60, check=False, text=True,
    )  # fmt: skip
    assert done.returncode != 0
    assert done.stdout == ""
    assert f"dsprobe {verb[0]} needs a terminal" in done.stderr
