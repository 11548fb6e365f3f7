"""What is generated from the table: completions in the real shells, the man page, the README."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest

from dsprobe.agent.commands import completion, man
from dsprobe.agent.commands.table import VERBS
from dsprobe.recordings.streams import STREAMS

ROOT = Path(__file__).parents[2]


def bash_offers(tmp_path: Path, *words: str) -> set[str]:
    """What bash offers for the last of ``words``."""
    (tmp_path / "c.bash").write_text(completion.bash())
    (tmp_path / "a file").touch()
    code = (
        "source c.bash; COMP_WORDS=(\"$@\"); COMP_CWORD=$(($# - 1)); IFS=$' \\t\\n'; _dsprobe;"
        ' printf "%s\\n" "${COMPREPLY[@]}"'
    )
    done = subprocess.run(
        ["bash", "--norc", "-c", code, "-", "dsprobe", *words],
        cwd=tmp_path, capture_output=True, text=True, check=True,
    )  # fmt: skip
    assert done.stderr == ""
    return set(done.stdout.split("\n")) - {""}


def test_bash(tmp_path: Path) -> None:
    assert {v.name for v in VERBS} <= bash_offers(tmp_path, "")
    assert bash_offers(tmp_path, "rep") == {"replay", "report"}
    assert bash_offers(tmp_path, "record", "--d") == {"--duration"}
    assert bash_offers(tmp_path, "dump", "f", "--stream", "") == set(STREAMS)
    assert {"softirq", "tcp"} <= bash_offers(tmp_path, "top", "--probes", "")
    assert bash_offers(tmp_path, "completion", "") == {"bash", "zsh", "fish"}
    assert "c.bash" in bash_offers(tmp_path, "info", "c")
    assert bash_offers(tmp_path, "save", "--last", "") == set()


def zsh_offers(file: Path, line: str, last: str) -> str:
    """What zsh lists for ``line``, up to the text ``last``.

    zsh completes only in a terminal: its own module zpty gives it one.
    """
    script = """
    zmodload zsh/zpty
    zpty z TERM=dumb COLUMNS=200 zsh -f -i
    zpty -w z "PROMPT='>>'; autoload -U compinit; compinit -u -D; source $1; LISTMAX=999; echo o''k"
    zpty -r z out '*ok*>>'
    zpty -n -w z "$2"$'\\t\\t'
    zpty -r z out "*$3*"
    print -r -- "$out"
    zpty -d z
    """
    done = subprocess.run(
        ["zsh", "-f", "-c", script, "-", file, line, last],
        capture_output=True, text=True, timeout=60,
    )  # fmt: skip
    return done.stdout


@pytest.mark.tools("zsh")
def test_zsh(tmp_path: Path) -> None:
    file = tmp_path / "c.zsh"
    file.write_text(completion.zsh())
    record = next(v for v in VERBS if v.name == "record")
    last = max(record.options, key=lambda o: o.flags[-1])  # listed last: zsh sorts them
    out = zsh_offers(file, "dsprobe record --", last.help[:20])
    for o in record.options:
        assert f"{o.flags[-1]} " in out
    assert "cut" in zsh_offers(file, "dsprobe ", "keep what just happened")


@pytest.mark.tools("fish")
def test_fish(tmp_path: Path) -> None:
    file = tmp_path / "c.fish"
    file.write_text(completion.fish())

    def offers(line: str) -> set[str]:
        done = subprocess.run(
            ["fish", "--no-config", "-c", f"source {file}; complete -C {line!r}"],
            env={"HOME": str(tmp_path), "PATH": "/usr/bin:/bin"},
            capture_output=True, text=True, check=True,
        )  # fmt: skip
        assert done.stderr == ""
        return {row.split("\t")[0] for row in done.stdout.splitlines()}

    assert offers("dsprobe ") >= {v.name for v in VERBS}
    assert offers("dsprobe save --l") == {"--last"}
    assert offers("dsprobe dump f --stream ") == set(STREAMS)


@pytest.mark.tools("groff")
def test_the_man_page_has_every_option_and_no_roff_mistake() -> None:
    done = subprocess.run(
        ["groff", "-man", "-ww", "-Tascii", "-P-cbou"],
        input=man.page(), capture_output=True, text=True, check=True,
    )  # fmt: skip
    assert done.stderr == ""
    for v in VERBS:
        assert f"dsprobe {v.name}" in done.stdout
        for o in v.options:
            assert all(flag in done.stdout for flag in o.flags)


def test_the_readme_has_the_table_of_verbs() -> None:
    readme = (ROOT / "README.md").read_text()
    table = re.search(r"<!-- dsprobe man --format markdown -->\n(.*?)\n<!-- end -->", readme, re.S)
    assert table, "the README has no table of verbs between its marks"
    assert table[1].strip() == man.markdown().strip()
