"""The way in: run the screen on a session, and give the terminal back however it ends."""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Callable
from types import FrameType

from dsprobe.recordings.session import Session
from dsprobe.tui.control import Save
from dsprobe.tui.glyphs import choose
from dsprobe.tui.observer import Observer
from dsprobe.tui.player import Player
from dsprobe.tui.viewer import HZ, Viewer


def run(
    session: Session,
    *,
    save: Save | None = None,
    start: str = "live",
    speed: float | None = None,
    at: str | None = None,
    hz: float = HZ,
    clock: Callable[[], int] = time.monotonic_ns,
) -> int:
    """Show ``session`` until the user leaves; returns the exit code.

    ``start`` is "live" (at the newest moment, following it) or "start"; ``at`` is a moment to
    start at instead, as the key ``b`` takes it: paused, unless a ``speed`` is asked for.  ``save``
    gets a file name, or "" for one of its own choice, and returns a sentence.  Raises what the
    session raised, or what failed in the screen, after the terminal has been restored.
    """
    if not (sys.stdin.isatty() and sys.stdout.isatty()):
        print("dsprobe: the screen needs a terminal on its input and output", file=sys.stderr)
        return 2
    try:
        viewer = prepare(session, save, start, speed, at, hz, clock)
    except ValueError as e:
        print(f"dsprobe: {e}", file=sys.stderr)
        return 2
    code = _with_signals(viewer)
    _let_go()
    if viewer.failure is not None:
        raise viewer.failure
    return code


def _let_go() -> None:
    """Have written what is to be written; to a terminal that has gone nobody writes any more, or
    the interpreter would end with a code of its own for it (120)."""
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except OSError:
            os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())


def prepare(
    session: Session,
    save: Save | None,
    start: str,
    speed: float | None,
    at: str | None,
    hz: float,
    clock: Callable[[], int],
) -> Viewer:
    """The viewer that :func:`run` runs; raises ValueError where ``at`` is not a time."""
    session.refresh()
    begin, end = session.span()
    live = start == "live"
    player = Player(clock, begin, end, growing=session.live, live=live, speed=speed or 1.0)
    observer = Observer(session, player)
    message = ""
    if at is not None:
        observer.look()
        moment = observer.scale.parse(at, player.position, player.end)
        if moment is None:
            raise ValueError(f"not a time: {at}; try 14:03:20, 1m30s or 40%")
        if not player.jump(moment):
            message = f"{at} is not held: went to the nearest moment that is"
        player.playing = speed is not None
    viewer = Viewer(observer, save, choose(), hz)
    viewer.control.message = message
    return viewer


def _with_signals(viewer: Viewer) -> int:
    """Run ``viewer``; a signal that ends processes ends it in order, with 128 + its number."""
    caught: list[int] = []

    def end(number: int, frame: FrameType | None) -> None:
        caught.append(number)
        if not viewer.leave_for(number):
            raise SystemExit(128 + number)

    ends = (signal.SIGTERM, signal.SIGHUP, signal.SIGINT)
    before = {number: signal.signal(number, end) for number in ends}
    try:
        viewer.run(mouse=False)
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    return 128 + caught[0] if caught else viewer.return_code or 0
