"""Whether two libraries are one file beneath, on real file systems."""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from dsprobe.probes import syscalls
from dsprobe.probes.samefile import PLACES, same_file
from tests.simgpu import build

pytestmark = [pytest.mark.bpf, pytest.mark.tools("gcc")]


@pytest.fixture
def copies(tmp_path: Path) -> Iterator[list[int]]:
    """A library, a copy of it, and the library again through an overlay."""
    library, copy = (tmp_path / name for name in ("library", "copy"))
    for folder in (library, copy):
        folder.mkdir()
        shutil.copy(build.libcuda() / "libcuda.so.1", folder)
    for name in ("upper", "work", "overlay"):
        (tmp_path / name).mkdir()
    options = f"lowerdir={library},upperdir={tmp_path}/upper,workdir={tmp_path}/work"
    overlay = tmp_path / "overlay"
    subprocess.run(["mount", "-t", "overlay", "overlay", "-o", options, str(overlay)], check=True)
    opened = [os.open(f / "libcuda.so.1", os.O_RDONLY) for f in (library, copy, overlay)]
    try:
        yield opened
    finally:
        for fd in opened:
            os.close(fd)
        subprocess.run(["umount", str(overlay)], check=True)


def test_an_overlay_shows_the_file_below_and_a_copy_is_another(copies: list[int]) -> None:
    library, copy, overlay = copies
    devices = {os.fstat(fd).st_dev for fd in (library, overlay)}
    assert len(devices) == 2
    assert same_file(overlay, [copy, library]) == 1
    assert same_file(library, [copy, overlay]) == 1
    assert same_file(copy, [library, overlay]) is None


def test_breakpoints_that_are_there_are_no_sign(copies: list[int]) -> None:
    """Another tracer's, in both files, at all places but one; and at all."""
    library, copy, overlay = copies
    with contextlib.ExitStack() as stack:
        for fd in (library, copy):
            for at in list(PLACES)[1:]:
                stack.callback(os.close, syscalls.open_mark(fd, at))
        assert same_file(copy, [library]) is None
        assert same_file(overlay, [copy, library]) == 1
        stack.callback(os.close, syscalls.open_mark(library, PLACES[0]))
        with pytest.raises(OSError, match="in the way"):
            same_file(copy, [library])
