"""Reading the structures of other Pythons: layouts, lines, names; what is hostile or unknown."""

from __future__ import annotations

import json
import random
import struct
import subprocess
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest

from dsprobe.probes.pystacks import interpreter, objects, offsets
from dsprobe.probes.pystacks.config import Looked, look, packed
from dsprobe.probes.pystacks.errors import ENDED, Unreadable
from dsprobe.probes.pystacks.lines import MAX_LINE, Lines
from dsprobe.probes.pystacks.naming import CodeKey, Naming, Place
from dsprobe.probes.pystacks.reader import MAX_HANGING, SECONDS, Job, Reader
from tests.simgpu.build import gcc
from tests.support import pythons
from tests.support.pythons import Python
from tests.support.wait import until

DUMP = """
import sys, json, types, asyncio.base_events, argparse, typing, inspect, dataclasses
def each(code):
    yield code
    for c in code.co_consts:
        if isinstance(c, types.CodeType):
            yield from each(c)
for module in (asyncio.base_events, argparse, typing, inspect, dataclasses):
    source = open(module.__file__).read()
    for code in each(compile(source, module.__file__, "exec")):
        if len(code.co_code) < 4000:
            print(json.dumps([code.co_firstlineno, code.co_linetable.hex(), list(code.co_lines())]))
"""


@pytest.fixture(params=pythons.VERSIONS)
def python(request: pytest.FixtureRequest) -> Python:
    found = pythons.find(request.param)
    if found is None:
        pytest.skip(f"no Python {request.param} here")
    return found


