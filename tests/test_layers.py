"""The layer rule bites: the linter finds each forbidden import wherever it is put."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]

MAY_IMPORT = {
    "recordings": {"recordings"},
    "probes": {"probes", "recordings"},
    "agent": {"agent", "recordings", "probes"},
    "agent/commands": {"agent", "agent.commands", "recordings", "probes", "tui"},
    "tui": {"tui", "recordings"},
}
"""The table of docs/ARCHITECTURE.md."""

PACKAGES = ("recordings", "probes", "agent", "agent.commands", "tui")


def violations(tree: Path) -> set[tuple[str, str]]:
    """(folder, rule) of what ruff finds against the import rules under ``tree``."""
    done = subprocess.run(
        [sys.executable, "-m", "ruff", "check", "--no-cache", "--select=TID",
         "--output-format=json", "."],
        cwd=tree, capture_output=True, text=True,
    )  # fmt: skip
    assert done.stderr == ""
    found = json.loads(done.stdout)
    return {(str(Path(f["filename"]).parent.relative_to(tree)), f["code"]) for f in found}


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    for name in ("pyproject.toml", *(f"{folder}/ruff.toml" for folder in MAY_IMPORT)):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, tmp_path / name)
    return tmp_path


@pytest.mark.parametrize(
    "form",
    [
        "import dsprobe.{}",
        "from dsprobe.{} import x",
        "from dsprobe.{}.deep import x",
        "def f():\n    import dsprobe.{}.deep",
        "import typing\nif typing.TYPE_CHECKING:\n    from dsprobe.{} import x",
    ],
)
def test_forbidden_imports_are_found_and_no_others(tree: Path, form: str) -> None:
    expected = set()
    for folder, allowed in MAY_IMPORT.items():
        for package in PACKAGES:
            spot = tree / folder / f"imports_{package.replace('.', '_')}"
            spot.mkdir()
            (spot / "x.py").write_text(form.format(package) + "\n")
            if package not in allowed:
                expected.add((str(spot.relative_to(tree)), "TID251"))
    assert violations(tree) == expected


def test_relative_imports_cannot_get_around_it(tree: Path) -> None:
    for folder in MAY_IMPORT:
        (tree / folder / "x.py").write_text("from ..tui import app\n")
    assert violations(tree) == {(folder, "TID252") for folder in MAY_IMPORT}
