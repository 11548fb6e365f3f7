"""``dsprobe demo``: a bundled recording, for a look without root or load."""

from __future__ import annotations

import argparse
from importlib.resources import as_file, files

from dsprobe.agent.commands.replay import show


def run(args: argparse.Namespace) -> int:
    with as_file(files("dsprobe.recordings") / "demo.mcap") as path:
        return show(str(path))
