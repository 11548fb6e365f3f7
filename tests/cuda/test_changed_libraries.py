"""A library whose contents change under its inode, as rsync --inplace and unpackers do it."""
# ruff: noqa: F811 (fixtures that another file of tests has)

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.cuda.counter import Counter
from tests.cuda.test_targets import (
    CALLS,
    HOLD,
    _nobody_else,  # noqa: F401
    at,
    attached,
    library,  # noqa: F401
    said,
    true_counts,
    work,
)
from tests.simgpu import build
from tests.simgpu.target import Target
from tests.support.agents import watched
from tests.support.wait import until

pytestmark = [pytest.mark.bpf, pytest.mark.tools("gcc")]


@contextmanager
def held(path: Path) -> Iterator[None]:
    """Somebody maps it all the time."""
    command = [sys.executable, "-c", HOLD, str(path)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as p:
        assert p.stdout
        assert p.stdout.readline() == b"up\n"
        yield
        p.communicate(b"")


def test_one_that_is_completed_later_is_traced_then(tmp_path: Path, library: Path) -> None:
    path, counter = library / "libcuda.so.1", Counter()
    whole, inode = path.read_bytes(), path.stat().st_ino
    path.write_bytes(whole[:20_000])
    with held(path), watched(counter) as w:
        until(lambda: said(w, "missing"), "it is no library yet")
        path.write_bytes(whole)
        assert path.stat().st_ino == inode
        with Target(tmp_path / "truth", prefix=at(library)) as t:
            t.start()
            until(lambda: attached(w, str(library)), "it is found")
            work(t)
            assert counter.counts()["cuMemAlloc_v2"] == CALLS
            assert not said(w, "missing")


def test_one_that_changes_has_its_probes_where_they_belong_now(
    tmp_path: Path, library: Path
) -> None:
    path, counter = library / "libcuda.so.1", Counter()
    with held(path), watched(counter) as w:
        until(lambda: attached(w, str(library)), "it is found")
        path.write_bytes((build.libcuda("frame") / "libcuda.so.1").read_bytes())
        with Target(tmp_path / "truth", prefix=at(library)) as t:
            t.start()
            until(lambda: len(attached(w, str(library))) == 2, "it is found again")
            old, new = counter.attached
            assert old.functions != new.functions
            before = counter.counts()
            work(t)
            hits = {n: c - before.get(n, 0) for n, c in counter.counts().items()}
            assert {n: c for n, c in hits.items() if c} == {
                "cuMemAlloc_v2": CALLS, "cuMemFree_v2": CALLS,
            }  # fmt: skip
            since = attached(w, str(library))[1]
            mine = true_counts(t.truth, since=since)
            assert {n: mine[n] for n in hits if hits[n]} == {n: c for n, c in hits.items() if c}
