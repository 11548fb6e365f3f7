"""``dsprobe merge``: recordings of one boot of one host as one."""

from __future__ import annotations

import argparse
import sys

from dsprobe.agent.commands.errors import OK, PARTIAL
from dsprobe.recordings.merge import merge
from dsprobe.tui.units import count


def run(args: argparse.Namespace) -> int:
    rows, problems = merge(args.files, args.output, args.force)
    print(
        f"{args.output}: {count(rows, 'row')} of {count(len(args.files), 'recording')}",
        file=sys.stderr,
    )
    for problem in problems:
        print(f"dsprobe: {problem}", file=sys.stderr)
    return PARTIAL if problems else OK
