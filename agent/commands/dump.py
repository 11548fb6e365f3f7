"""``dsprobe dump``: the rows of one stream, a JSON object per line."""

from __future__ import annotations

import argparse
import json
import sys

from dsprobe.agent.commands.damage import report
from dsprobe.agent.commands.errors import USAGE, Failure
from dsprobe.agent.commands.moment import interval
from dsprobe.recordings.describe import dump_rows
from dsprobe.recordings.filesession import open_file


def run(args: argparse.Namespace) -> int:
    with open_file(args.file) as source:
        if args.stream not in source.streams:
            code = report(args.file, source.problems)
            held = ", ".join(sorted(source.streams)) or "none"
            raise Failure(
                f"{args.file} has no stream {args.stream}", f"it has {held}", code or USAGE
            )
        start, end = interval(source, args.start, args.end)
        for row in dump_rows(source, args.stream, start, end):
            sys.stdout.write(json.dumps(row, separators=(",", ":")) + "\n")
        return report(args.file, source.problems)
