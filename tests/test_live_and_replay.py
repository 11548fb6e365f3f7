"""The live screen and the replay of what was recorded meanwhile show the same numbers."""

from __future__ import annotations

import re
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.setup.terminal import Terminal
from tests.support.drops import loss
from tests.support.loads import iperf, iperf_server, udp_flood
from tests.support.netns import pair
from tests.support.wait import until

pytestmark = [pytest.mark.bpf, pytest.mark.netns, pytest.mark.tools("tmux", "gcc", "iperf3", "nft")]

DSPROBE = [sys.executable, "-m", "dsprobe.agent.commands.main"]
MOVING = ("net_rx worst CPU", "NAPI packets", "segments out", "retransmit calls", "CPU busy")
COLUMNS = 150


@pytest.fixture
def place() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="dsprobe-same-") as name:
        yield Path(name)


def lanes(screen: str) -> dict[str, str]:
    """What stands in the row of each lane, numbers and curve, by title."""
    rows = {}
    for line in screen.splitlines()[2:]:
        left = line.split("│")[0]
        if match := re.match(r"[ >](\S.*?)  +(\S.*?)\s*$", left):
            rows[match[1]] = match[2]
    return rows


def row(screen: str) -> str:
    """The row of a lane that has a value wherever its probe was attached."""
    return lanes(screen).get("NAPI packets", "")


def moment(screen: str) -> str:
    """The wall-clock time in the header, as ``b`` takes it."""
    match = re.search(r"\d\d:\d\d:\d\d\.\d", screen.splitlines()[0])
    assert match, screen
    return match[0]


def zoom_in(screen: Terminal) -> None:
    """100 ms a column, so that the window is seconds long and all of it was recorded."""
    for _ in range(8):
        if "100ms/col" in screen.screen():
            break
        before = re.search(r"\S+/col", screen.screen())
        screen.press("+")
        screen.wait(lambda text, b=before: b is None or b[0] not in text)
    screen.wait(lambda text: "100ms/col" in text)


def numbers(screen: Terminal) -> dict[str, str]:
    """The lanes of a screen that stands still."""
    last: dict[str, str] = {}

    def still(text: str) -> bool:
        nonlocal last
        now = lanes(text)
        same, last = now == last and len(now) > 20, now
        return same

    screen.wait(still)
    return last


def test_the_same_moment_shows_the_same_numbers_live_and_in_replay(place: Path) -> None:
    socket, file = place / "agent.sock", place / "session.mcap"
    agent = subprocess.Popen([*DSPROBE, "agent", "--socket", str(socket)])
    try:
        until(socket.exists, "the agent listens")
        record = subprocess.Popen(
            [*DSPROBE, "record", "--socket", str(socket), "-o", str(file)],
            stderr=subprocess.PIPE, text=True,
        )  # fmt: skip
        assert record.stderr
        assert "recording into" in record.stderr.readline()
        with pair() as ends, iperf_server(ends.right), loss(ends.right, 2):
            loads = [
                threading.Thread(target=udp_flood, args=(ends, 25), kwargs={"per_second": 3011}),
                threading.Thread(target=iperf, args=(ends.left, ends.right.ipv4, 25, "-b", "20M")),
            ]
            for load in loads:
                load.start()
            seen, at = live(place, socket)
            for load in loads:
                load.join()
        record.terminate()
        assert record.wait(20) == 0
        record.stderr.close()
    finally:
        agent.terminate()
        agent.wait(20)

    assert all(re.search(r"[1-9]", seen[title]) for title in MOVING)
    with Terminal(place, [*DSPROBE, "replay", file], columns=COLUMNS, rows=50) as screen:
        screen.wait(lambda text: "net_rx" in text)
        screen.press("Space")
        screen.wait(lambda text: "PAUSED" in text)
        zoom_in(screen)
        # From the start, a jump puts the moment at the right edge, where a live screen has it.
        screen.press("g")
        screen.press("b")
        screen.wait(lambda text: "jump to (" in text)
        screen.press(at, "Enter")
        screen.wait(lambda text: moment(text)[:-2] == at[:-2])
        # The header shows tenths of a second, which may fall into a column beside it.
        tries = [numbers(screen)]
        for keys in ("t", "TT"):
            if tries[-1] != seen:
                before = screen.screen()
                screen.press(*keys)
                screen.wait(lambda text, before=before: text != before)
                tries.append(numbers(screen))
        screen.press("q")
        assert screen.exit_code() == 0
    differences = [
        {
            title: (seen[title], shown.get(title))
            for title in seen
            if seen[title] != shown.get(title)
        }
        for shown in tries
    ]
    assert {} in differences


def live(place: Path, socket: Path) -> tuple[dict[str, str], str]:
    """What a live screen shows when it is stopped under load, and which moment that is."""
    top = [*DSPROBE, "top", "--socket", str(socket)]
    with Terminal(place, top, columns=COLUMNS, rows=50) as screen:
        screen.wait(lambda text: "net_rx" in text)
        zoom_in(screen)
        # The curve fills its columns: the window lies within what was recorded.
        screen.wait(lambda text: re.fullmatch(r"\S+ +\S+ +\S+ \S{2,}.*", row(text)))
        screen.press("Space")
        # By then the slowest source has said all it had to say of this moment.
        screen.wait(lambda text: re.search(r"PAUSED [3-9]\.?\d*s behind", text))
        seen, text = numbers(screen), screen.screen()
        screen.press("q")
        assert screen.exit_code() == 0
    return seen, moment(text)
