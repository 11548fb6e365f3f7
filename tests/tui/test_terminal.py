"""The screen in a real terminal: what it leaves behind when it ends, and how much it writes."""

from __future__ import annotations

import fcntl
import os
import re
import select
import signal
import struct
import subprocess
import sys
import termios
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
LEFT = b"\x1b[?1049l"  # back to the main screen (xterm's control sequences)
SHOWN = b"\x1b[?25h"  # the cursor is visible


class Terminal:
    """A pseudo-terminal with the screen in it, as the leader of a session of its own."""

    def __init__(
        self, situation: str, size: tuple[int, int] = (80, 24), hz: float = 20, **env: str
    ) -> None:
        self.master, self.slave = os.openpty()
        columns, rows = size
        fcntl.ioctl(self.slave, termios.TIOCSWINSZ, struct.pack("HHHH", rows, columns, 0, 0))
        self.before = termios.tcgetattr(self.slave)
        base = {k: v for k, v in os.environ.items() if not k.startswith(("LC_", "LANG", "NO_CO"))}
        self.process = subprocess.Popen(
            [sys.executable, "-m", "tests.tui.child", situation, str(hz)],
            stdin=self.slave, stdout=self.slave, stderr=self.slave, cwd=ROOT,
            env=base | {"TERM": "xterm-256color", "LANG": "C.UTF-8"} | env,
            start_new_session=True,
            preexec_fn=lambda: fcntl.ioctl(0, termios.TIOCSCTTY, 0),
        )  # fmt: skip
        self.output = b""

    def read(self) -> bool:
        """Take what has been written; False where nothing came for a moment."""
        if not select.select([self.master], [], [], 0.1)[0]:
            return False
        self.output += os.read(self.master, 1 << 16)
        return True

    def until(self, text: bytes, since: int = 0) -> int:
        """Wait for ``text`` to be written; returns how many bytes had been up to its end."""
        deadline = time.monotonic() + 30
        while (at := self.output.find(text, since)) < 0:
            self.read()
            assert self.process.poll() is None or text in self.output, self.output[-2000:]
            assert time.monotonic() < deadline, self.output[-2000:]
        return at + len(text)

    def end(self) -> int:
        """Wait for the process to end, and read the rest."""
        deadline = time.monotonic() + 30
        while self.process.poll() is None:
            self.read()
            assert time.monotonic() < deadline, "it did not end"
        while self.read():
            pass
        return self.process.returncode

    def restored(self) -> bool:
        """The terminal is as it was found."""
        last = self.output.rfind(LEFT)
        return (
            last > 0
            and SHOWN in self.output[last - 50 :]
            and b"\x1b[?1049h" not in self.output[last:]
            and termios.tcgetattr(self.slave) == self.before
        )

    def close(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait()
        for fd in (self.master, self.slave):
            if fd >= 0:
                os.close(fd)


@pytest.fixture
def terminals() -> Iterator[list[Terminal]]:
    opened: list[Terminal] = []
    yield opened
    for terminal in opened:
        terminal.close()


@pytest.mark.parametrize("key", ["q", "\x03", "\x11"], ids=["q", "ctrl-c", "ctrl-q"])
def test_quit_leaves_the_terminal_as_it_was(terminals: list[Terminal], key: str) -> None:
    terminals.append(t := Terminal("growing"))
    t.until(b"warm")
    os.write(t.master, key.encode())
    assert t.end() == 0
    assert t.restored()
    assert b"Traceback" not in t.output


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP, signal.SIGINT])
@pytest.mark.parametrize("hz", [20, 0.001], ids=["busy", "asleep"])
def test_a_signal_ends_it_in_order(
    terminals: list[Terminal], number: signal.Signals, hz: float
) -> None:
    terminals.append(t := Terminal("growing", hz=hz))
    t.until(b"net_rx")
    t.process.send_signal(number)
    assert t.end() == 128 + number
    assert t.restored()
    assert b"Traceback" not in t.output


