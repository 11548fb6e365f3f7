"""The ring reader: on memory crafted as the kernel lays it out, and on a ring of this kernel."""

from __future__ import annotations

import mmap
import os
import subprocess
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import ClassVar

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as some

from dsprobe.probes.probe import Batch, BpfProbe, Loss, Program
from dsprobe.probes.registry import PROBES
from dsprobe.probes.ring import Ring
from dsprobe.probes.tracer import Tracer
from dsprobe.probes.units import c_struct
from dsprobe.recordings.model import Rows, Stream
from dsprobe.recordings.streams import SOFTIRQ_SLOW, TCP_RETRANSMIT
from tests.support.bpfrun import run_raw_tracepoint

PAGE = mmap.PAGESIZE
BUSY, DISCARDED = 1 << 31, 1 << 30


class Crafted:
    """A ring in a memfd: the writer's side of kernel/bpf/ringbuf.c, in slow motion."""

    def __init__(self, record: np.dtype[np.void], pages: int = 1) -> None:
        self.size = pages * PAGE
        self.record = record
        self.slot = 8 + -(-record.itemsize // 8) * 8
        self._fd = os.memfd_create("ring")
        os.ftruncate(self._fd, 2 * PAGE + 2 * self.size)
        self._memory = mmap.mmap(self._fd, 2 * PAGE + 2 * self.size)
        self.ring = Ring(self._fd, self.size, record)

    def number(self, at: int, value: int | None = None) -> int:
        if value is not None:
            self._memory[at : at + 8] = value.to_bytes(8, "little")
        return int.from_bytes(self._memory[at : at + 8], "little")

    @property
    def consumer(self) -> int:
        return self.number(0)

    @property
    def producer(self) -> int:
        return self.number(PAGE)

    def _write(self, position: int, data: bytes) -> None:
        for i, byte in enumerate(data):  # the data pages are mapped twice in a row
            at = 2 * PAGE + (position + i) % self.size
            self._memory[at] = self._memory[at + self.size] = byte

    def reserve(self, data: bytes, flags: int = BUSY, length: int | None = None) -> int | None:
        """Position of a new record; None where there is no room."""
        at = self.producer
        if at + self.slot - self.consumer > self.size:
            return None
        length = self.record.itemsize if length is None else length
        self._write(at, (length | flags).to_bytes(4, "little") + b"\x07\0\0\0" + data)
        self.number(PAGE, at + self.slot)
        return at

    def finish(self, at: int, flags: int = 0) -> None:
        self._write(at, (self.record.itemsize | flags).to_bytes(4, "little"))

    def close(self) -> None:
        self.ring.close()
        self._memory.close()
        os.close(self._fd)


@contextmanager
def crafted(record: np.dtype[np.void], pages: int = 1) -> Iterator[Crafted]:
    it = Crafted(record, pages)
    try:
        yield it
    finally:
        it.close()


SMALL = np.dtype([("t", "<u8"), ("x", "<u4")])  # 12 bytes: padded


def record(n: int) -> bytes:
    return np.array([(n, n % 1000)], SMALL).tobytes()


moves = some.lists(
    some.one_of(
        some.tuples(some.just("reserve"), some.integers(1, 90)),
        some.tuples(some.just("submit"), some.integers(0, 99)),
        some.tuples(some.just("discard"), some.integers(0, 99)),
        some.tuples(some.just("drain"), some.just(0)),
    ),
    max_size=40,
)


@settings(max_examples=150, deadline=None)
@given(moves)
def test_records_come_whole_once_and_in_order(script: list[tuple[str, int]]) -> None:
    with crafted(SMALL) as ring:
        open_: list[tuple[int, int]] = []  # position and number of records not finished
        discarded: set[int] = set()
        n = refused = 0
        got: list[int] = []
        for what, value in script:
            if what == "reserve":
                for _ in range(value):
                    at = ring.reserve(record(n))
                    if at is None:
                        refused += 1
                    else:
                        open_.append((at, n))
                        n += 1
            elif what == "drain":
                rows = ring.ring.drain()
                assert (rows["x"] == rows["t"] % 1000).all()
                got += rows["t"].tolist()
            elif open_:
                at, number = open_.pop(value % len(open_))
                ring.finish(at, DISCARDED if what == "discard" else 0)
                discarded |= {number} if what == "discard" else set()
        # Never past the first record that is still being written.
        first_open = min((number for _, number in open_), default=n)
        assert got == [i for i in range(got[-1] + 1 if got else 0) if i not in discarded]
        assert all(i < first_open for i in got)
        for at, _ in open_:
            ring.finish(at)
        got += ring.ring.drain()["t"].tolist()
        assert got == [i for i in range(n) if i not in discarded]
        assert ring.consumer == ring.producer


def test_what_was_drained_is_a_copy() -> None:
    with crafted(SMALL) as ring:
        ring.finish(ring.reserve(record(1)) or 0)
        rows = ring.ring.drain()
        for n in range(2, 2 + ring.size // ring.slot):
            at = ring.reserve(record(n))
            assert at is not None
            ring.finish(at)
        assert rows["t"].tolist() == [1]


def test_empty_ring_gives_no_rows() -> None:
    with crafted(SOFTIRQ_SLOW.dtype) as ring:
        rows = ring.ring.drain()
        assert (len(rows), rows.dtype) == (0, SOFTIRQ_SLOW.dtype)


def test_a_record_of_another_size_is_an_error() -> None:
    with crafted(SMALL) as ring:
        ring.reserve(record(1), flags=0, length=11)
        with pytest.raises(ValueError, match="another size"):
            ring.ring.drain()


# -- C and numpy agree -------------------------------------------------------------------------

RINGS = {name: s for p in PROBES if issubclass(p, BpfProbe) for name, s in p.rings.items()}

_TYPES = "".join(
    f"typedef {c} {name};\n"
    for name, c in {
        "u8": "unsigned char", "u16": "unsigned short", "u32": "unsigned int",
        "u64": "unsigned long long", "s8": "signed char", "s16": "short", "s32": "int",
        "s64": "long long",
    }.items()
)  # fmt: skip


@pytest.mark.tools("gcc")
def test_c_structures_are_the_dtypes_byte_for_byte(tmp_path: Path) -> None:
    assert SOFTIRQ_SLOW in RINGS.values()
    assert TCP_RETRANSMIT in RINGS.values()
    text = "#include <stddef.h>\n" + _TYPES
    for name, stream in RINGS.items():
        text += c_struct(name, stream)
        for f in stream.fields:
            dtype, offset = stream.dtype.fields[f.name][:2]  # type: ignore[index]
            where = f"offsetof(struct {name}, {f.name}) == {offset}"
            size = f"sizeof(((struct {name} *)0)->{f.name}) == {dtype.itemsize}"
            text += f'_Static_assert({where} && {size}, "{name}.{f.name}");\n'
    source = tmp_path / "layout.c"
    source.write_text(text)
    subprocess.run(["gcc", "-std=c11", "-fsyntax-only", str(source)], check=True)


# -- a ring of this kernel ---------------------------------------------------------------------

SOURCE = """
RING(test_ring, 1);

int test_event(struct bpf_raw_tracepoint_args *ctx)
{
	u32 cpu = bpf_get_smp_processor_id();
	struct ring_count *n = test_ring_count.lookup(&cpu);
	if (!n)
		return 0;
	__sync_fetch_and_add(&n->produced, 1);
	struct test_ring *e = test_ring.ringbuf_reserve(sizeof(struct test_ring));
	if (!e) {
		__sync_fetch_and_add(&n->lost, 1);
		return 0;
	}
	__builtin_memset(e, 0, sizeof(*e));
	e->t = ctx->args[0];
	e->tid = ctx->args[0] * 7;
	e->cpu = cpu;
	if (ctx->args[1])
		test_ring.ringbuf_discard(e, BPF_RB_NO_WAKEUP);
	else
		test_ring.ringbuf_submit(e, BPF_RB_NO_WAKEUP);
	return 0;
}
"""


class Test(BpfProbe):
    """Never attached: its program is run by hand."""

    __test__ = False
    name = "test"
    doc = "made by a test"
    streams = (SOFTIRQ_SLOW,)
    programs = (Program("test_event", "raw_tracepoint", "no_such_tracepoint", required=False),)
    rings: ClassVar[dict[str, Stream]] = {"test_ring": SOFTIRQ_SLOW}

    def collect(self, now: int) -> list[Batch]:
        return []


Event = Callable[[int, bool], None]


@pytest.fixture
def real(tmp_path: Path) -> Iterator[tuple[Tracer, Event]]:
    source = tmp_path / "test.bpf.c"
    source.write_text(SOURCE)
    Test.source = str(source)
    tracer = Tracer([Test()])
    status = tracer.load()[-1]
    assert status.status == "attached", status
    fd = tracer._attached["test"].programs["test_event"]
    cpus = sorted(os.sched_getaffinity(0))
    yield tracer, lambda n, discard=False: run_raw_tracepoint(fd, cpus[n % len(cpus)], n, discard)
    tracer.close()


def drained(tracer: Tracer) -> Rows:
    return np.concatenate([SOFTIRQ_SLOW.empty(), *(rows for _, rows in tracer.drain())])


def lost(tracer: Tracer) -> int:
    losses = list(tracer.losses())
    assert all(x.stream == "softirq.slow" and x.reason == "ring buffer full" for x in losses)
    return sum(x.lost for x in losses)


@pytest.mark.bpf
def test_produced_is_delivered_plus_lost(real: tuple[Tracer, Event]) -> None:
    """A prime number of events into a ring of 73, read now and then."""
    tracer, event = real
    total, got, gone = 5003, [], 0
    for n in range(total):
        event(n, False)
        if n % 211 == 0:
            got.append(drained(tracer))
        if n % 1009 == 0:
            gone += lost(tracer)
    got.append(drained(tracer))
    gone += lost(tracer)
    rows = np.concatenate(got)
    assert tracer.produced("test_ring") == total
    assert len(rows) + gone == total
    assert gone > total // 2
    assert (np.diff(rows["t"].astype(np.int64)) > 0).all()
    assert (rows["tid"] == rows["t"] * 7).all()
    assert lost(tracer) == 0


@pytest.mark.bpf
def test_nothing_is_lost_while_it_is_read(real: tuple[Tracer, Event]) -> None:
    tracer, event = real
    got = []
    for n in range(1009):
        event(n, False)
        if n % 37 == 0:
            got.append(drained(tracer))
    got.append(drained(tracer))
    assert np.concatenate(got)["t"].tolist() == list(range(1009))
    assert lost(tracer) == 0


@pytest.mark.bpf
def test_discarded_records_are_skipped(real: tuple[Tracer, Event]) -> None:
    tracer, event = real
    for n in range(60):
        event(n, n % 3 == 0)
    assert drained(tracer)["t"].tolist() == [n for n in range(60) if n % 3]


@pytest.mark.bpf
def test_losses_are_told_once(real: tuple[Tracer, Event]) -> None:
    tracer, event = real
    for n in range(100):
        event(n, False)
    room = len(drained(tracer))
    assert list(tracer.losses()) == [Loss("softirq.slow", "ring buffer full", 100 - room)]
    assert list(tracer.losses()) == []
