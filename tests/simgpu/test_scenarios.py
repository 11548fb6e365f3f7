"""Scenarios and scripts/simgpu."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest

from tests.simgpu.run import IN_C, IN_PYTHON
from tests.simgpu.scenario import FOLDER, BadScenario, load, parse, size

SIMGPU = Path(__file__).parents[2] / "scripts" / "simgpu"


def simgpu(*words: object, code: int = 0) -> tuple[Any, str]:
    """What scripts/simgpu prints (JSON), and says."""
    done = subprocess.run(
        [SIMGPU, *map(str, words)], capture_output=True, text=True, timeout=60, cwd="/"
    )
    assert done.returncode == code, done.stderr
    assert "Traceback" not in done.stderr
    return json.loads(done.stdout or "null"), done.stderr


@pytest.mark.parametrize("path", sorted(FOLDER.glob("*.toml")), ids=lambda p: p.stem)
def test_every_scenario_is_understood(path: Path) -> None:
    scenario = load(path)
    assert scenario.title
    assert scenario.workload in ("", *IN_C, *IN_PYTHON)


def test_a_scenario_becomes_the_librarys_settings() -> None:
    told = {
        "gpu": {"memory": "2GiB", "kernel_us": 1.5, "h2d_gb_per_s": 12, "name": "A"},
        "kernels": {"k": {"us": 3, "us_per_block": 0.25}},
        "failures": {"cuMemAlloc_v2": {"call": 3, "result": 2}},
        "library": {"nested": True, "flavour": "endbr"},
        "workload": {"run": "storm", "count": 5},
    }
    scenario = parse(told)
    assert scenario.config.splitlines() == [
        "memory=2147483648", "kernel_ns=1500", "h2d_bytes_per_s=12000000000", "name=A",
        "kernel.k=3000:250", "fail.cuMemAlloc_v2=3:1:2", "nested=1",
    ]  # fmt: skip
    assert (scenario.flavour, scenario.workload) == ("endbr", "storm")
    assert scenario.options == {"count": "5"}


@pytest.mark.parametrize(
    ("told", "sentence"),
    [
        ({"gpus": {}}, "gpus is not one of"),
        ({"gpu": 3}, "gpu is not one of"),
        ({"gpu": {"colour": 1}}, "has no colour"),
        ({"gpu": {"kernel_us": -1}}, "no number from 0 on"),
        ({"gpu": {"memory": "much"}}, "is no size"),
        ({"gpu": {"name": "a\nmemory=1"}}, "has no name"),
        ({"kernels": {"k": {"ms": 1}}}, "wants us"),
        ({"failures": {"cuNothing": {"call": 1, "result": 2}}}, "no entry point"),
        ({"failures": {"cuInit": {"result": 2}}}, "wants call and result"),
        ({"library": {"flavour": "odd"}}, "flavour is one of"),
    ],
)
def test_what_a_scenario_may_not_say(told: dict[str, Any], sentence: str) -> None:
    with pytest.raises(BadScenario, match=sentence):
        parse(told)


@pytest.mark.parametrize(("text", "octets"), [("5", 5), ("2 KiB", 2048), ("80GiB", 80 << 30)])
def test_sizes(text: str, octets: int) -> None:
    assert size(text) == octets


def test_a_scenarios_own_workload_is_run(tmp_path: Path) -> None:
    said, _ = simgpu("--set", "count=1009", "launches")
    assert said["simulated"] is True
    assert said["exit"] == 0
    assert said["calls"]["cuLaunchKernel"] == 1009
    said, _ = simgpu("--truth", tmp_path, FOLDER / "storm.toml")
    (process,) = said["processes"]
    assert process["live"]["physical"]["blocks"] == 4
    assert list(tmp_path.glob("*.truth"))


PROGRAM = """
import ctypes, os, sys
lib = ctypes.CDLL("libcuda.so.1") if sys.argv[1] == "asks" else ctypes.CDLL(None)
print(lib.cuInit(0), file=sys.stderr)
out = ctypes.c_int()
lib.cuDeviceGetCount(ctypes.byref(out))
os._exit(10 + out.value)
"""


@pytest.mark.parametrize(("words", "asks"), [((), "asks"), (("--preload",), "does not ask")])
def test_a_command_is_run_and_its_exit_code_passed_on(words: tuple[str, ...], asks: str) -> None:
    command = ("--", "python3", "-c", PROGRAM, asks)
    said, _ = simgpu(*words, "--events", "failures", *command, code=11)
    assert said["exit"] == 11
    log = [e for p in said["processes"] for e in p["log"]]
    assert [e["symbol"] for e in log] == ["cuInit", "cuDeviceGetCount"]
    assert all(e["begun"] <= e["ended"] for e in log)


def test_a_command_that_a_signal_ends(tmp_path: Path) -> None:
    said, _ = simgpu("failures", "--", "sh", "-c", "kill -TERM $$", code=143)
    assert said["exit"] == 143
    assert said["processes"] == []


@pytest.mark.parametrize(
    ("words", "code", "sentence"),
    [
        (("nowhere.toml",), 2, "No such file"),
        (("failures",), 2, "has no [workload]"),
        (("failures", "--", "/no/such/program"), 1, "No such file"),
        ((__file__,), 2, "simgpu: "),
        (("--set", "run=1", "launches"), 2, "no such option"),
    ],
)
def test_mistakes_are_said_in_a_sentence(words: tuple[str, ...], code: int, sentence: str) -> None:
    assert sentence in simgpu(*words, code=code)[1]


def test_it_is_not_part_of_the_product() -> None:
    root = SIMGPU.parents[1]
    named = subprocess.run(
        ["git", "grep", "-il", "simgpu", "--", "agent", "probes", "recordings", "tui"],
        cwd=root, capture_output=True, text=True, env=os.environ | {"GIT_OPTIONAL_LOCKS": "0"},
    )  # fmt: skip
    assert named.returncode == 1, named.stdout + named.stderr
