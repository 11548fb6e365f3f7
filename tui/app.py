"""The way in: run the screen on a session, and give the terminal back however it ends."""

from __future__ import annotations

import signal
import sys
import time
from collections.abc import Callable
from types import FrameType

from dsprobe.recordings.session import Session
from dsprobe.tui.glyphs import choose
from dsprobe.tui.player import Player
from dsprobe.tui.screen import HZ, Save, Screen
from dsprobe.tui.snapshot import Observer


def run(
    session: Session,
    *,
    save: Save | None = None,
    start: str = "live",
    speed: float = 1.0,
    at: str | None = None,
    hz: float = HZ,
    clock: Callable[[], int] = time.monotonic_ns,
) -> int:
    """Show ``session`` until the user leaves; returns the exit code.

    ``start`` is "live" (at the newest moment, following it) or "start"; ``at`` is a moment to
    start at instead, paused, as the key ``b`` takes it.  ``save`` gets a file name, or "" for one
    of its own choice, and returns a sentence.  Raises what the session raised, or what failed in
    the screen, after the terminal has been restored.
    """
    if not (sys.stdin.isatty() and sys.stdout.isatty()):
        print("dsprobe: the screen needs a terminal on its input and output", file=sys.stderr)
        return 2
    session.refresh()
    begin, end = session.span()
    player = Player(clock, begin, end, growing=session.live, live=start == "live", speed=speed)
    observer = Observer(session, player)
    if at is not None:
        observer.look()
        moment = observer.scale.parse(at, player.position, player.end)
        if moment is None:
            print(f"dsprobe: not a time: {at}; try 14:03:20, 1m30s or 40%", file=sys.stderr)
            return 2
        player.jump(moment)
    screen = Screen(observer, save, choose(), hz)
    code = _with_signals(screen)
    if screen.failure is not None:
        raise screen.failure
    return code


def _with_signals(screen: Screen) -> int:
    """Run ``screen``; a signal that ends processes ends it in order, with 128 + its number."""
    caught: list[int] = []

    def end(number: int, frame: FrameType | None) -> None:
        caught.append(number)
        if not screen.leave_for(number):
            raise SystemExit(128 + number)

    ends = (signal.SIGTERM, signal.SIGHUP, signal.SIGINT)
    before = {number: signal.signal(number, end) for number in ends}
    try:
        screen.run(mouse=False)
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    return 128 + caught[0] if caught else screen.return_code or 0
