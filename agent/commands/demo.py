"""``dsprobe demo``: a bundled recording, for a look without root or load."""

from __future__ import annotations

import argparse
import sys
from importlib.resources import as_file, files

from dsprobe.agent.commands.errors import Failure
from dsprobe.agent.commands.replay import show


def run(args: argparse.Namespace) -> int:
    if not sys.stdout.isatty():
        raise Failure("dsprobe demo needs a terminal", "run it without a pipe")
    with as_file(files("dsprobe.recordings") / "demo.mcap") as path:
        return show(str(path))
