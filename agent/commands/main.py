"""The ``dsprobe`` command: parse by the table, run the verb, turn errors into sentences."""

from __future__ import annotations

import argparse
import importlib
import os
import sys
from collections.abc import Sequence
from typing import Any, NoReturn, TextIO

from dsprobe.agent.commands import errors
from dsprobe.agent.commands.table import EXIT_CODES, SUMMARY, VERBS, Option, Verb


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        self.exit(errors.USAGE, f"{self.prog}: {message}; see {self.prog} --help\n")


class _Version(argparse.Action):
    """Looks the version up only when asked: importlib.metadata costs as much as all the rest."""

    def __call__(self, parser: argparse.ArgumentParser, *_: object) -> None:
        from importlib.metadata import version

        print(f"dsprobe {version('dsprobe')}")
        parser.exit()


def _add(parser: argparse.ArgumentParser, o: Option) -> None:
    help = o.help.replace("%", "%%")
    if o.switch:
        parser.add_argument(*o.flags, dest=o.dest, help=help, action="store_true")
    elif o.positional:
        parser.add_argument(
            o.dest, metavar=o.metavar, type=o.parse, help=help, choices=o.choices or None,
            nargs="+" if o.many else "?" if o.optional else None,
        )  # fmt: skip
    else:
        parser.add_argument(
            *o.flags, dest=o.dest, metavar=o.metavar, type=o.parse, help=help, default=o.default,
            required=o.required, choices=o.choices or None,
        )  # fmt: skip


def parser(only: str = "") -> argparse.ArgumentParser:
    """The parser of all verbs; with ``only`` the options of the others are left out, for speed."""
    width = max(len(v.name) for v in VERBS)
    verbs = "\n".join(f"  {v.name:<{width}}  {v.help}" for v in VERBS)
    codes = "\n".join(f"  {code:<{width}}  {meaning}" for code, meaning in EXIT_CODES)
    top = _Parser(
        prog="dsprobe",
        usage="dsprobe VERB [options]",
        description=f"{SUMMARY}\n\nverbs:\n{verbs}\n\nexit codes:\n{codes}",
        epilog="dsprobe VERB --help says more about a verb.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    top.add_argument("--version", nargs=0, action=_Version, help="print the version and exit")
    sub = top.add_subparsers(
        dest="verb", metavar="VERB", prog="dsprobe", help=argparse.SUPPRESS, parser_class=_Parser
    )
    for v in VERBS:
        p = sub.add_parser(
            v.name, usage=v.usage, description=f"{v.help[0].upper()}{v.help[1:]}. {v.text}",
            allow_abbrev=False,
        )  # fmt: skip
        for o in v.options if not only or v.name == only else ():
            _add(p, o)
    return top


def _glue(words: list[str], verb: Verb) -> list[str]:
    """``--to -30s`` as ``--to=-30s``: argparse takes a word that begins with - for an option."""
    valued = {flag for o in verb.options if o.metavar for flag in o.flags if flag.startswith("--")}
    out: list[str] = []
    for word in words:
        if out and out[-1] in valued and word[:1] == "-" and word[1:2].isdecimal():
            out[-1] += f"={word}"
        else:
            out.append(word)
    return out


def parse(argv: Sequence[str]) -> tuple[Verb, argparse.Namespace]:
    """The verb and its ``args``; exits like argparse on ``--help`` and wrong usage."""
    words = list(argv)
    name = next((w for w in words if not w.startswith("-")), "")
    verb = next((v for v in VERBS if v.name == name), None)
    command: list[str] | None = None
    if verb and verb.command and "--" in words:
        at = words.index("--")
        words, command = words[:at], words[at + 1 :]
    p = parser(only=name)
    args = p.parse_args(_glue(words, verb) if verb else words)
    if verb is None:
        p.error("no verb given")
    if command == []:
        p.error(f"{name}: no command after --")
    if verb.command:
        args.command = command or []
    return verb, args


_STDOUT = "standard output"


class _Stdout:
    """``to``, whose errors name it, as those of a file name the file."""

    def __init__(self, to: TextIO) -> None:
        self._to = to

    def write(self, text: str) -> int:
        try:
            return self._to.write(text)
        except OSError as e:
            raise self._named(e) from None

    def flush(self) -> None:
        try:
            self._to.flush()
        except OSError as e:
            raise self._named(e) from None

    @staticmethod
    def _named(error: OSError) -> OSError:
        """BrokenPipeError stays one, as the number says so."""
        return OSError(error.errno, error.strerror, _STDOUT)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._to, name)


def _nowhere() -> TextIO:
    """For a process that was started with its output closed."""
    return open(os.devnull, "w")


def _quiet_stdout() -> None:
    """Nobody reads stdout any more: keep the interpreter from saying so when it exits."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _say(sentence: str) -> None:
    print(f"dsprobe: {' '.join(sentence.split())}", file=sys.stderr)


def _failed(error: Exception) -> int:
    """Say in one sentence what ``error`` means; returns the exit code.

    Any layer may raise an exception that has an ``exit_code``: its text is then meant for people.
    """
    code = getattr(error, "exit_code", None)
    if isinstance(code, int):
        _say(str(error))
        return code
    if isinstance(error, OSError) and error.filename is not None and error.strerror:
        if error.filename == _STDOUT:
            _quiet_stdout()
        _say(f"{os.fsdecode(error.filename)}: {error.strerror}")
        return errors.ERROR
    _say(
        f"unexpected {type(error).__name__}: {error} (this is a fault in dsprobe; run it again with"
        " DSPROBE_DEBUG=1 to see where)"
    )
    return errors.ERROR


def _run(argv: Sequence[str]) -> int:
    try:
        verb, args = parse(argv)
        module = importlib.import_module(f"dsprobe.agent.commands.{verb.name}")
        return int(module.run(args))
    finally:
        sys.stdout.flush()


def main(argv: Sequence[str] | None = None) -> int:
    """Run ``dsprobe`` with ``argv`` (default: the process's own); returns the exit code."""
    stdout = sys.stdout
    sys.stdout = _Stdout(stdout or _nowhere())
    try:
        return _run(sys.argv[1:] if argv is None else argv)
    except KeyboardInterrupt:
        return errors.SIGNAL + 2
    except BrokenPipeError:
        _quiet_stdout()
        return errors.SIGNAL + 13
    except Exception as error:
        if os.environ.get("DSPROBE_DEBUG"):
            raise
        return _failed(error)
    finally:
        sys.stdout = stdout


if __name__ == "__main__":
    sys.exit(main())
