"""``dsprobe info``: what a recording holds."""

from __future__ import annotations

import argparse
import json
from typing import Any

from dsprobe.agent.commands.damage import report
from dsprobe.recordings.describe import info
from dsprobe.recordings.filesession import open_file

MAX_PROCESSES = 40


def run(args: argparse.Namespace) -> int:
    with open_file(args.file) as source:
        if args.verify:
            source.verify()
        said = info(source) | {"verified": bool(args.verify)}
        print(json.dumps(said, indent=2) if args.json else "\n".join(_lines(said)))
        return report(args.file, source.problems)


def _lines(said: dict[str, Any]) -> list[str]:
    facts = said["facts"]
    lines = [
        f"file      {said['file']}",
        f"host      {said['host'] or '?'}, kernel {facts.get('kernel', '?')}, "
        f"{facts.get('cpus', '?')} CPUs",
        f"from      {said['start'] or '?'}",
        f"to        {said['end'] or '?'}  ({said['duration_s']:.1f} s)",
        f"written   by {said['written_by'] or '?'}, format {said['format'] or '?'}, "
        f"{_condition(said)}",
        "",
        f"{'stream':<18} {'rows':>12} {'bytes':>14} {'lost':>10}",
    ]
    for name, s in said["streams"].items():
        lines.append(f"{name:<18} {s['rows']:>12,} {s['bytes']:>14,} {s['lost']:>10,}")
    if said["processes"]:
        lines += ["", f"processes that used CUDA: {len(said['processes'])}"]
        lines += [_process(p) for p in said["processes"][:MAX_PROCESSES]]
    lines += ["", "coverage"]
    for probe, state in said["coverage"].items():
        lines.append(_state(f"  {probe:<16}", state))
        lines += [_state(f"    {name:<14}", s) for name, s in state.get("programs", {}).items()]
    return [_printable(line) for line in lines]


def _process(p: dict[str, Any]) -> str:
    more = [f"ended {p['ended']}" if p["ended"] else "", p["driver"] and f"driver {p['driver']}"]
    facts = ", ".join(text for text in more if text)
    return f"  {p['comm']}:{p['pid']}  {p['command'][:200]}" + (f"  ({facts})" if facts else "")


def _condition(said: dict[str, Any]) -> str:
    """``whole`` only where all of it was looked at."""
    if said["live"]:
        return "still being written"
    if said["truncated"]:
        return "cut off"
    if said["problems"]:
        return "with problems"
    return "whole" if said["verified"] else "not verified"


def _state(name: str, state: dict[str, str]) -> str:
    reason = f": {state['reason']}" if state["reason"] else ""
    return f"{name} {state['status']}{reason}"


def _printable(line: str) -> str:
    """A file may hold anything; a terminal gets no control characters from it."""
    return "".join(ch if ch.isprintable() else "?" for ch in line)
