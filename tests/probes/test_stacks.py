"""From what BPF captured to rows: order, names that come late, tables that are full."""

from __future__ import annotations

import threading
from collections.abc import Hashable, Sequence
from typing import Any

import numpy as np
import pytest

from dsprobe.probes import framerows, stacks
from dsprobe.probes.framerows import FrameTable, status
from dsprobe.probes.native.symbolizer import Answer, NativeFrame, Registers, Symbolizer
from dsprobe.probes.pystacks import offsets
from dsprobe.probes.pystacks.config import Looked
from dsprobe.probes.pystacks.interpreter import Interpreter
from dsprobe.probes.pystacks.naming import CodeKey
from dsprobe.probes.pystacks.objects import Code
from dsprobe.probes.stackrecords import CHANGED, FIRST, FRAMES, STACK_RECORD, WHOLE
from dsprobe.probes.stacks import Stacks
from dsprobe.recordings.cudastreams import FRAME_KINDS
from dsprobe.recordings.model import Rows
from tests.support.wait import until

LAYOUT = offsets._TABLES[11]
PYTHON = Interpreter(0x030B02F0, LAYOUT, 0x1000, 0x2000, "/usr/bin/python3.11")
TABLE = bytes([0x80 | 10 << 3 | 7] * 32)  # the first line, and each of 16 bytes


class Told(Symbolizer):
    """Answers what the test says, when it says so."""

    def __init__(self) -> None:
        self.refused = 0
        self.asked: list[Hashable] = []
        self.ready: list[Answer] = []
        self.full = False

    def ask(self, key: Hashable, process: int, pid: int, t: int, addresses: Sequence[int]) -> bool:
        self.asked.append(key)
        self.refused += self.full
        return not self.full

    def unwind(
        self, key: Hashable, process: int, pid: int, t: int, registers: Registers, copy: bytes
    ) -> bool:
        raise AssertionError("not wanted")

    def answers(self) -> list[Answer]:
        ready, self.ready = self.ready, []
        return ready

    def seen(self, process: int, pid: int, t: int) -> None:
        pass

    def gone(self, process: int) -> None:
        pass

    def close(self) -> None:
        pass


class Case:
    def __init__(self) -> None:
        self.now = 100.0
        self.symbolizer = Told()
        self.stacks = Stacks(self.symbolizer, clock=lambda: self.now)
        self.stacks._pythons[1] = Looked(PYTHON)
        self.rows: dict[str, list[Rows]] = {"meta.frame": [], "meta.stack": []}
        self.next = FIRST

    def stack(self, *codes: int, ret: int = 0xABC, **columns: Any) -> int:
        """A new stack whose frames run these code objects; its number."""
        row = STACK_RECORD.rows(
            t=1, id=self.next, process=7, pid=1 << 30, python=1, status=WHOLE, count=len(codes),
            ret=ret, first=5, second=5,
        )  # fmt: skip
        for name, value in columns.items():
            row[name] = value
        words = row["frames"][0].reshape(FRAMES, 3)
        for i, code in enumerate(codes):
            words[i] = code, code + LAYOUT.code_bytes + 16 * i, 9
        self.stacks.took("cuda_stack", row)
        self.next += 1
        return self.next - 1

    def code(self, address: int, name: str) -> None:
        """BPF captured a code object."""
        key = CodeKey(7, address, 9)
        self.stacks._naming._keep(key, Code(name, f"{name}.py", 10, TABLE))

    def answer(self, number: int, *modules: str, note: str = "") -> None:
        frames = tuple(NativeFrame(f"in {m}", m, 4, "b") for m in modules)
        self.symbolizer.ready.append(Answer(number, frames, note))

    def collect(self) -> None:
        for stream, rows in self.stacks.collect(1):
            self.rows[stream.name].append(rows)

    def told(self, number: int) -> list[tuple[str, str, int]] | None:
        """(kind, function, line) of each frame; None where nothing was told."""
        if not self.rows["meta.stack"]:
            return None
        frames = {int(f["id"]): f for f in np.concatenate(self.rows["meta.frame"])}
        rows = np.concatenate(self.rows["meta.stack"])
        rows = rows[rows["id"] == number]
        assert rows["depth"].tolist() == list(range(len(rows)))
        found = [frames[i] for i in rows["frame"].tolist()]
        return [(FRAME_KINDS[f["kind"]], f["function"], int(f["line"])) for f in found] or None


@pytest.fixture
def case() -> Case:
    return Case()


def test_frames_are_innermost_first(case: Case) -> None:
    number = case.stack(0x5000, 0x6000)
    case.code(0x5000, "inner")
    case.code(0x6000, "outer")
    case.answer(number, "libffi", "_ctypes")
    case.collect()
    assert case.told(number) == [
        ("native", "in libffi", 0), ("native", "in _ctypes", 0),
        ("python", "inner", 10), ("python", "outer", 10),
    ]  # fmt: skip


