"""``dsprobe cut``: a part of a recording."""

from __future__ import annotations

import argparse
import sys

from dsprobe.agent.commands.damage import report
from dsprobe.agent.commands.moment import interval
from dsprobe.recordings.cut import cut, is_event
from dsprobe.recordings.filesession import open_file
from dsprobe.tui.units import count


def run(args: argparse.Namespace) -> int:
    with open_file(args.file) as source:
        start, end = interval(source, args.start, args.end)
        written = cut(source, args.output, start, end, args.streams, args.force)
        rows = sum(n for name, n in written.items() if is_event(name))
        print(f"{args.output}: {count(rows, 'row')}", file=sys.stderr)
        return report(args.file, source.problems)
