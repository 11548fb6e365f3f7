"""Which function an address lies in: never a wrong one, whatever the file or its place."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from dsprobe.probes.native.maps import VDSO, Maps
from tests.native.targets import (
    Snapshot,
    answer,
    ask,
    build,
    build_id,
    loaded_at,
    names_at,
    running,
    symbolizer,
)

pytestmark = [pytest.mark.root, pytest.mark.tools("gcc", "g++", "nm", "readelf")]


def own_frames(path: Path, snapshot: Snapshot, pie: bool) -> list[tuple[int, int]]:
    """Return addresses that lie in the program itself, and what they are in its file."""
    base = loaded_at(snapshot.pid, str(path)) if pie else 0
    maps = Maps.parse(Path(f"/proc/{snapshot.pid}/maps").read_bytes())
    found = []
    for a in snapshot.truth:
        r = maps.find(a - 1)
        if r is not None and r.path == str(path):
            found.append((a, a - base))
    assert len(found) >= 4
    return found


@pytest.mark.parametrize("pie", [True, False], ids=["pie", "not-pie"])
@pytest.mark.parametrize("stripped", [False, True], ids=["symbols", "stripped"])
def test_functions_are_those_that_nm_has(tmp_path: Path, pie: bool, stripped: bool) -> None:
    flags = ["-pie", "-fPIE"] if pie else ["-no-pie"]
    path = build(tmp_path / "chain", "chain.c", "-rdynamic", "-Wl,--build-id", *flags)
    if stripped:
        subprocess.run(["strip", path], check=True)
    table = ["-D"] if stripped else []
    with running(path) as process, symbolizer() as s:
        snapshot = Snapshot.read(process)
        own = own_frames(path, snapshot, pie)
        found = ask(s, snapshot, [a for a, _ in own])
    assert not found.note
    for frame, (_, address) in zip(found.frames, own, strict=True):
        names = names_at(path, address - 1, *table)
        assert frame.function in (names or {""})
        assert (frame.module, frame.offset) == (str(path), address)
        assert frame.build_id == build_id(path)
        assert len(frame.build_id) == 40
    functions = [f.function for f in found.frames]
    assert "exported_middle" in functions
    assert ("innermost" in functions) != stripped  # it is static
    assert ("never_returns" in functions) != stripped  # its call is the last thing in its code


def test_cpp_names_are_those_of_the_source(tmp_path: Path) -> None:
    path = build(tmp_path / "names", "names.cc")
    with running(path) as process, symbolizer() as s:
        snapshot = Snapshot.read(process)
        own = own_frames(path, snapshot, pie=True)
        found = ask(s, snapshot, [a for a, _ in own])
    for frame, (_, address) in zip(found.frames, own, strict=True):
        assert frame.function in names_at(path, address - 1, "-C")
    functions = [f.function for f in found.frames]
    assert any(f.startswith("at::native::empty(std::__cxx11::basic_string<") for f in functions)
    assert any("Allocator::allocate<long, 3>(std::vector<long," in f for f in functions)


def test_a_deleted_file_keeps_its_names(tmp_path: Path) -> None:
    path = build(tmp_path / "chain", "chain.c", "-rdynamic")
    with running(path) as process, symbolizer() as s:
        snapshot = Snapshot.read(process)
        own = own_frames(path, snapshot, pie=True)
        os.unlink(path)
        other = build(path, "names.cc", "-rdynamic")  # what now lies there is not what runs
        assert other.exists()
        found = ask(s, snapshot, [a for a, _ in own])
    assert "innermost" in [f.function for f in found.frames]
    assert {f.module for f in found.frames} == {str(path)}


@pytest.mark.tools("unshare", "mount")
def test_a_file_of_another_mount_namespace(tmp_path: Path) -> None:
    path = build(tmp_path / "chain", "chain.c", "-rdynamic")
    place = tmp_path / "hidden"
    place.mkdir()
    script = f"mount -t tmpfs none {place} && cp {path} {place}/prog && exec {place}/prog"
    with running("unshare", "-m", "sh", "-c", script) as process, symbolizer() as s:
        snapshot = Snapshot.read(process)
        assert not (place / "prog").exists()
        own = own_frames(place / "prog", snapshot, pie=True)
        found = ask(s, snapshot, [a for a, _ in own])
    assert "innermost" in [f.function for f in found.frames]
    assert found.frames[0].build_id == build_id(path)


def test_functions_of_the_vdso(tmp_path: Path) -> None:
    path = build(tmp_path / "chain", "chain.c")
    with running(path) as process, symbolizer() as s:
        snapshot = Snapshot.read(process)
        maps = Maps.parse(Path(f"/proc/{process.pid}/maps").read_bytes())
        vdso = next(r for r in maps.ranges if r.path == VDSO)
        with open(f"/proc/{process.pid}/mem", "rb", buffering=0) as memory:
            memory.seek(vdso.low)
            image = memory.read(vdso.high - vdso.low)
        (tmp_path / "image").write_bytes(image)
        table = subprocess.run(
            ["nm", "-D", tmp_path / "image"], capture_output=True, text=True
        ).stdout
        line = next(x for x in table.splitlines() if "__vdso_clock_gettime" in x)
        at = int(line.split()[0], 16)
        found = ask(s, snapshot, [vdso.low + at + 1])
    assert found.frames[0].function in names_at(tmp_path / "image", at, "-D")
    assert (found.frames[0].module, found.frames[0].offset) == (VDSO, at + 1)


@pytest.mark.parametrize("sharing", ["MAP_SHARED", "MAP_PRIVATE"])
def test_code_made_at_run_time_has_no_name(sharing: str) -> None:
    script = (
        "import mmap, ctypes, sys\n"
        f"m = mmap.mmap(-1, 4096, mmap.MAP_ANONYMOUS | mmap.{sharing}, 7)\n"
        "print(hex(ctypes.addressof(ctypes.c_char.from_buffer(m))), flush=True)\n"
        "sys.stdin.read()\n"
    )
    with running(sys.executable, "-c", script) as process, symbolizer() as s:
        assert process.stdout is not None
        address = int(process.stdout.readline(), 16)
        t = time.monotonic_ns()
        s.ask("jit", 1, process.pid, t, [address + 16, 0x1234, (1 << 64) - 8])
        frames = answer(s, "jit").frames
    assert [f.function for f in frames] == ["", "", ""]
    assert [f.module for f in frames] == ["", "", ""]
    assert [f.offset for f in frames] == [address + 16, 0x1234, (1 << 64) - 8]


def test_a_process_that_ended_was_looked_at_while_it_lived(tmp_path: Path) -> None:
    path = build(tmp_path / "chain", "chain.c")
    with running(path) as process, symbolizer() as s:
        snapshot = Snapshot.read(process)
        own = own_frames(path, snapshot, pie=True)
        ask(s, snapshot, [own[0][0]])
        process.kill()
        process.wait()
        os.unlink(path)
        found = ask(s, snapshot, [a for a, _ in own])
        assert "innermost" in [f.function for f in found.frames]
        s.gone(1)
        late = ask(s, snapshot, [own[0][0]])
    assert late.frames[0].function == ""
    assert "ended" in late.note


def test_a_pid_that_is_used_again_is_another_process(tmp_path: Path) -> None:
    path = build(tmp_path / "chain", "chain.c")
    before = time.monotonic_ns() - 10**9
    with running(path) as process, symbolizer() as s:
        snapshot = Snapshot.read(process)
        s.ask("old", 1, process.pid, before, snapshot.truth)
        found = answer(s, "old")
    assert {f.function for f in found.frames} == {""}
    assert "later" in found.note


def test_another_program_of_the_same_process_is_not_mixed_in(tmp_path: Path) -> None:
    second = build(tmp_path / "second", "chain.c", "-no-pie")
    script = f"import os; print(1, flush=True); input(); os.execv('{second}', ['second'])"
    with running(sys.executable, "-c", script) as process, symbolizer() as s:
        assert process.stdout is not None
        assert process.stdin is not None
        process.stdout.readline()
        s.ask("python", 1, process.pid, time.monotonic_ns(), [loaded_at(process.pid, "libc.so.6")])
        assert answer(s, "python").frames[0].module == ""  # its first page is no code
        process.stdin.write("go\n")
        process.stdin.flush()
        snapshot = Snapshot.read(process)
        old = ask(s, snapshot, snapshot.truth)
        s.ask("new", 2, process.pid, snapshot.t, snapshot.truth)
        new = answer(s, "new")
    assert not {f.module for f in old.frames} & {str(second)}
    assert "innermost" in [f.function for f in new.frames]


def test_a_process_whose_first_thread_has_ended(tmp_path: Path) -> None:
    path = build(tmp_path / "leaderless", "leaderless.c", "-pthread")
    with running(path) as process, symbolizer() as s:
        snapshot = Snapshot.read(process)
        assert Path(f"/proc/{process.pid}/maps").read_bytes() == b""
        found = ask(s, snapshot, snapshot.truth)
    functions = [f.function for f in found.frames]
    assert functions[:2] == ["survivor", "work"]
    assert found.note == ""
