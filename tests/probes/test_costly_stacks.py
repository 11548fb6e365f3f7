"""Stacks made to cost whoever names them: what is done at once is bounded, and others go on."""

# ruff: noqa: F811 (fixtures that another file of tests has)

from __future__ import annotations

import itertools
import threading

import pytest

from dsprobe.probes import stacks
from dsprobe.probes.pystacks import naming, objects, reader
from dsprobe.probes.pystacks.lines import Lines
from dsprobe.probes.pystacks.naming import CodeKey
from dsprobe.probes.pystacks.objects import MAX_TABLE, Code
from dsprobe.probes.stackrecords import FRAMES
from tests.probes.test_stacks import LAYOUT, Case, case  # noqa: F401

EVIL = 8  # another process than the one of Case
LONG = bytes([0x80 | 13 << 3] + [0x41] * (MAX_TABLE - 1))


class Counted:
    """Bytes of line tables that were read."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.bytes = 0

        def lines(table: bytes, first: int, minor: int) -> Lines:
            self.bytes += len(table)
            return Lines(table, first, minor)

        monkeypatch.setattr(naming, "Lines", lines)

    def since(self) -> int:
        count, self.bytes = self.bytes, 0
        return count


@pytest.fixture
def read(monkeypatch: pytest.MonkeyPatch) -> Counted:
    return Counted(monkeypatch)


def evil(case: Case, process: int = EVIL, table: bytes | None = LONG) -> int:
    """A stack of as many frames as are kept, each of code with such a table."""
    codes = [0x100000 * (i + 1) for i in range(FRAMES)]
    for address in codes:
        key = CodeKey(process, address, 9)
        case.stacks._naming._keep(key, Code("f", "f.py", 10, table))
    number = case.stack(*codes, process=process)
    case.answer(number, "libffi")
    return number


def honest(case: Case) -> int:
    number = case.stack(0x5000)
    case.code(0x5000, "g")
    case.answer(number, "libffi")
    return number


def test_long_tables_are_read_some_at_a_time_and_others_are_named(
    case: Case, read: Counted
) -> None:  # fmt: skip
    slow, other = evil(case), honest(case)
    case.collect()
    assert 0 < read.since() <= naming.READ_OF_ONE + MAX_TABLE
    assert case.told(other) == [("native", "in libffi", 0), ("python", "g", 10)]
    assert case.told(slow) is None
    for _ in range(10):
        case.collect()
        assert 0 < read.since() <= naming.READ_OF_ONE + MAX_TABLE
    assert case.told(slow) is None
    assert case.stacks.losses() == []
    case.now += stacks.SECONDS + 1
    case.collect()
    assert read.since() <= naming.READ_OF_ONE + MAX_TABLE
    told = case.told(slow)
    assert told
    assert len(told) == 1 + FRAMES
    assert {(kind, name) for kind, name, _ in told[1:]} == {("python", "f")}
    [loss] = case.stacks.losses()
    assert loss.reason == "Python frames without a line: their tables take long to read"
    assert 80 < loss.lost < FRAMES


def test_many_processes_share_what_is_read(case: Case, read: Counted) -> None:
    for process in range(EVIL, EVIL + 20):
        evil(case, process)
    case.collect()
    assert naming.READ <= read.since() <= naming.READ + MAX_TABLE


def test_a_table_is_read_once(case: Case, read: Counted) -> None:
    numbers = [honest(case) for _ in range(2)]
    case.collect()
    assert all(case.told(n) for n in numbers)
    first = read.since()
    again = honest(case)  # the same code object, told of anew
    case.collect()
    assert case.told(again) == case.told(numbers[0])
    assert 0 < first <= 2 * read.since()
    numbers = [case.stack(0x5000) for _ in range(50)]
    for number in numbers:
        case.answer(number, "libffi")
    case.collect()
    assert all(case.told(n) for n in numbers)
    assert read.since() == 0


def test_a_table_that_is_too_long_costs_the_line_alone(case: Case, read: Counted) -> None:
    number = evil(case, table=None)
    case.collect()
    told = case.told(number)
    assert told
    assert told[1:] == [("python", "f", 0)] * FRAMES
    assert read.since() == 0
    assert [x.lost for x in case.stacks.losses()] == [FRAMES]


class Huge:
    """Memory in which a bytes object of ``length`` lies."""

    def __init__(self, length: int) -> None:
        self._length, self.read_ = length, 0

    def u64(self, address: int) -> int:
        return self._length

    def read(self, address: int, size: int) -> bytes:
        self.read_ += size
        return bytes(size)


@pytest.mark.parametrize("length", [0, MAX_TABLE, MAX_TABLE + 1, 1 << 20, (1 << 64) - 1])
def test_it_is_not_even_read(length: int) -> None:
    memory = Huge(length)
    table = objects.bytes_at(LAYOUT, memory, 0x1000)  # type: ignore[arg-type]
    assert (table is None) == (length > MAX_TABLE)
    assert memory.read_ == len(table or b"")


def test_tables_that_were_read_count_as_memory(
    case: Case, monkeypatch: pytest.MonkeyPatch
) -> None:  # fmt: skip
    monkeypatch.setattr(naming, "MAX_BYTES", 1 << 20)
    monkeypatch.setattr(naming, "READ", 1 << 30)
    monkeypatch.setattr(naming, "READ_OF_ONE", 1 << 30)
    names = case.stacks._naming
    evil(case, table=bytes([0x80 | 10 << 3]) * 2000)  # each byte an entry
    case.collect()
    held = sum(x.bytes for x in names._lines.values())
    held += sum(naming._size(x) for x in names._codes.values())
    assert names._bytes == held <= 1 << 20
    names.gone(EVIL)
    assert (names._bytes, names._lines, names._codes) == (0, {}, {})


def test_each_waiting_stack_has_its_turn(case: Case) -> None:
    """Though there is only time for some of them at once."""
    ticks = itertools.count()
    case.stacks._clock = lambda: 100 + next(ticks) * stacks.AT_ONCE / 4
    silent = [case.stack(0x5000) for _ in range(20)]
    ready = honest(case)
    for _ in range(25):
        case.collect()
    assert case.told(ready)
    assert not any(case.told(n) for n in silent)


def test_stacks_of_the_dead_are_forgotten_some_at_a_time(
    case: Case, monkeypatch: pytest.MonkeyPatch
) -> None:  # fmt: skip
    monkeypatch.setattr(stacks, "BURIED", 10)
    removed: list[bytes] = []

    class Ids:
        def remove(self, key: bytes) -> None:
            removed.append(key)

    numbers = [honest(case) for _ in range(25)]
    case.collect()
    assert all(case.told(n) for n in numbers)
    monkeypatch.setattr(case.stacks, "_tell_lost", lambda _: None)
    monkeypatch.setattr(case.stacks, "_maps", (Ids(), Ids()))
    case.stacks.gone(7)
    for want in (10, 20, 25, 25):
        case.collect()
        assert len(removed) == want
    assert 7 not in case.stacks._processes
    assert case.stacks._naming._codes == {}


def test_processes_that_answer_late_hold_the_loop_for_a_second_of_ten(
    case: Case, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each takes as long as a look is waited for."""
    timeouts: list[float] = []

    class Event(threading.Event):
        def wait(self, timeout: float | None = None) -> bool:
            if threading.current_thread() is threading.main_thread() and timeout:
                timeouts.append(timeout)
                case.now += timeout
                return False
            return super().wait(timeout)

    monkeypatch.setattr(stacks.threading, "Event", Event)
    monkeypatch.setattr(case.stacks._reader, "ask", lambda job: True)
    for pid in range(1, 101):
        assert case.stacks.process_seen(pid) == "its memory does not answer yet"
    assert sum(timeouts) == pytest.approx(reader.WAITED)
    case.now += reader.WAITED_IN
    case.stacks.process_seen(101)
    assert sum(timeouts) == pytest.approx(reader.WAITED + stacks.WAIT)
