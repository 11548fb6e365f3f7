"""``dsprobe doctor``: what works here, what does not, why, and the fix."""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict

from dsprobe.agent import check, checks
from dsprobe.agent.commands.errors import ERROR, OK, PRIVILEGE

_MARKS = {check.OK: "ok     ", check.LIMITED: "limited", check.FAILED: "FAILED "}


def run(args: argparse.Namespace) -> int:
    done = list(checks.all_checks(args.verbose))
    if args.json:
        print(json.dumps([asdict(c) for c in done], indent=1))
    else:
        shown = [c for c in done if args.verbose or c.status != check.OK]
        width = max((len(c.name) for c in shown), default=0)
        for c in shown:
            print(f"{_MARKS[c.status]}  {c.name:<{width}}  {c.detail}")
            if c.fix:
                print(f"{'':<{width + 11}}fix: {c.fix}")
        good = sum(c.status == check.OK for c in done)
        rest = "" if args.verbose or good < len(done) else "; --verbose lists them"
        print(f"{good} of {len(done)} checks are ok{rest}")
        print("Nothing here looked at a GPU: only what processes ask of its driver is traced.")
    bad = [c for c in done if c.status == check.FAILED]
    if any(c.privilege for c in bad):
        return PRIVILEGE
    return ERROR if bad else OK
