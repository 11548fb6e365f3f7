"""``dsprobe completion SHELL``: what a shell offers after Tab, from the table of verbs."""

from __future__ import annotations

import argparse

from dsprobe.agent.commands.table import VERBS, Option, Verb
from dsprobe.probes.registry import PROBES
from dsprobe.recordings.streams import STREAMS


def _words(option: Option) -> tuple[str, ...]:
    """What the value of ``option`` may be, where that is known beforehand."""
    if option.complete == "streams":
        return tuple(STREAMS)
    if option.complete == "probes":
        return tuple(probe.name for probe in PROBES)
    return option.choices


def _flags(verb: Verb) -> list[str]:
    return [f for o in verb.options if not o.positional for f in o.flags] + ["--help"]


def _positional(verb: Verb) -> Option | None:
    return next((o for o in verb.options if o.positional), None)


def bash() -> str:
    """Completion for bash (Programmable Completion in bash(1))."""
    cases = []
    for v in VERBS:
        values = []
        for o in v.options:
            if not o.positional and o.metavar:
                offer = f'-W "{" ".join(_words(o))}"' if _words(o) else ""
                offer = "-f" if o.complete == "file" else offer
                values.append(f"      {'|'.join(o.flags)}) offer={offer!r} ;;")
        p = _positional(v)
        rest = "-f" if p and p.complete == "file" else f'-W "{" ".join(_words(p))}"' if p else ""
        cases.append(
            "\n".join(
                [
                    f"  {v.name})",
                    '    case "$prev" in',
                    *values,
                    f"      *) offer={rest!r}; flags={' '.join(_flags(v))!r} ;;",
                    "    esac ;;",
                ]
            )
        )
    verbs = " ".join(v.name for v in VERBS)
    body = "\n".join(cases)
    return f"""\
_dsprobe() {{
  local cur=${{COMP_WORDS[COMP_CWORD]}} prev=${{COMP_WORDS[COMP_CWORD-1]}} offer= flags=
  COMPREPLY=()
  if [ "$COMP_CWORD" = 1 ]; then
    COMPREPLY=($(compgen -W "{verbs} --help --version" -- "$cur"))
    return
  fi
  case "${{COMP_WORDS[1]}}" in
{body}
  esac
  case "$cur" in -*) offer="-W \\"$flags\\"" ;; esac
  [ -z "$offer" ] || eval "COMPREPLY=(\\$(compgen $offer -- \\"\\$cur\\"))"
}}
complete -o filenames -F _dsprobe dsprobe
"""


def _quote(text: str) -> str:
    """``text`` as one word of any shell."""
    return "'" + text.replace("'", "'\\''") + "'"


def zsh() -> str:
    """Completion for zsh (_arguments in zshcompsys(1))."""
    cases = []
    for v in VERBS:
        specs = [_zsh_spec(o) for o in v.options] + [_quote("--help[show help]")]
        cases.append(f"    {v.name}) _arguments {' '.join(specs)} ;;")
    verbs = " ".join(_quote(f"{v.name}:{v.help}") for v in VERBS)
    body = "\n".join(cases)
    return f"""\
#compdef dsprobe
_dsprobe() {{
  local -a verbs=({verbs})
  if (( CURRENT == 2 )); then _describe verb verbs; return; fi
  local verb=$words[2]
  shift words; (( CURRENT-- ))
  case $verb in
{body}
  esac
}}
compdef _dsprobe dsprobe
"""


def _zsh_spec(o: Option) -> str:
    words = _words(o)
    action = "_files" if o.complete == "file" else f"({' '.join(words)})" if words else ""
    if o.positional:
        return _quote(f"{'*' if o.many else '1'}:{o.metavar}:{action}")
    help = o.help.replace("[", "\\[").replace("]", "\\]").replace(":", "\\:")
    value = f":{o.metavar}:{action}" if o.metavar else ""
    group = f"({' '.join(o.flags)})" if len(o.flags) > 1 else ""
    return " ".join(_quote(f"{group}{flag}[{help}]{value}") for flag in o.flags)


def fish() -> str:
    """Completion for fish (complete(1))."""
    out = ["complete -c dsprobe -f", "complete -c dsprobe -n __fish_use_subcommand -l version"]
    for v in VERBS:
        help = _quote(v.help)
        out.append(f"complete -c dsprobe -n __fish_use_subcommand -a {v.name} -d {help}")
        seen = f"complete -c dsprobe -n '__fish_seen_subcommand_from {v.name}'"
        for o in v.options:
            words = _words(o)
            offer = "-F" if o.complete == "file" else f"-x -a {_quote(' '.join(words))}"
            offer = offer if words or o.complete == "file" else "-x"
            if o.positional:
                out.append(f"{seen} {offer.replace('-x', '-f')}")
                continue
            names = " ".join(f"-l {f[2:]}" if f[:2] == "--" else f"-s {f[1:]}" for f in o.flags)
            out.append(f"{seen} {names} {offer if o.metavar else ''} -d {_quote(o.help)}")
    return "\n".join(out) + "\n"


def run(args: argparse.Namespace) -> int:
    print({"bash": bash, "zsh": zsh, "fish": fish}[args.shell](), end="")
    return 0
