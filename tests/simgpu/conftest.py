"""Targets with a simulated driver, each with a truth folder of its own."""

from __future__ import annotations

import json
import subprocess
import sys
import textwrap
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.simgpu.run import environment
from tests.simgpu.scenario import Scenario, parse
from tests.simgpu.target import Target

MakeTarget = Callable[..., Target]
Script = Callable[..., Any]

HERE = Path(__file__).parent


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if HERE in item.path.parents:
            item.add_marker(pytest.mark.tools("gcc"))


@pytest.fixture
def make_target(tmp_path: Path) -> Iterator[MakeTarget]:
    """Makes targets that share a truth folder; keywords are tables of a scenario."""
    made: list[Target] = []

    def make(**tables: Any) -> Target:
        made.append(Target(tmp_path, parse(tables)))
        return made[-1]

    yield make
    for t in made:
        t.close()


@pytest.fixture
def target(make_target: MakeTarget) -> Target:
    """One that has the primary context of device 0 in its main thread."""
    made = make_target(gpu={"memory": "8GiB"})
    made.start()
    return made


@pytest.fixture
def script(tmp_path: Path) -> Script:
    """Runs Python text in another process; what it printed as JSON.  Keywords as in make_target."""

    def run(text: str, **tables: Any) -> Any:
        scenario: Scenario = parse(tables)
        done = subprocess.run(
            [sys.executable, "-c", textwrap.dedent(text)], env=environment(tmp_path, scenario),
            capture_output=True, text=True, timeout=60,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr
        return json.loads(done.stdout or "null")

    return run
