"""A thousand mutated recordings: never a traceback, never over 200 MB, never long."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.recordings.sample import write_host

LIMIT_KB = 200_000
CASES = 1000
SHARDS = 2


@pytest.fixture(scope="module")
def originals(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    folder = tmp_path_factory.mktemp("originals")
    write_host(folder / "whole.mcap", 5)
    write_host(folder / "cut.mcap", 5, end=False)
    return [folder / "whole.mcap", folder / "cut.mcap"]


@pytest.mark.parametrize("shard", range(SHARDS))
def test_mutated_files(originals: list[Path], tmp_path: Path, shard: int) -> None:
    """All of ``info``, ``dump`` and ``cut`` on each file, in one process that is measured."""
    root = Path(__file__).parents[2]
    done = subprocess.run(
        [sys.executable, "-m", "tests.recordings.mutate", str(tmp_path), str(shard),
         str(CASES // SHARDS), *map(str, originals)],
        capture_output=True, text=True, timeout=200, cwd=root,
        env={**os.environ, "PYTHONPATH": str(root), "HYPOTHESIS_STORAGE_DIRECTORY": str(tmp_path)},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-4000:]
    said = json.loads(done.stdout.splitlines()[-1])
    assert said["cases"] >= CASES // SHARDS
    assert said["peak_kb"] < LIMIT_KB, said
    assert said["slowest_s"] < 5, said
    # The mutations must reach deep: most files still open, and some of those are found damaged.
    assert said["opened"] > said["cases"] // 4
    assert said["refused"] > 0
    assert said["with_problems"] > 100
