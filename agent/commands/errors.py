"""What a verb raises to end with one sentence and an exit code, and what those codes are."""

from __future__ import annotations

import os

OK = 0
ERROR = 1
USAGE = 2
PARTIAL = 3
"""The data was truncated or incomplete; all that could be read was."""
VERSION = 4
"""Written by an incompatible version."""
PRIVILEGE = 5
"""A privilege or driver is missing."""
GATE = 6
"""A gate or finding threshold was hit."""
SIGNAL = 128
"""Ended by signal n: 128 + n."""


class Failure(Exception):
    """Ends the command with ``message`` (what is wrong), ``fix`` (what to do) and ``exit_code``.

    Both are read as one sentence, so ``message`` has no full stop.
    """

    def __init__(self, message: str, fix: str = "", exit_code: int = ERROR) -> None:
        super().__init__(f"{message}: {fix}" if fix else message)
        self.exit_code = exit_code


WITHOUT_ROOT = "replay, demo, info, dump, cut and merge work without"


def need_root(what: str) -> None:
    """Raise :class:`Failure` with exit code 5 unless this process is root.

    ``what`` is the verb as typed.  Being root does not promise that BPF works (a container may
    lack the capabilities): the probes say that in their coverage.
    """
    if os.geteuid() != 0:
        raise Failure(
            f"{what} needs root to load BPF programs",
            f"run it with sudo ({WITHOUT_ROOT})",
            PRIVILEGE,
        )
