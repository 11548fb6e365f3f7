"""Options of a workload, ``key=value`` on its command line, and the gate before its work."""

from __future__ import annotations

import sys


def options(**defaults: str | int | float) -> dict[str, str]:
    """Options given, over ``defaults``; one that is not among them ends the program."""
    found = {k: str(v) for k, v in defaults.items()} | {"gate": "0"}
    for word in sys.argv[1:]:
        key, _, value = word.partition("=")
        if key not in found:
            sys.exit(f"no such option: {key}; there are {', '.join(found)}")
        found[key] = value
    return found


def gate(found: dict[str, str], word: str) -> None:
    """With ``gate=1``: say ``word`` on stdout and go on when a line comes on stdin, or its end."""
    if found["gate"] == "1":
        print(word, flush=True)
        sys.stdin.readline()
