"""``dsprobe man``: the manual page, and the README's table of verbs, from the table of verbs."""

from __future__ import annotations

import argparse

from dsprobe.agent.commands.table import EXIT_CODES, SUMMARY, VERBS, Option
from dsprobe.recordings.wire import SOCKET


def _roff(text: str) -> str:
    """``text`` with what roff would take for its own (man(7)) made literal."""
    text = text.replace("\\", "\\e").replace("-", "\\-")
    return f"\\&{text}" if text[:1] in (".", "'") else text


def _item(option: Option) -> list[str]:
    names = [option.metavar] if option.positional else list(option.flags)
    head = ", ".join(f"\\fB{_roff(n)}\\fR" for n in names)
    if option.metavar and not option.positional:
        head += f" \\fI{_roff(option.metavar)}\\fR"
    return [".TP", head, _roff(option.help)]


def page() -> str:
    """The manual page, for ``man -l``."""
    out = [
        ".TH DSPROBE 1",
        ".ad l",  # usage lines are to be copied, so no spaces are put into them
        ".SH NAME",
        f"dsprobe \\- {_roff(SUMMARY[0].lower() + SUMMARY[1:].rstrip('.'))}",
        ".SH SYNOPSIS",
        ".B dsprobe",
        "\\fIVERB\\fR [\\fIoptions\\fR]",
        ".SH VERBS",
    ]
    for v in VERBS:
        out += [".SS", _roff(v.usage), _roff(f"{v.help[0].upper()}{v.help[1:]}."), _roff(v.text)]
        for o in v.options:
            out += _item(o)
    out += [".SH EXIT STATUS"]
    for code, meaning in EXIT_CODES:
        out += [".TP", f"\\fB{code}\\fR", _roff(meaning)]
    out += [
        ".SH FILES",
        ".TP",
        f"\\fI{_roff(SOCKET)}\\fR",
        "Where the agent listens: for root, and for the group dsprobe where there is one.",
        ".TP",
        "\\fI/var/cache/dsprobe\\fR",
        "BPF programs as compiled; removing it costs a second at the next start.",
        ".SH ENVIRONMENT",
        ".TP",
        "\\fBDSPROBE_CACHE\\fR",
        "Another folder for those; empty, none are kept.",
        ".TP",
        "\\fBDSPROBE_DEBUG\\fR",
        "When set, an unexpected error shows its traceback.",
        ".TP",
        "\\fBNO_COLOR\\fR",
        "When set, the screen has no colour.",
    ]
    return "\n".join(out) + "\n"


def markdown() -> str:
    """The table of verbs as the README shows it."""
    rows = ["| verb | does | root |", "| --- | --- | --- |"]
    for v in VERBS:
        usage = v.usage.removeprefix("dsprobe ").replace("|", "\\|")
        rows.append(f"| `{usage}` | {v.help} | {'yes' if v.root else ''} |")
    return "\n".join(rows) + "\n"


def run(args: argparse.Namespace) -> int:
    print(page() if args.format == "roff" else markdown(), end="")
    return 0
