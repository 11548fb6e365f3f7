"""NVIDIA's own driver library, brought by scripts/fetch-driver: no GPU is needed to look at it."""

from __future__ import annotations

import functools
import os
import platform
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent.parent


@functools.cache
def _fetch() -> tuple[str, str]:
    """Where it is, or why not."""
    if platform.machine() != "x86_64":
        return "", "the library is for x86_64"
    done = subprocess.run(
        [ROOT / "scripts" / "fetch-driver"], capture_output=True, text=True, timeout=300
    )
    return done.stdout.strip(), done.stderr.strip()


def library() -> Path:
    """The library's file; the test fails without it where CI=true, and is skipped elsewhere."""
    folder, why = _fetch()
    if not folder:
        if os.environ.get("CI") == "true":
            pytest.fail(f"no genuine driver library: {why}", pytrace=False)
        pytest.skip(why)
    return (Path(folder) / "libcuda.so.1").resolve()
