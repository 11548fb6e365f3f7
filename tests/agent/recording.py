"""Recordings made by the command, and what is in them."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from typing import Any

from dsprobe.recordings.filesession import open_file
from dsprobe.recordings.session import FOREVER
from dsprobe.recordings.streams import STREAMS
from tests.support.box import Box, Process


def recorder(here: Box, path: Path, *words: str, **options: Any) -> Process:
    return here.popen("record", "-o", str(path), *words, stdout=subprocess.DEVNULL, **options)


def last(path: Path, *streams: str) -> int:
    """``t`` of the last row of ``streams`` (default: of all but meta)."""
    with open_file(str(path)) as f:
        names = streams or [n for n in f.streams if n in STREAMS and "." in n and n[:4] != "meta"]
        ts = [f.read(n, 0, FOREVER)["t"] for n in names if not n.startswith("rollup")]
        return max((int(t[-1]) for t in ts if len(t)), default=0)


def info(here: Box, path: Path) -> tuple[int, dict[str, Any], str]:
    code, out, err = here.run("info", "--json", str(path))
    assert "Traceback" not in err
    return code, json.loads(out), err


def assert_whole(here: Box, path: Path) -> dict[str, Any]:
    code, said, err = info(here, path)
    assert (code, err) == (0, "")
    assert not said["truncated"]
    assert said["streams"]["cpu.usage"]["rows"] > 0
    assert said["streams"]["softirq.cpu"]["rows"] > 0
    assert os.stat(path).st_mode & 0o777 == 0o600
    return said


def small_disk(here: Box, folder: Path, size: str) -> None:
    """A tmpfs of ``size`` at ``folder``, in the box."""
    subprocess.run(here.argv("mount", "-t", "tmpfs", "-o", f"size={size}", "none", str(folder)),
                   check=True)  # fmt: skip
