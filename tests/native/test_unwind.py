"""Stacks from a copy of their top equal what the program's own unwinder says of them."""

from __future__ import annotations

import platform
import re
import subprocess
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path

import pytest

from dsprobe.probes.native.ehframe import Row, UnwindTable
from dsprobe.probes.native.elffile import ElfFile
from dsprobe.probes.native.maps import Maps
from dsprobe.probes.native.symbolizer import Answer
from tests.native.targets import (
    Snapshot,
    build,
    running,
    symbolizer,
    unwind,
)

pytestmark = [pytest.mark.root, pytest.mark.tools("gcc", "g++", "nm")]


def addresses(found: Answer, snapshot: Snapshot) -> list[int]:
    """Addresses in memory of the frames."""
    text = Path(f"/proc/{snapshot.pid}/maps").read_text()
    bases: dict[str, int] = {}
    for line in text.splitlines():
        words = line.split(None, 5)
        if len(words) == 6:
            bases.setdefault(words[5], int(line.split("-")[0], 16))
    fixed = {path for path, base in bases.items() if base < 0x1000000}  # not relocated
    return [f.offset + (0 if f.module in fixed else bases.get(f.module, 0)) for f in found.frames]


def compare(found: Answer, snapshot: Snapshot) -> None:
    """Frame by frame: ours begin inside the function that took the snapshot."""
    assert addresses(found, snapshot)[1:] == snapshot.truth
    assert len(snapshot.truth) >= 5
    assert found.note == ""


@pytest.mark.parametrize("source", ["chain.c", "names.cc"])
@pytest.mark.parametrize(
    "flags",
    ["-fomit-frame-pointer", "-fno-omit-frame-pointer", "-no-pie", "-static-pie", "-O0", "-s"],
)
def test_the_stack_is_what_backtrace_says(tmp_path: Path, source: str, flags: str) -> None:
    path = build(tmp_path / "target", source, flags)
    with running(path) as process, symbolizer() as s:
        snapshot = Snapshot.read(process)
        found = unwind(s, snapshot)
        compare(found, snapshot)
        if source == "chain.c" and flags != "-s":
            functions = [f.function for f in found.frames]
            order = [
                functions.index(f)
                for f in ("innermost", "never_returns", "exported_middle", "main")
            ]
            assert order == sorted(order)
            assert functions[-1] == "_start"


def test_a_stack_through_python_and_numpy(tmp_path: Path) -> None:
    build(tmp_path / "libsnap.so", "snap.c", "-shared", "-fPIC")
    script = f"""
import ctypes, numpy
lib = ctypes.CDLL("{tmp_path}/libsnap.so")
apply = numpy.frompyfunc(lambda x: lib.snap(), 1, 1)  # numpy calls Python, that calls C
sorted([1], key=lambda x: apply(numpy.arange(3)))
"""
    with running(sys.executable, "-c", script) as process, symbolizer() as s:
        snapshot = Snapshot.read(process)
        found = unwind(s, snapshot)
        ours = addresses(found, snapshot)[1:]
        maps = Maps.parse(Path(f"/proc/{process.pid}/maps").read_bytes())
        modules = [Path(r.path).name for a in snapshot.truth if (r := maps.find(a - 1))]
        functions = [f.function for f in found.frames]
    # The copy ends where it ends: until then every frame is right.
    assert len(ours) >= 12
    assert ours == snapshot.truth[: len(ours)]
    assert found.note in ("", "unwinding ends here: the copy of the stack ends")
    assert any("multiarray_umath" in m for m in modules[: len(ours)])
    assert any("libffi" in m for m in modules[: len(ours)])
    assert "_PyEval_EvalFrameDefault" in functions


def test_code_without_a_table_ends_the_stack(tmp_path: Path) -> None:
    path = build(tmp_path / "jit", "jit.c")
    with running(path) as process, symbolizer() as s:
        snapshot = Snapshot.read(process)
        found = unwind(s, snapshot)
    assert [f.function for f in found.frames] == ["take_snapshot", "below", ""] or [
        f.function for f in found.frames
    ] == ["below", ""]
    assert found.frames[-1].module == ""
    assert found.note == "code that lies in no file"


