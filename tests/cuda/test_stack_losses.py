"""Stacks that find no room: said and counted, and what they are of is still there."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from dsprobe.probes import stackrecords
from dsprobe.probes.memory import Memory
from tests.cuda.stackview import Load, allocations, frames, places, said
from tests.cuda.tracing import Tracing, tracing
from tests.support import pythons
from tests.support.wait import until

pytestmark = pytest.mark.bpf


@contextmanager
def many(it: Tracing, folder: Path, functions: int) -> Iterator[Load]:
    """The load, before its first round."""
    python = pythons.find("3.11")
    assert python
    load = Load(python, folder, "tests.cuda.stackmany", str(functions))
    assert load.gate() == "first"
    it.cuda.stacks.process_seen(load.process.pid)
    try:
        yield load
        load.end()
    finally:
        load.process.kill()


def lost(it: Tracing) -> int:
    """Stacks lost so far."""
    return sum(x.lost for x in it.losses if x.stream == "meta.stack")


def _told(it: Tracing) -> set[int]:
    return set(it.rows("meta.stack")["id"].tolist())


def test_more_stacks_than_the_table_holds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stackrecords, "STACKS", 64)
    with tracing(Memory) as it:
        with many(it, tmp_path, 200) as load:
            load.go()
            assert load.gate() == "second"
            pids = {load.process.pid}
            until(lambda: (it.step(), len(allocations(it, pids)) == 200)[1], "all have come")
            until(
                lambda: (it.step(), _told(it) >= {s for _, s in allocations(it, pids)})[1], "told"
            )
            stacks = frames(it)
            own = Counter(stack for _, stack in allocations(it, pids))
            full = own.pop(stackrecords.NO_ROOM)
            assert full + len(own) == 200
            assert 200 - 64 <= full <= 200 - 32  # the kernel keeps some for other CPUs
            assert said(stacks[stackrecords.NO_ROOM]) == ["lost: more than 64 stacks"]
            assert all(len(places(stacks[s])) > 3 for s in own)
            assert lost(it) == full
            load.go()
            assert load.gate() == "done"
        it.settle()
        # Those of a process that has ended make room.
        with many(it, tmp_path / "again", 20) as load:
            load.go()
            assert load.gate() == "second"
            pids = {load.process.pid}
            until(lambda: (it.step(), len(allocations(it, pids)) == 20)[1], "all have come")
            assert all(s >= stackrecords.FIRST for _, s in allocations(it, pids))
            load.go()
            assert load.gate() == "done"
        it.losses.clear()


def test_more_new_stacks_at_once_than_the_ring_holds(tmp_path: Path) -> None:
    """They are lost, and taken when they come again."""
    count = 1100  # allocations and frees within the budget of single events
    with tracing(Memory) as it, many(it, tmp_path, count) as load:
        load.go()
        assert load.gate() == "second"  # nothing was drained meanwhile
        pids = {load.process.pid}
        until(lambda: (it.step(), len(allocations(it, pids)) == count)[1], "all have come")
        until(lambda: (it.step(), _told(it) >= {s for _, s in allocations(it, pids)})[1], "told")
        stacks = frames(it)
        first = [stacks[s] for _, s in allocations(it, pids)]
        missing = sum(said(s) == ["lost: too many new stacks at once"] for s in first)
        assert missing == lost(it) > 100
        assert sum(len(places(s)) > 3 for s in first) == count - missing
        load.go()
        until(lambda: (it.step(), len(allocations(it, pids)) == 2 * count)[1], "again")
        until(lambda: (it.step(), _told(it) >= {s for _, s in allocations(it, pids)})[1], "told")
        stacks = frames(it)
        second = [stacks[s] for _, s in allocations(it, pids)[count:]]
        assert not [s for s in second if said(s)]
        assert load.gate() == "done"
        it.losses.clear()
