"""The command as a process and as a function: parsing, exit codes, one sentence per error."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from types import SimpleNamespace

import pytest

from dsprobe.agent.commands import errors, main
from dsprobe.agent.commands.table import VERBS

COMMAND = [sys.executable, "-m", "dsprobe.agent.commands.main"]


def dsprobe(*args: str, **options: object) -> subprocess.CompletedProcess[str]:
    return subprocess.run([*COMMAND, *args], capture_output=True, text=True, **options)  # type: ignore[call-overload, no-any-return]


@pytest.fixture
def verb(monkeypatch: pytest.MonkeyPatch):
    """Replaces the module of ``info`` by one that runs the function given."""

    def replace(run) -> None:
        name = "dsprobe.agent.commands.info"
        monkeypatch.setitem(sys.modules, name, SimpleNamespace(run=run))

    return replace


def test_every_verb_listed_exists() -> None:
    for v in VERBS:
        assert importlib.util.find_spec(f"dsprobe.agent.commands.{v.name}"), v.name
    assert len({v.name for v in VERBS}) == len(VERBS)


def test_help_and_version_load_nothing_heavy() -> None:
    heavy = {"numpy", "textual", "bcc", "mcap", "msgpack", "zstandard", "asyncio", "dsprobe.tui"}
    code = (
        "import sys\nfrom dsprobe.agent.commands.main import main\n"
        "try: main(sys.argv[1:])\nexcept SystemExit: pass\n"
        "print(*sys.modules, sep='\\n', file=sys.stderr)"
    )
    for option in ("--help", "--version"):
        done = subprocess.run([sys.executable, "-c", code, option], capture_output=True, text=True)
        assert done.stdout
        assert "argparse" in done.stderr.split()
        assert not heavy & set(done.stderr.split())


@pytest.mark.parametrize("unbuffered", ["", "1"])
@pytest.mark.parametrize("words", [["--help"], ["--version"], ["man"], ["record", "--help"]])
def test_output_that_takes_nothing_is_one_sentence(unbuffered: str, words: list[str]) -> None:
    with open("/dev/full", "w") as full:
        done = subprocess.run(
            [*COMMAND, *words], stdout=full, stderr=subprocess.PIPE, text=True,
            env=os.environ | {"PYTHONUNBUFFERED": unbuffered},
        )  # fmt: skip
    assert done.returncode == 1
    assert done.stderr == "dsprobe: standard output: No space left on device\n"


def test_without_any_output_at_all() -> None:
    done = subprocess.run(
        ["sh", "-c", '"$@" >&-', "-", *COMMAND, "man"], stderr=subprocess.PIPE, text=True
    )
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.parametrize("name", ["-", ""])
@pytest.mark.parametrize(
    "words", [["record"], ["save", "--last", "1s"], ["cut", "a.mcap"], ["merge", "a.mcap"]]
)
def test_output_is_a_file_and_no_pipe(words: list[str], name: str) -> None:
    done = dsprobe(*words, "-o", name)
    assert done.returncode == 2
    assert f"{name!r} is not supported: name a file" in done.stderr


def test_help_names_every_verb_and_exit_code() -> None:
    done = dsprobe("--help")
    assert done.returncode == 0
    for v in VERBS:
        assert f"  {v.name} " in done.stdout
        assert v.help in done.stdout


@pytest.mark.parametrize("name", [v.name for v in VERBS])
def test_verb_help_names_every_option(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        main.main([name, "--help"])
    assert end.value.code == 0
    text = capsys.readouterr().out
    for o in next(v for v in VERBS if v.name == name).options:
        assert all(flag in text for flag in o.flags)


@pytest.mark.parametrize(
    ("argv", "says"),
    [
        ([], "no verb given"),
        (["bogus"], "invalid choice"),
        (["--bogus"], "unrecognized arguments"),
        (["record"], "required: -o/--output"),
        (["record", "-o", "f", "--"], "no command after --"),
        (["save", "--last", "5x", "-o", "f"], "'5x' is not a duration"),
        (["info", "a", "b"], "unrecognized arguments: b"),
        (["merge", "-o", "f"], "required: FILE"),
        (["dump", "f", "--str", "x"], "required: --stream"),
    ],
)
def test_wrong_usage_is_one_line_and_exit_2(
    argv: list[str], says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as end:
        main.main(argv)
    assert end.value.code == errors.USAGE
    err = capsys.readouterr().err
    assert says in err
    assert "--help" in err
    assert err.count("\n") == 1


def test_values_reach_the_verb() -> None:
    _, args = main.parse(["record", "-o", "f", "--probes", "tcp,cpu", "--", "ls", "-o", "--", "x"])
    assert (args.output, args.probes) == ("f", ("tcp", "cpu"))
    assert args.command == ["ls", "-o", "--", "x"]
    assert main.parse(["record", "-o", "f"])[1].command == []
    _, args = main.parse(["cut", "in", "-o", "out", "--from", "-90s", "--to", "-30.5s"])
    assert (args.start, args.end, args.force) == ("-90s", "-30.5s", False)
    assert main.parse(["merge", "a", "b", "-o", "c"])[1].files == ["a", "b"]
    assert main.parse(["info", "--", "-odd-name"])[1].file == "-odd-name"
    assert main.parse(["save", "--last", "5m", "-o", "f"])[1].last == 300 * 10**9


class Readable(Exception):
    exit_code = 3


@pytest.mark.parametrize(
    ("error", "code", "says"),
    [
        (errors.Failure("no agent runs", "start one with dsprobe agent", 5), 5,
         "dsprobe: no agent runs: start one with dsprobe agent\n"),
        (Readable("f.mcap was cut off\nat byte 7"), 3, "dsprobe: f.mcap was cut off at byte 7\n"),
        (FileNotFoundError(2, "No such file or directory", "f"), 1,
         "dsprobe: f: No such file or directory\n"),
        (KeyboardInterrupt(), 130, ""),
    ],
)  # fmt: skip
def test_errors_become_sentences(
    error: BaseException,
    code: int,
    says: str,
    verb,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def run(args: object) -> int:
        raise error

    verb(run)
    assert main.main(["info", "f"]) == code
    assert capsys.readouterr() == ("", says)


def test_a_fault_is_one_sentence_and_a_traceback_on_request(
    verb, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    verb(lambda args: 1 // 0)
    monkeypatch.delenv("DSPROBE_DEBUG", raising=False)
    assert main.main(["info", "f"]) == errors.ERROR
    err = capsys.readouterr().err
    assert "unexpected ZeroDivisionError" in err
    assert "DSPROBE_DEBUG=1" in err
    assert err.count("\n") == 1
    monkeypatch.setenv("DSPROBE_DEBUG", "1")
    with pytest.raises(ZeroDivisionError):
        main.main(["info", "f"])


def test_a_reader_that_goes_away_is_no_error() -> None:
    done = subprocess.run(
        ["bash", "-c", '"$@" man --format roff | head -c 1; echo ${PIPESTATUS[0]}', "-", *COMMAND],
        capture_output=True,
        text=True,
    )
    assert done.stderr == ""
    closed = subprocess.run(["bash", "-c", '"$@" man | true', "-", *COMMAND], capture_output=True)
    assert closed.stderr == b""


@pytest.mark.parametrize(("uid", "raises"), [(0, False), (1000, True)])
def test_root_is_asked_for_in_one_sentence(
    uid: int, raises: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("os.geteuid", lambda: uid)
    if not raises:
        errors.need_root("top")
        return
    with pytest.raises(errors.Failure, match=r"^top needs root .*replay, demo") as e:
        errors.need_root("top")
    assert e.value.exit_code == errors.PRIVILEGE
