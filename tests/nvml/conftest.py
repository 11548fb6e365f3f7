"""A simulated NVML for each test, and the probe on it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.nvml.bench import Bench
from tests.simgpu.nvml import State, libnvidia_ml

HERE = Path(__file__).parent


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if HERE in item.path.parents:
            item.add_marker(pytest.mark.tools("gcc"))


@pytest.fixture
def state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> State:
    """One GPU, until the test says otherwise."""
    path = tmp_path / "nvml.state"
    monkeypatch.setenv("SIMNVML_STATE", str(path))
    return State(path)


@pytest.fixture
def library(state: State) -> str:
    return str(libnvidia_ml())


@pytest.fixture
def bench(state: State, library: str) -> Iterator[Bench]:
    """The probe, not yet started; a process of its own is tried again at once."""
    made = Bench(state, library)
    yield made
    made.probe.close()
