"""Every verb and option of ``dsprobe``, once.

The parser, ``--help``, the completions, the man page and the README's table all come from here.  A
verb ``x`` is the module ``dsprobe.agent.commands.x`` with ``run(args) -> int``, imported only when
the verb runs, so that ``dsprobe --help`` stays quick.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from dsprobe.agent.commands import values


@dataclass(frozen=True)
class Option:
    """An option (``flags`` begin with ``-``) or a positional (one flag, upper case).

    ``dest`` is its attribute in ``args``.  Without ``metavar`` an option is a switch.  ``parse``
    turns the text into a value.  ``many`` takes one or more; a positional may be ``optional``.
    ``complete`` says what a shell offers: ``file``, ``streams`` or ``probes``.
    """

    flags: tuple[str, ...]
    dest: str
    help: str
    metavar: str = ""
    parse: Callable[[str], Any] = str
    default: Any = None
    required: bool = False
    many: bool = False
    optional: bool = False
    choices: tuple[str, ...] = ()
    complete: str = ""

    @property
    def positional(self) -> bool:
        return not self.flags[0].startswith("-")

    @property
    def switch(self) -> bool:
        return not self.positional and not self.metavar


@dataclass(frozen=True)
class Verb:
    """``help`` is one line; ``text`` says the rest.  ``command``: takes ``-- CMD ...`` as
    ``args.command`` (a list, empty when there is none).  ``root``: needs root."""

    name: str
    help: str
    text: str
    options: tuple[Option, ...] = ()
    command: bool = False
    root: bool = False

    @property
    def usage(self) -> str:
        """The line a person would type."""
        words = ["dsprobe", self.name]
        for o in self.options:
            word = o.metavar if o.positional else f"{o.flags[0]} {o.metavar}".strip()
            word = f"{word} [{word} ...]" if o.many else word
            needed = o.required or (o.positional and not o.optional)
            words.append(word if needed else f"[{word}]")
        return " ".join([*words, "[-- CMD ...]"] if self.command else words)


def _file(help: str, many: bool = False) -> Option:
    return Option(("FILE",), "files" if many else "file", help, "FILE", many=many, complete="file")


def _output(help: str) -> Option:
    return Option(("-o", "--output"), "output", help, "FILE", values.output, required=True,
                  complete="file")  # fmt: skip


_JSON = Option(("--json",), "json", "print JSON, for scripts")
_FORCE = Option(("--force",), "force", "overwrite FILE where it exists")
_SOCKET = Option(
    ("--socket",), "socket", "the agent's socket, where it is not the usual one", "PATH",
    complete="file",
)  # fmt: skip
_PROBES = Option(
    ("--probes",), "probes", "only these probes, such as softirq,tcp (default: all)", "LIST",
    values.names, complete="probes",
)  # fmt: skip
_PID = Option(
    ("--pid",), "pids", "of processes that use CUDA, only these and their children", "LIST",
    values.pids, (),
)  # fmt: skip
_NATIVE = Option(
    ("--native-stacks",), "native_stacks", "show all C and C++ callers in the stacks of processes"
    " that use CUDA, not only the first",
)  # fmt: skip
_STREAMS = Option(
    ("--streams",), "streams", "only these streams, such as softirq.cpu,tcp.retransmit", "LIST",
    values.names, complete="streams",
)  # fmt: skip
_MOMENT = "seconds from the start (90s), from the end (-30s), or a wall-clock time (14:03:20)"
_FROM = Option(("--from",), "start", f"begin here: {_MOMENT}", "WHEN")
_TO = Option(("--to",), "end", "end before this moment, written like --from", "WHEN")
_LAST = Option(
    ("--last",), "last", "how far back from now, such as 5m", "DURATION", values.duration,
    required=True,
)  # fmt: skip

VERBS: tuple[Verb, ...] = (
    Verb(
        "top",
        "show the live screen",
        "Uses the agent that runs, or starts one: it ends with the key q; where the connection"
        " drops it goes on for 30 minutes, and the next dsprobe top finds it.",
        (
            Option(("--once",), "once", "print one snapshot as plain text and end"),
            _SOCKET,
            _PROBES,
            _PID,
            _NATIVE,
            Option(("--width",), "width", "columns of the --once snapshot (default 100)", "N",
                   values.columns, 100),
        ),
        root=True,
    ),
    Verb(
        "record",
        "record into a file, without a screen",
        "Stops after --duration, when CMD ends, or on Ctrl-C; the file is whole in each case.",
        (
            _output("file to write (MCAP)"),
            Option(("--duration",), "duration", "stop after this long", "DURATION",
                   values.duration),
            _SOCKET,
            _PROBES,
            _PID,
            _NATIVE,
            _FORCE,
        ),
        command=True,
        root=True,
    ),
    Verb(
        "replay",
        "show a recording on the same screen",
        "Plays at any speed, in both directions; the keys are those of the live screen.",
        (
            _file("recording to show"),
            Option(("--speed",), "speed", "speed to start with, such as 2 or 1/4", "X",
                   values.speed),
            _FROM,
        ),
    ),
    Verb(
        "save",
        "keep what just happened",
        "Writes the last minutes that the running agent remembers; it goes on meanwhile.",
        (_LAST, _output("file to write (MCAP)"), _FORCE, _SOCKET),
    ),
    Verb(
        "info",
        "say what a recording holds",
        "Exits 3 where the file is damaged or was cut off, after saying what it holds.",
        (
            _file("recording to describe"),
            _JSON,
            Option(("--verify",), "verify", "unpack everything, to find all damage (without, the"
                   " index alone is read)"),
        ),
    ),
    Verb(
        "dump",
        "print the rows of one stream, a JSON object per line",
        "Names, addresses and enumerations are resolved; t is in ns of CLOCK_MONOTONIC.",
        (
            _file("recording to read"),
            Option(("--stream",), "stream", "stream to print, such as softirq.cpu", "NAME",
                   required=True, complete="streams"),
            _FROM,
            _TO,
        ),
    ),
    Verb(
        "report",
        "say which stacks leak GPU memory, where threads wait, and the gaps between launches",
        "Reads FILE, or what the running agent remembers.",
        (
            Option(("FILE",), "file", "recording to read", "FILE", optional=True, complete="file"),
            _JSON,
            Option(("--fail-on",), "fail_on", "exit 6 where one is found", "WHAT",
                   choices=("leak",)),
            Option(("--top",), "top", "most entries of each list (default 5)", "N",
                   values.count, 5),
            Option(("--warmup",), "warmup", "what a process sets up in its first time is no leak"
                   " (default 10s)", "DURATION", values.duration),
            Option(("--window",), "window", "shortest window; memory that leaks grows in each of 8"
                   " (default 10s)", "DURATION", values.duration),
            Option(("--min-growth",), "min_growth", "name nothing that grew by less (default 1M)",
                   "SIZE", values.size),
            _FROM,
            _TO,
            _SOCKET,
        ),
    ),
    Verb(
        "cut",
        "copy a part of a recording",
        "What the kept rows refer to is kept; what nothing refers to any more is not.",
        (_file("recording to read"), _output("file to write"), _FROM, _TO, _STREAMS, _FORCE),
    ),
    Verb(
        "merge",
        "join recordings of one boot of one host",
        "Rows end up on one clock, in order of time.",
        (_file("recordings to read", many=True), _output("file to write"), _FORCE),
    ),
    Verb(
        "agent",
        "run the agent that screens connect to",
        "Holds the probes, the socket and the last minutes in memory; ends on SIGTERM.",
        (
            _SOCKET,
            Option(("--linger",), "linger", "end this long after the last viewer has left"
                   " (default: stay)", "DURATION", values.duration),
            Option(("--history",), "history", "how much time to remember (default 10m)",
                   "DURATION", values.duration, 600 * 10**9),
            Option(("--history-bytes",), "history_bytes", "how much memory that may take"
                   " (default 256M)", "SIZE", values.size, 256 << 20),
            _PROBES,
            _PID,
            _NATIVE,
        ),
        root=True,
    ),
    Verb(
        "doctor",
        "say what works on this machine, what does not, why, and the fix",
        "Exits 5 where a privilege is missing.",
        (_JSON, Option(("--verbose",), "verbose", "show every check, not only those that fail")),
    ),
    Verb(
        "demo",
        "show a bundled recording; needs neither root nor load",
        "The recording was made on a real machine.",
    ),
    Verb(
        "completion",
        "print completion for a shell",
        'For bash: eval "$(dsprobe completion bash)".',
        (Option(("SHELL",), "shell", "bash, zsh or fish", "SHELL",
                choices=("bash", "zsh", "fish")),),
    ),
    Verb(
        "man",
        "print the manual page",
        "To read it: dsprobe man | man -l -.",
        (Option(("--format",), "format", "roff (the page) or markdown (the table of verbs)",
                "FORMAT", default="roff", choices=("roff", "markdown")),),
    ),
)  # fmt: skip

SUMMARY = "One clock for softirqs, TCP retransmits and CUDA calls on hosts that serve LLMs."

EXIT_CODES: tuple[tuple[str, str], ...] = (
    ("0", "all went well"),
    ("1", "an error"),
    ("2", "wrong usage"),
    ("3", "the data is truncated or partial; what could be read was"),
    ("4", "written by an incompatible version"),
    ("5", "a privilege or driver is missing"),
    ("6", "a gate or finding threshold was hit"),
    ("128+n", "ended by signal n"),
)
