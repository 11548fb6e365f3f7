"""``dsprobe top``: the live screen."""

from __future__ import annotations

import argparse
import sys
import time

from dsprobe.agent.commands import agents
from dsprobe.agent.commands.errors import OK, Failure
from dsprobe.recordings.live import LiveSession

LINGER_NS = 30 * 60 * 10**9
ONCE_SECONDS = 3.0


def run(args: argparse.Namespace) -> int:
    if not args.once and not sys.stdout.isatty():
        raise Failure("dsprobe top needs a terminal", "use dsprobe top --once in a pipe")
    linger = LINGER_NS if not args.once else 2 * 10**9
    connection, started = agents.find_or_start(
        args.socket, "top", args.probes, linger, pids=args.pids, native_stacks=args.native_stacks
    )
    live = LiveSession(connection)
    try:
        code = _once(live, args.width) if args.once else _screen(live)
        # An agent that a dsprobe top started ends with its last screen; a daemon stays.  A screen
        # that was killed never gets here: then the agent lingers, and the next one finds it.  A
        # look (--once) ends nobody's agent but its own.
        if started if args.once else code == OK:
            live.stop_agent()
        return code
    finally:
        live.close()


def _screen(live: LiveSession) -> int:
    from dsprobe.agent.commands.save import save
    from dsprobe.tui.app import run as show

    return show(live, save=lambda path: save(live.name, None, path), start="live")


def _once(live: LiveSession, width: int) -> int:
    """A few seconds of what the agent sees from when it can."""
    from dsprobe.tui.text import once

    agents.wait_until_ready(live)
    deadline = time.monotonic() + ONCE_SECONDS
    while time.monotonic() < deadline and live.live:
        live.wait(max(0.0, deadline - time.monotonic()))
        first, last = live.span()
        if live.caught_up and last - first > ONCE_SECONDS * 1e9 * 4:
            break  # it had run before us: history is enough
    print(once(live, width))
    return OK
