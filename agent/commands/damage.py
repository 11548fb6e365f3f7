"""How the verbs that read files say that a file is damaged."""

from __future__ import annotations

import sys
from collections.abc import Iterable

from dsprobe.agent.commands.errors import OK, PARTIAL


def report(path: str, problems: Iterable[str]) -> int:
    """Print each problem on standard error; the exit code that goes with them."""
    said = list(problems)
    sys.stdout.flush()
    for problem in said:
        print(f"dsprobe: {path}: {problem}", file=sys.stderr)
    return PARTIAL if said else OK
