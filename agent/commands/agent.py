"""``dsprobe agent``: the daemon."""

from __future__ import annotations

import argparse
import signal
import sys

from dsprobe.agent.agent import Agent, Settings
from dsprobe.agent.commands.agents import check_pids
from dsprobe.agent.commands.errors import USAGE, Failure, need_root
from dsprobe.probes.cuda import Cuda
from dsprobe.probes.native.symbolizer import Symbolizer
from dsprobe.probes.registry import select
from dsprobe.probes.stacks import Stacks
from dsprobe.recordings import wire


def run(args: argparse.Namespace) -> int:
    need_root("agent")
    try:
        probes = select(args.probes)
    except ValueError as e:
        raise Failure(str(e), exit_code=USAGE) from None
    check_pids(args.pids)
    for probe in probes:
        if args.native_stacks and isinstance(probe, Cuda):
            probe.stacks = Stacks(Symbolizer(), unwind=True)
    settings = Settings(
        args.socket or wire.SOCKET, args.linger, args.history, args.history_bytes, args.pids
    )
    agent = Agent(probes, settings)
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, lambda *_: agent.stop())
    print(f"dsprobe agent listens at {settings.socket}", file=sys.stderr)
    agent.run()
    return 0
