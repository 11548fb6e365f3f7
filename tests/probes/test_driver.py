"""Reading a driver library and placing probes in it, against binutils and against the kernel."""

from __future__ import annotations

import ctypes
import os
import re
import shutil
import struct
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as some

from dsprobe.probes import driver
from dsprobe.probes.elf import ElfError, Library
from dsprobe.probes.placement import emulated, place
from tests.support.wait import until

# Entries as compilers and NVIDIA write them; what each is probed at.
SHAPES = {
    "cuCompare": ("cmpl $0x321cba00, guard(%rip); je 1f; 1: xor %eax, %eax; ret", 10, True),
    "cuPush": ("push %rbp; mov %rsp, %rbp; pop %rbp; xor %eax, %eax; ret", 0, True),
    "cuPush15": ("push %r15; pop %r15; xor %eax, %eax; ret", 0, True),
    "cuEndbr": ("endbr64; push %rbx; pop %rbx; xor %eax, %eax; ret", 4, True),
    "cuScratch": ("mov guard(%rip), %eax; mov %rdi, %r10; push %rbx; pop %rbx; ret", 9, True),
    "cuJump": ("jmp 1f; 1: xor %eax, %eax; ret", 0, True),
    # Past these the caller's arguments, stack or control would not be what they were.
    "cuStack": ("sub $24, %rsp; call 1f; 1: add $32, %rsp; ret", 0, False),
    "cuArgument": ("mov %rsi, %rdi; push %rbx; pop %rbx; ret", 0, False),
    "cuNarrow": ("mov $1, %sil; push %rbx; pop %rbx; ret", 0, False),
    "cuNinth": ("mov $1, %r9d; push %rbx; pop %rbx; ret", 0, False),
    "cuStore": ("movl $1, guard(%rip); push %rbx; pop %rbx; ret", 0, False),
    "cuReturn": ("xor %eax, %eax; ret", 0, False),
}


def source() -> str:
    text = '__asm__(".data; guard: .long 0; .text");\n'
    for name, (body, _, _) in {"cuInit": SHAPES["cuPush"], **SHAPES}.items():
        text += f'__attribute__((naked)) int {name}(void) {{ __asm__("{body}"); }}\n'
    return text


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    if not shutil.which("gcc"):
        pytest.fail("needs gcc")
    folder = tmp_path_factory.mktemp("driver")
    (folder / "f.c").write_text(source())
    out = folder / "libcuda.so.535.54.3"
    command = ["gcc", "-shared", "-fPIC", "-O1", "-Wl,--build-id", "-o", str(out), "f.c"]
    subprocess.run(command, cwd=folder, check=True, capture_output=True)
    return out


pytestmark = [
    pytest.mark.tools("gcc", "nm", "readelf"),
    pytest.mark.skipif(os.uname().machine != "x86_64", reason="shapes of x86_64"),
]


def opened(path: Path) -> driver.Driver:
    fd = os.open(path, os.O_RDONLY)
    try:
        return driver.read(fd, str(path), traced=bool)
    finally:
        os.close(fd)


def test_functions_and_build_id_are_those_that_binutils_read(library: Path) -> None:
    found = opened(library)
    # One segment maps the text, so that its addresses are offsets plus a constant.
    load = subprocess.run(["readelf", "-lW", library], capture_output=True, text=True, check=True)
    offset, address = next(
        (int(m[1], 16), int(m[2], 16))
        for m in re.finditer(r"LOAD +(0x\S+) (0x\S+) .* R E ", load.stdout)
    )
    names = subprocess.run(["nm", "-D", library], capture_output=True, text=True, check=True)
    truth = {
        name: int(value, 16) - address + offset
        for value, kind, name in re.findall(r"^(\w+) (\w) (\w+)$", names.stdout, re.MULTILINE)
        if kind == "T" and name.startswith("cu")
    }
    assert len(truth) == len(SHAPES) + 1
    assert {name: f.offset for name, f in found.functions.items()} == truth
    notes = subprocess.run(["readelf", "-n", library], capture_output=True, text=True, check=True)
    assert f"Build ID: {found.build_id}" in notes.stdout
    assert (found.version, found.machine) == ("535.54.3", "x86_64")


@pytest.mark.parametrize("name", SHAPES)
def test_a_probe_sits_on_the_first_emulated_instruction_if_nothing_before_it_disturbs(
    library: Path, name: str
) -> None:
    placed = opened(library).entries[name]
    assert (placed.offset, placed.emulated) == SHAPES[name][1:], placed


def test_instructions_that_the_kernel_steps_are_not_taken_for_emulated() -> None:
    for text in ("c3", "4889e5", "4883ec18", "66e900000000", "f30f1efa", "0f1f00", "cc", ""):
        assert not emulated(bytes.fromhex(text)), text