@pytest.mark.root
def test_lines_equal_what_python_says(python: Python) -> None:
    done = subprocess.run(python.command("-c", DUMP), capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    minor = int(python.version.split(".")[1])
    checked = 0
    for line in done.stdout.splitlines():
        first, table, ranges = json.loads(line)
        lines = Lines(bytes.fromhex(table), first, minor)
        for start, end, want in ranges:
            for offset in {start, end - 2} if end > start else ():
                got = lines.at(offset)
                assert got == (want or 0), (first, offset)
                checked += 1
    assert checked > 5000


@pytest.mark.parametrize("minor", [10, 11])
def test_lines_of_any_bytes(minor: int) -> None:
    """Whatever the table, a walk ends, and says a line or none."""
    chance = random.Random(minor)
    for _ in range(2000):
        table = chance.randbytes(chance.randrange(64))
        lines = Lines(table, chance.randrange(-(1 << 31), 1 << 31), minor)
        assert 0 <= lines.at(chance.randrange(-8, 200)) <= MAX_LINE


@pytest.mark.parametrize("minor", [10, 11])
def test_lines_before_and_after_the_code(minor: int) -> None:
    table = bytes([4, 1]) if minor == 10 else bytes([0x80 | 10 << 3 | 1, 0, 0])
    lines = Lines(table, 7, minor)
    assert lines.at(0) in (7, 8)
    assert lines.at(-2) == lines.at(4) == 0
    assert Lines(b"", 7, minor).at(0) == 0


@pytest.mark.parametrize("digits", [6, 7, 1 << 16])
def test_a_number_longer_than_any_means_nothing(digits: int) -> None:
    """CPython writes 32 bits, 6 in a byte."""
    step = b"\x40" * (digits - 2) + b"\x41\x00" if digits > 6 else b"\x44" + b"\x40" * 4 + b"\x00"
    one = bytes([0x80 | 10 << 3, 0, 0])
    lines = Lines(one + bytes([0x80 | 13 << 3]) + step + one, 7, 11)
    assert lines.at(0) == 7
    assert lines.at(2) == lines.at(4) == (9 if digits == 6 else 0)
    assert lines.bytes == 3 * 8  # however long the number


def test_a_table_that_is_cut_off() -> None:
    assert Lines(bytes([0x80 | 10 << 3, 0, 0, 0x80 | 13 << 3, 0x41]), 7, 11).at(0) == 7
    assert Lines(bytes([0x80 | 10 << 3, 0, 0, 0x80 | 13 << 3, 0x41]), 7, 11).at(2) == 0


# -- layouts ----------------------------------------------------------------------------------


def test_versions_that_are_not_known() -> None:
    for version, reason in (
        (0x030902F0, "Python 3.9.2 is not known; those from 3.10 to 3.15 are"),
        (0x031000F0, "Python 3.16.0 is not known; those from 3.10 to 3.15 are"),
        (0x020712F0, "Python 2.7.18 is not known; those from 3.10 to 3.15 are"),
        (0x030B00A3, "Python 3.11.0a3 was made before the release of its version"),
        (0, "the version of its Python is not known"),
    ):
        with pytest.raises(Unreadable) as e:
            offsets.layout(b"", version)
        assert str(e.value) == reason


def head(version: int, free_threaded: int = 0) -> bytes:
    """Of _PyRuntime, with offsets that are all 0."""
    return (offsets.COOKIE + struct.pack("<QQ", version, free_threaded)).ljust(offsets.HEAD, b"\0")


def test_debug_offsets_that_are_refused() -> None:
    for data, reason in (
        (head(0x030D01F0, 1), "Python 3.13.1 without a GIL cannot be read yet"),
        (head(0x030C01F0), "Python 3.12.1 is not known; those from 3.10 to 3.15 are"),
        (head(0x031001F0), "Python 3.16.1 is not known; those from 3.10 to 3.15 are"),
        (head(0x030D01F0), "its structures are not laid out as those of its version"),
    ):
        with pytest.raises(Unreadable) as e:
            offsets.layout(data, 0)
        assert str(e.value) == reason


def test_debug_offsets_of_any_bytes() -> None:
    chance = random.Random(3)
    for _ in range(2000):
        version = 0x030D00F0 + (chance.randrange(3) << 16)
        data = bytearray(chance.randbytes(offsets.HEAD))
        data[:24] = offsets.COOKIE + struct.pack("<QQ", version, 0)
        with pytest.raises(Unreadable):
            offsets.layout(bytes(data), 0)


# -- other processes --------------------------------------------------------------------------


@contextmanager
def sleeping(command: list[str]) -> Iterator[int]:
    """PID of a process that has said something and now waits."""
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    try:
        assert process.stdout
        assert process.stdout.readline()
        yield process.pid
    finally:
        process.kill()
        process.wait()


WAIT = """
def inner(n): return inner(n - 1) if n else (print(1, flush=True), input())
def outer(): return list(map(inner, [2]))
class Caller:
    def __iter__(self): yield outer()
list(Caller())
"""


@pytest.mark.root
def test_interpreters_are_found(python: Python) -> None:
    with sleeping(python.command("-c", WAIT)) as pid:
        looked = look(pid)
        assert looked.interpreter, looked.reason
        assert looked.sentence.split(".")[:2] == python.version.split(".")
        assert len(packed(looked, 1)) == 64


@pytest.mark.root
def test_a_program_without_python() -> None:
    with sleeping(["sh", "-c", "echo; read x"]) as pid:
        assert look(pid) == Looked()
    assert look(pid).reason == ENDED


@pytest.mark.root
def test_layouts_of_other_versions_fail_the_check(python: Python) -> None:
    """No layout but its own passes in any process."""
    with sleeping(python.command("-c", WAIT)) as pid:
        found = interpreter.find(pid)
        assert found
        with objects.Memory(pid) as memory:
            interpreter.check(found, memory)
            for minor, layout in offsets._TABLES.items():
                if minor == found.minor:
                    continue
                with pytest.raises(Unreadable):
                    interpreter.check(replace(found, layout=layout), memory)
            for name in ("thread_frame", "thread_id", "frame_code", "frame_previous"):
                moved = replace(found.layout, **{name: getattr(found.layout, name) + 8})
                with pytest.raises(Unreadable):
                    interpreter.check(replace(found, layout=moved), memory)
            with pytest.raises(Unreadable):
                interpreter.check(replace(found, code_type=found.code_type + 8), memory)


FAKE = """
#include <stdio.h>
#include <string.h>
#define SEEN __attribute__((visibility("default")))
SEEN char _PyRuntime[1 << 16];
SEEN unsigned long Py_Version = VERSION;
SEEN char PyCode_Type[64];
int main(void) {
    unsigned long head[3] = {0, VERSION, FREE};
    memcpy(head, "xdebugpy", 8);
    if (COOKIE) memcpy(_PyRuntime, head, sizeof head);
    FILL
    puts("1"); fflush(stdout); getchar();
}
"""


def fake(folder: Path, version: int, cookie: int = 0, free: int = 0, fill: str = "") -> Path:
    """A program that exports what an interpreter does."""
    source, program = folder / "fake.c", folder / "python3"
    words = {"VERSION": f"{version:#x}", "COOKIE": cookie, "FREE": free, "FILL": fill}
    text = FAKE
    for word, value in words.items():
        text = text.replace(word, str(value))
    source.write_text(text)
    gcc("-rdynamic", "-o", str(program), str(source))
    return program


LOOP = """
    /* interpreters that go round in circles, each with a thread that does */
    void **p = (void **)_PyRuntime;
    for (unsigned i = 0; i < sizeof _PyRuntime / sizeof *p; i++) p[i] = p;
"""


@pytest.mark.root
@pytest.mark.parametrize(
    ("version", "cookie", "free", "fill", "reason"),
    [
        (0x030702F0, 0, 0, "", "Python 3.7.2 is not known; those from 3.10 to 3.15 are"),
        (0x031402F0, 1, 0, "", "Python 3.20.2 is not known; those from 3.10 to 3.15 are"),
        (0x030E01F0, 1, 1, "", "Python 3.14.1 without a GIL cannot be read yet"),
        (0x030E01F0, 1, 0, "", "its structures are not laid out as those of its version"),
        (0x030B01F0, 0, 0, "", "its Python does not run yet"),
        (0x030B01F0, 0, 0, LOOP, "its list of threads is not where it should be"),
        (0x030B01F0, 0, 0, "memset(_PyRuntime, 0x7f, sizeof _PyRuntime);",
         "a pointer leads out of its memory"),
    ],
)  # fmt: skip
def test_builds_that_cannot_be_read(
    version: int, cookie: int, free: int, fill: str, reason: str, tmp_path: Path
) -> None:
    with sleeping([str(fake(tmp_path, version, cookie, free, fill))]) as pid:
        looked = look(pid)
        assert looked.reason == reason
        assert looked.interpreter is None
        assert struct.unpack_from("<I", packed(looked, 1), 12) == (2,)  # STACK_UNSUPPORTED


# -- hostile memory ---------------------------------------------------------------------------


class Noise(objects.Memory):
    """Memory of which every read gives something else: pointers into it, lengths, anything."""

    def __init__(self, seed: int) -> None:
        self._chance = random.Random(seed)
        self.reads = 0
        self.largest = 0

    def read(self, address: int, size: int) -> bytes:
        self.reads += 1
        self.largest = max(self.largest, size)
        chance = self._chance
        if chance.random() < 0.02 or not 0 < address < 1 << 47:
            raise Unreadable("a pointer leads out of its memory")
        if size > 4096:
            return chance.randbytes(size)
        words = (0, 1, 16, 1 << 20, (1 << 63) - 1, 0xFFFFFFFFFFFFFFFF, 0x7F0000001000, address)
        return b"".join(
            (chance.choice(words) if chance.random() < 0.8 else chance.getrandbits(64))
            .to_bytes(8, "little") for _ in range(-(-size // 8))
        )[:size]  # fmt: skip


def test_noise_is_refused_or_bounded() -> None:
    read = 0
    for seed in range(600):
        layout = offsets._TABLES[10 + seed % 3]
        memory = Noise(seed)
        it = interpreter.Interpreter(0x030B00F0, layout, 0x7F0000000000, 0x7F0000002000, "x")
        attempts = [
            partial(interpreter.check, it, memory),
            partial(objects.code_at, layout, memory, 0x7F0000000000, 1),
            partial(objects.text_at, layout, memory, 0x7F0000000000),
            partial(objects.bytes_at, layout, memory, 0x7F0000000000),
        ]
        for attempt in attempts:
            try:
                attempt()
                read += 1
            except Unreadable:
                pass
        assert memory.largest <= max(4 * objects.MAX_TEXT, objects.MAX_TABLE)
        assert memory.reads < 50_000
    assert read  # some of it looks like a string


def test_captured_bytes_of_any_kind() -> None:
    chance = random.Random(5)
    layout = offsets._TABLES[11]
    for _ in range(3000):
        name, file = (chance.randbytes(chance.randrange(300)) for _ in range(2))
        code, *_ = objects.captured(layout, 1, chance.randrange(8), name, file, b"1234")
        assert code is None or len(code.name) <= 300


# -- the thread that reads --------------------------------------------------------------------


def test_a_process_that_does_not_answer() -> None:
    """The others are still looked at, until too many hang."""
    now = [0.0]
    reader = Reader(lambda: now[0] + 1.0)
    stuck, release, begun, done = [], threading.Event(), threading.Semaphore(0), []

    def hang() -> None:
        begun.release()
        release.wait(20)
        stuck.append(1)

    for i in range(MAX_HANGING):
        assert reader.ask(hang)
        assert begun.acquire(timeout=10)
        now[0] += SECONDS + 1
        assert reader.ask(lambda: done.append(1)) == (i < MAX_HANGING - 1)
        until(lambda n=i: len(done) == min(n + 1, MAX_HANGING - 1), "the next thread works")
    assert reader.refused == 1
    release.set()
    until(lambda: len(stuck) == MAX_HANGING, "they go on")
    assert reader.ask(lambda: done.append(1))
    until(lambda: len(done) == MAX_HANGING, "it works again")
    reader.close()


class Never(Reader):
    """Takes jobs and does none."""

    def __init__(self) -> None:
        super().__init__()
        self.jobs: list[Job] = []

    def ask(self, job: Job) -> bool:
        self.jobs.append(job)
        return True


def test_names_that_were_captured_in_part() -> None:
    """What is missing is read from memory; what is gone is said to be."""
    layout = offsets._TABLES[11]
    it = interpreter.Interpreter(0x030B00F0, layout, 0, 0, "x")
    reader = Never()
    naming = Naming(reader)

    def text(words: str) -> bytes:
        state = 1 << 2 | 1 << 5 | 1 << 6  # one byte each, compact, ASCII
        head = bytearray(layout.ascii)
        struct.pack_into("<q", head, layout.text_length, len(words))
        struct.pack_into("<I", head, layout.text_state, state)
        return bytes(head) + words.encode()

    table = bytes([0x80 | 10 << 3 | 1, 0, 0])
    whole, cut, nothing = (CodeKey(1, address, 9) for address in (0x1000, 0x2000, 0x3000))
    naming.learn(whole, it, 5, len(table), text("f"), text("f.py"), table)
    naming.learn(cut, it, 5, 9999, text("g"), text("g.py"), table)
    assert naming.place(whole, 1, it, whole.address + layout.code_bytes) == Place("f", "f.py", 5)
    assert naming.place(cut, 1 << 30, it, 0) is None
    assert naming.place(nothing, 1 << 30, it, 0) is None
    assert naming.place(nothing, 1 << 30, it, 0) is None
    assert len(reader.jobs) == 2
    for job in reader.jobs:
        job()
    naming.answers()
    assert naming.place(cut, 1, it, 0) == Place("g", "g.py", 0)
    assert naming.place(nothing, 1, it, 0) == ENDED
    naming.gone(1)
    assert naming.place(whole, 1, it, 0) is None
