"""``dsprobe save``: what the running agent remembers, into a file."""

from __future__ import annotations

import argparse
import sys

from dsprobe.agent.commands.capture import Capture
from dsprobe.agent.commands.errors import PARTIAL, Failure
from dsprobe.recordings import wire
from dsprobe.recordings.connection import Connection
from dsprobe.recordings.writer import Writer
from dsprobe.tui.units import count

ALL = "that is all"
"""How a connection ends that has brought what was asked for."""


def run(args: argparse.Namespace) -> int:
    print(save(args.socket or wire.SOCKET, args.last, args.output, args.force), file=sys.stderr)
    return 0


def save(path: str, last: int | None, output: str, force: bool = False) -> str:
    """Write the last ``last`` ns (None: all) of the agent at ``path``; a sentence that says what.

    Raises :class:`~dsprobe.recordings.errors.RecordingError` or :class:`Failure`.
    """
    connection = Connection(path, history=last, follow=False)
    try:
        with Writer(output, force=force) as writer:
            capture = Capture(connection, writer)
            while not (connection.ended or capture.silence):
                capture.step(1.0)
            why = "" if connection.ended == ALL else connection.ended or capture.silence
            writer.close(why)
    finally:
        connection.close()
    if why:
        raise Failure(f"{output} is incomplete: {why}", exit_code=PARTIAL)
    lost = sum(capture.lost.values())
    held = (capture.last - capture.first) / 1e9
    text = f"{output}: {held:.1f} s, {count(capture.events, 'row')}, {writer.size / 1e6:.2f} MB"
    if last is not None and held < last / 1e9 - 2:
        text += f" (the agent holds no more than that; {last / 1e9:.0f} s were asked for)"
    if lost:
        text += f"; {count(lost, 'row')} went from the agent's memory before they were written"
    return text