def test_a_stack_through_a_signal_handler(tmp_path: Path) -> None:
    path = build(tmp_path / "signal", "signal.c", "-fno-inline")
    with running(path) as process, symbolizer() as s:
        snapshot = Snapshot.read(process)
        found = unwind(s, snapshot)
        compare(found, snapshot)
    functions = [f.function for f in found.frames]
    assert functions.index("handler") < functions.index("faults") < functions.index("main")


def test_a_short_copy_gives_the_frames_it_holds(tmp_path: Path) -> None:
    path = build(tmp_path / "chain", "chain.c")
    with running(path) as process, symbolizer() as s:
        snapshot = Snapshot.read(process)
        for size in (0, 7, 64, 700, 2000):
            short = Snapshot(process.pid, snapshot.t, snapshot.registers, snapshot.copy[:size],
                             snapshot.truth)  # fmt: skip
            found = unwind(s, short)
            ours = addresses(found, snapshot)[1:]
            assert ours == snapshot.truth[: len(ours)]
            assert found.note == "unwinding ends here: the copy of the stack ends"
    assert len(ours) >= 2


def test_a_stack_of_garbage_invents_nothing(tmp_path: Path) -> None:
    path = build(tmp_path / "chain", "chain.c")
    with running(path) as process, symbolizer() as s:
        snapshot = Snapshot.read(process)
        for garbage in (b"\0" * 12288, b"\xff" * 12288, b"\x41" * 12288):
            bad = Snapshot(process.pid, snapshot.t, snapshot.registers, garbage, [])
            assert len(unwind(s, bad).frames) <= 1


_NUMBERS = {"rax": 0, "rdx": 1, "rcx": 2, "rbx": 3, "rsi": 4, "rdi": 5, "rbp": 6, "rsp": 7,
            "ra": 16} | {f"r{n}": n for n in range(8, 16)}  # fmt: skip


def readelf_rows(library: Path) -> Iterator[tuple[int, str, dict[int, str]]]:
    """Address, CFA and rules of registers ("u": none) as binutils interprets the tables."""
    dump = subprocess.run(
        ["readelf", "--debug-dump=frames-interp,no-follow-links", str(library)],
        capture_output=True,
        text=True,
    )
    assert dump.returncode == 0
    for entry in dump.stdout.split("\n\n"):
        lines = entry.splitlines()
        if len(lines) < 3 or " FDE " not in lines[0]:
            continue
        columns = lines[1].split()
        for line in lines[2:]:
            words = re.sub(r"r(\d+) \(\w+\)", r"r\1", line).split()
            rules = zip(columns[2:], words[2:], strict=True)
            yield int(words[0], 16), words[1], {_NUMBERS[c]: w for c, w in rules}


def as_readelf(row: Row, registers: Iterable[int]) -> tuple[str, dict[int, str]]:
    names = {n: name for name, n in _NUMBERS.items()}
    cfa = "exp" if row.code else f"{names[row.cfa]}{row.offset:+d}"
    found = {}
    for register in registers:
        rule = row.rules.get(register)
        if rule is None or rule.kind == "undefined":
            found[register] = "u"
        elif rule.kind == "at":
            found[register] = f"c{rule.value:+d}"
        elif rule.kind == "register":
            found[register] = f"r{rule.value}"
        else:
            found[register] = "exp"
    return cfa, found


@pytest.mark.tools("readelf")
@pytest.mark.parametrize("name", ["libc.so.6", "libstdc++.so.6"])
def test_rows_equal_those_of_readelf(name: str) -> None:
    library = Path(f"/usr/lib/{platform.machine()}-linux-gnu/{name}").resolve()
    with open(library, "rb") as f:
        table = UnwindTable(ElfFile(f.fileno()))
        checked = 0
        for i, (address, cfa, rules) in enumerate(readelf_rows(library)):
            if i % 7 == 0 or re.search(r"exp|r\d", " ".join((cfa, *rules.values()))):
                row = table.row(address)
                assert row is not None, hex(address)
                assert as_readelf(row, rules) == (cfa, rules), hex(address)
                checked += 1
    assert checked > 2000