def test_code_that_cannot_be_decoded_is_probed_at_its_start() -> None:
    placed = place(b"\x06\x06\x06")
    assert (placed.offset, placed.emulated, placed.instruction) == (0, False, "undecodable")
    assert place(b"").offset == 0


@settings(max_examples=300, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(data=some.data())
def test_no_damaged_library_does_more_than_be_refused(library: Path, data: some.DataObject) -> None:
    raw = bytearray(library.read_bytes())
    for _ in range(data.draw(some.integers(1, 4))):
        at = data.draw(some.integers(0, len(raw) - 9))
        value = data.draw(some.sampled_from([0, 1, 255, 1 << 31, (1 << 64) - 1]))
        struct.pack_into("<Q", raw, at, value)
    if data.draw(some.booleans()):
        del raw[data.draw(some.integers(0, len(raw))) :]
    fd = os.memfd_create("library")
    try:
        os.write(fd, raw)
        try:
            driver.read(fd, "libcuda.so.1")
        except ElfError as e:
            assert str(e)
    finally:
        os.close(fd)


@pytest.mark.parametrize("content", [b"", b"\x7fELF", b"#!/bin/sh\n", b"\0" * 100])
def test_what_is_no_library_is_refused(content: bytes, tmp_path: Path) -> None:
    (tmp_path / "libcuda.so.1").write_bytes(content)
    with pytest.raises(ElfError):
        opened(tmp_path / "libcuda.so.1")


def test_a_library_without_the_api_is_not_a_driver() -> None:
    libc = next(Path("/lib").glob("*-linux-gnu/libc.so.6"))
    fd = os.open(libc, os.O_RDONLY)
    try:
        assert "malloc" in Library(fd).functions("mal")
        with pytest.raises(ElfError, match="cuInit"):
            driver.read(fd, "libcuda.so.1")
    finally:
        os.close(fd)


HOLD = "import ctypes, sys; ctypes.CDLL(sys.argv[1]); print('up', flush=True); sys.stdin.read()"


@pytest.mark.root
def test_a_process_that_maps_it_is_found_and_the_mapped_file_read_whatever_lies_there_now(
    library: Path, tmp_path: Path
) -> None:
    copy = tmp_path / "libcuda.so.535.54.3"
    shutil.copy(library, copy)
    process = subprocess.Popen(
        [sys.executable, "-c", HOLD, copy],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
    )  # fmt: skip
    try:
        assert process.stdout
        assert process.stdout.readline() == "up\n"
        [mapped] = [m for m in driver.users() if m.pid == process.pid]
        assert (mapped.path, mapped.inode) == (str(copy), copy.stat().st_ino)
        os.replace(_decoy(tmp_path), copy)
        [mapped] = [m for m in driver.users() if m.pid == process.pid]
        with driver.opened(mapped) as fd:
            assert set(driver.read(fd, mapped.path).functions) == {"cuInit", *SHAPES}
    finally:
        process.communicate("")
    until(lambda: driver.mapped_by(process.pid) is None, "it has gone")
    with pytest.raises(FileNotFoundError), driver.opened(mapped):
        pass


def _decoy(folder: Path) -> Path:
    decoy = folder / "decoy"
    decoy.write_bytes(b"not a library")
    return decoy


def test_names_that_only_look_like_it_are_left_alone(library: Path, tmp_path: Path) -> None:
    for name in ("libcuda.so.txt", "libcudart.so.12", "mylibcuda.so.1"):
        shutil.copy(library, tmp_path / name)
        held = ctypes.CDLL(str(tmp_path / name))
        assert held.cuInit(0) == 0
    assert driver.mapped_by(os.getpid()) is None


def test_a_library_below_sixteen_megabytes_of_other_mappings(tmp_path: Path) -> None:
    """The last line of a file of mappings that is read in many pieces."""
    (tmp_path / "7").mkdir()
    other = "7f0000000000-7f0000001000 r--p 00000000 fe:00 12 /" + "x" * 240 + "\n"
    ours = "7fff00000000-7fff00001000 r-xp 00002000 fe:00 99   /usr/lib/libcuda.so.1\n"
    (tmp_path / "7" / "maps").write_text(other * 64_000 + ours)
    assert (tmp_path / "7" / "maps").stat().st_size > 16 << 20
    (found,) = driver.libraries_of(7, tmp_path)
    assert (found.inode, found.offset, found.path) == (99, 0x2000, "/usr/lib/libcuda.so.1")


def test_mappings_without_end_are_said(tmp_path: Path) -> None:
    (tmp_path / "7").mkdir()
    with (tmp_path / "7" / "maps").open("wb") as f:
        f.truncate(100 << 20)
    with pytest.raises(OSError, match="more than 64 MB"):
        driver.libraries_of(7, tmp_path)
