"""``dsprobe replay``: a recording on the screen."""

from __future__ import annotations

import argparse
import sys

from dsprobe.agent.commands.errors import OK, PARTIAL, Failure
from dsprobe.recordings.filesession import open_file


def run(args: argparse.Namespace) -> int:
    if not sys.stdout.isatty():
        raise Failure("dsprobe replay needs a terminal", "use dsprobe info or dump in a pipe")
    return show(args.file, args.speed, args.start)


def show(path: str, speed: float | None = None, start: str | None = None) -> int:
    """The screen on the recording at ``path``."""
    from dsprobe.tui.app import run as screen

    with open_file(path) as session:
        code = screen(session, save=None, start="start", speed=speed, at=start)
        for problem in session.problems:
            print(f"dsprobe: {path}: {problem}", file=sys.stderr)
        return PARTIAL if code == OK and session.problems else code