def test_native_frames_end_where_the_interpreter_begins(case: Case) -> None:
    with_python, without = case.stack(0x5000), case.stack()
    case.code(0x5000, "f")
    for number in (with_python, without):
        case.answer(number, "libffi", PYTHON.path, "libc", note="cut")
    case.collect()
    assert case.told(with_python) == [("native", "in libffi", 0), ("python", "f", 10)]
    assert case.told(without) == [
        ("native", "in libffi", 0), ("native", f"in {PYTHON.path}", 0), ("native", "in libc", 0),
        ("status", "cut", 0),
    ]  # fmt: skip


def test_names_that_do_not_come(case: Case) -> None:
    number = case.stack(0x5000)
    case.code(0x5000, "f")
    case.collect()
    assert case.told(number) is None
    case.now += stacks.SECONDS + 1
    case.collect()
    assert case.told(number) == [("native", "", 0), ("python", "f", 10)]
    assert int(np.concatenate(case.rows["meta.frame"])[-2]["offset"]) == 0xABC
    case.answer(number, "late")
    case.collect()
    assert case.told(number) == [("native", "", 0), ("python", "f", 10)]


def test_a_symbolizer_that_is_full(case: Case) -> None:
    case.symbolizer.full = True
    number = case.stack()
    case.collect()
    assert case.told(number) == [("native", "", 0)]
    assert [(x.stream, x.lost) for x in case.stacks.losses()] == [("meta.frame", 1)]
    assert case.stacks.losses() == []


def test_frames_that_changed_meanwhile(case: Case) -> None:
    number = case.stack(0x5000, second=6)
    case.code(0x5000, "f")
    case.answer(number, "libffi")
    case.collect()
    told = case.told(number)
    assert told == [
        ("native", "in libffi", 0), ("status", "lost: frames changed while they were read", 0),
    ]  # fmt: skip
    assert stacks.stackrecords.SENTENCES[CHANGED] == told[1][1]


def test_code_that_is_gone(case: Case) -> None:
    """Its process has ended, and nothing was captured."""
    number = case.stack(0x5000)
    case.answer(number, "libffi")
    case.collect()
    case.now += stacks.SECONDS + 1
    case.collect()
    told = case.told(number)
    assert told
    assert told[1][0] == "status"
    assert told[1][1].startswith("a Python function: ")


def test_more_stacks_than_can_wait(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stacks, "MAX_WAITING", 2)
    for _ in range(5):
        case.stack()
    assert [(x.reason, x.lost) for x in case.stacks.losses()] == [
        ("more stacks than can be named", 3)
    ]


def test_a_frame_is_told_once(case: Case) -> None:
    numbers = [case.stack(0x5000), case.stack(0x5000)]
    case.code(0x5000, "f")
    for number in numbers:
        case.answer(number, "libffi")
    case.collect()
    assert case.told(numbers[0]) == case.told(numbers[1])
    rows = np.concatenate(case.rows["meta.frame"])
    assert (rows["function"] == "f").sum() == 1
    assert len(set(rows["id"].tolist())) == len(rows)


def test_more_frames_than_are_kept() -> None:
    table = FrameTable(limit=3)
    ids = [table.frame(1, (framerows.PYTHON, f"f{i}", "f.py", 1, "", 0, "")) for i in range(5)]
    assert ids == [1, 2, 3, 4, 4]
    assert table.refused == 2
    assert table.frame(1, status("lost")) == 5  # sentences always fit
    assert table.frame(1, (framerows.PYTHON, "f0", "f.py", 1, "", 0, "")) == 1
    frames, _ = table.rows()
    assert frames["function"].tolist() == ["f0", "f1", "f2", "not kept: more than 3 frames", "lost"]


def test_a_process_that_does_not_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever asks waits for it once, and is told when it is known."""
    release, waits = threading.Event(), []

    def look(pid: int) -> Looked:
        if pid == 1:
            release.wait(20)
        return Looked(PYTHON)

    class Event(threading.Event):
        def wait(self, timeout: float | None = None) -> bool:
            waits.extend([timeout] if timeout else [])  # starting a thread waits without
            return super().wait(timeout)

    monkeypatch.setattr(stacks, "look", look)
    monkeypatch.setattr(stacks.threading, "Event", Event)
    it = Stacks()
    assert it.process_seen(2, 12) == "3.11.2"
    assert it.process_seen(1, 11) == "its memory does not answer yet"
    assert it.process_seen(3, 13) == "its memory does not answer yet"
    assert waits == [stacks.WAIT] * 2
    assert it.changed() == [12]
    release.set()
    changed: list[int] = []
    until(lambda: (changed.extend(it.changed()), len(changed) == 2)[1], "they are looked at")
    assert (it.python(11), it.python(13)) == ("3.11.2", "3.11.2")
    it.close()


def test_frames_of_much_text(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(framerows, "MAX_TEXT", 100)
    monkeypatch.setattr(framerows, "MAX_SENTENCES", 2)
    table = FrameTable()
    for i in range(5):
        table.frame(1, (framerows.PYTHON, f"{i}" * 40, "", 1, "", 0, ""))
        table.frame(1, status(f"lost {i}"))
    frames, _ = table.rows()
    kept = ["0" * 40, "lost 0", "1" * 40, "lost 1", "not kept: more than 200,000 frames"]
    assert frames["function"].tolist() == kept
    assert table.refused == 6
