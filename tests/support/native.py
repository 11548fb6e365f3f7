"""Small C programs, built with the machine's gcc the first time they are needed."""

from __future__ import annotations

import atexit
import functools
import subprocess
import tempfile
from pathlib import Path

_HERE = Path(__file__).parent


@functools.cache
def program(name: str) -> Path:
    """The program built from ``<name>.c`` beside this file."""
    out = _folder() / name
    command = [
        "gcc",
        "-O2",
        "-Wall",
        "-Wextra",
        "-Werror",
        "-o",
        str(out),
        str(_HERE / f"{name}.c"),
    ]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    if done.returncode:
        raise RuntimeError(f"gcc {name}.c: {done.stderr.strip()}")
    return out


@functools.cache
def _folder() -> Path:
    folder = tempfile.TemporaryDirectory(prefix="dsprobe-native-")
    atexit.register(folder.cleanup)
    return Path(folder.name)