def test_a_terminal_that_goes_away_ends_it(terminals: list[Terminal]) -> None:
    terminals.append(t := Terminal("growing"))
    t.until(b"warm")
    os.close(t.slave)
    os.close(t.master)
    t.master = t.slave = -1
    assert t.process.wait(30) == 128 + signal.SIGHUP


def test_an_exception_ends_it_with_1(terminals: list[Terminal]) -> None:
    terminals.append(t := Terminal("failing"))
    assert t.end() == 1
    assert t.restored()
    assert b"the source broke" in t.output[t.output.rfind(LEFT) :]


def test_a_source_that_hangs_can_be_left(terminals: list[Terminal]) -> None:
    terminals.append(t := Terminal("hanging"))
    t.until(b"net_rx")
    os.write(t.master, b"?")
    t.until(b"Pause, or go on")
    os.write(t.master, b"qq")
    assert t.end() == 0
    assert t.restored()


def test_suspending_gives_the_shell_its_terminal_and_coming_back_repaints(
    terminals: list[Terminal],
) -> None:
    terminals.append(t := Terminal("growing"))
    t.until(b"done")
    os.write(t.master, b"\x1a")
    deadline = time.monotonic() + 30
    while state(t.process.pid) != "T":
        t.read()
        assert time.monotonic() < deadline
    assert t.restored()
    seen = len(t.output)
    t.process.send_signal(signal.SIGCONT)
    t.until(b"net_rx", seen)
    os.write(t.master, b"q")
    assert t.end() == 0
    assert t.restored()


def state(pid: int) -> str:
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]


@pytest.mark.parametrize(("size", "budget"), [((80, 24), 20_000), ((160, 50), 60_000)])
def test_what_a_steady_screen_writes(
    terminals: list[Terminal], size: tuple[int, int], budget: int
) -> None:
    """All lanes move; forty refreshes are twenty seconds at the default rate."""
    terminals.append(t := Terminal("growing", size))
    begin = t.until(b"warm")
    end = t.until(b"done")
    assert (end - begin) / 20 <= budget
    assert (end - begin) / 20 >= 500, "nothing moved"
    os.write(t.master, b"q")
    assert t.end() == 0


def test_ascii_in_the_c_locale(terminals: list[Terminal]) -> None:
    terminals.append(t := Terminal("growing", LANG="C"))
    t.until(b"warm")
    os.write(t.master, b":")
    t.until(b"Pause, or go on")
    os.write(t.master, b"\x03q")
    assert t.end() == 0
    assert t.output.isascii()


def test_no_color_sends_no_colour(terminals: list[Terminal]) -> None:
    colour = re.compile(rb"\x1b\[(?:\d+;)*(?:3[0-8]|4[0-8]|9[0-7]|10[0-7])(?:;\d+)*m")
    terminals.append(t := Terminal("growing", NO_COLOR="1"))
    t.until(b"done")
    os.write(t.master, b"q")
    assert t.end() == 0
    assert not colour.findall(t.output)
    terminals.append(with_colour := Terminal("growing"))
    with_colour.until(b"done")
    assert colour.findall(with_colour.output)


def test_sixteen_colours_are_enough(terminals: list[Terminal]) -> None:
    terminals.append(t := Terminal("growing", TERM="xterm-16color"))
    t.until(b"done")
    os.write(t.master, b"q")
    assert t.end() == 0
    assert not re.search(rb"\x1b\[[\d;]*[34]8[;:][25]", t.output)


def test_a_pipe_gets_a_sentence_and_no_escapes() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "tests.tui.child", "growing", "2"],
        cwd=ROOT, capture_output=True, stdin=subprocess.DEVNULL, timeout=60, check=False,
    )  # fmt: skip
    assert done.returncode == 2
    assert done.stdout == b""
    assert done.stderr.decode().count("\n") == 1
    assert "needs a terminal" in done.stderr.decode()
