"""What an installed dsprobe consists of: everything that the checkout's packages hold."""

from __future__ import annotations

import re
import subprocess
import sys
import zipfile
from importlib.metadata import version
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PACKAGES = ("agent", "probes", "recordings", "tui")


def tracked(*paths: str) -> list[str]:
    """Files of the working tree that git knows or would add."""
    listed = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard", "--", *paths],
        cwd=ROOT, capture_output=True, text=True, check=True,
    )  # fmt: skip
    return [name for name in listed.stdout.split("\0") if name and (ROOT / name).is_file()]


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> set[str]:
    """Names in a wheel built from a copy of the tree, since a build leaves files behind."""
    source = tmp_path_factory.mktemp("source")
    for name in tracked(*PACKAGES, "pyproject.toml", "README.md", "LICENSE", "LICENSES"):
        target = source / name
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_bytes((ROOT / name).read_bytes())
    subprocess.run(
        [sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", "--no-build-isolation",
         "-w", source, source],
        check=True, capture_output=True,
    )  # fmt: skip
    (built,) = source.glob("*.whl")
    return set(zipfile.ZipFile(built).namelist())


def test_the_wheel_holds_every_file_of_the_packages(wheel: set[str]) -> None:
    ours = {f"dsprobe/{n}" for n in tracked(*PACKAGES) if not n.endswith("ruff.toml")}
    assert len(ours) > 20
    assert ours - wheel == set()
    assert {n for n in wheel if n.startswith("dsprobe/")} - ours == set()


def test_the_wheel_holds_the_licences(wheel: set[str]) -> None:
    names = {Path(n).name for n in wheel}
    assert {"LICENSE", "GPL-2.0-only.txt", "Apache-2.0.txt"} <= names


def test_every_requirement_is_pinned_for_the_set_up() -> None:
    text = (ROOT / "pyproject.toml").read_text()
    wanted = set(re.findall(r'^    "([A-Za-z0-9_-]+)>=', text, re.M))
    pinned = set(re.findall(r"^([\w.-]+)==", (ROOT / "scripts/constraints.txt").read_text(), re.M))
    assert len(wanted) >= 10
    assert wanted <= pinned


def test_the_set_up_of_the_tests_installs_every_tool_they_ask_for() -> None:
    asked = set()
    for file in (ROOT / "tests").rglob("*.py"):
        for names in re.findall(r"(?:mark\.tools|no_tools)\(([^)]*)\)", file.read_text()):
            asked |= set(re.findall(r'"([\w.-]+)"', names))
    installed = set(re.findall(r"([\w.-]+):[\w.-]+", (ROOT / "scripts/test").read_text()))
    assert len(asked) > 5
    assert asked <= installed


def test_the_changelog_begins_with_this_version() -> None:
    newest = re.search(r"^## (\d+\.\d+\.\d+)", (ROOT / "CHANGELOG.md").read_text(), re.M)
    assert newest
    assert newest[1] == version("dsprobe")
