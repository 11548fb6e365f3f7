"""Files made to break a parser: fewer names and frames, never an exception, a hang, much memory."""

from __future__ import annotations

import os
import random
import struct
import time
import tracemalloc
from dataclasses import dataclass
from pathlib import Path

import pytest

from dsprobe.probes.native.child import Reader
from dsprobe.probes.native.demangle import load
from dsprobe.probes.native.elffile import ElfFile
from dsprobe.probes.native.maps import MAX_RANGES, Maps
from tests.native.targets import build

pytestmark = pytest.mark.tools("gcc")
SEEDS = range(4)
ROUNDS = 60
MAX_GROWTH = 64 << 20


@dataclass(frozen=True)
class Image:
    """A real program; ``where``: (offset, size) of what is parsed, ``code`` of its code."""

    data: bytes
    where: list[tuple[int, int]]
    code: tuple[int, int]


@pytest.fixture(scope="module")
def image(tmp_path_factory: pytest.TempPathFactory) -> Image:
    path = build(tmp_path_factory.mktemp("hostile") / "names", "names.cc", "-Wl,--build-id")
    data = path.read_bytes()
    with open(path, "rb") as f:
        elf = ElfFile(f.fileno())
    (shoff,) = struct.unpack_from("<Q", data, 0x28)
    where = [(0, 64), (64, 56 * 13), (shoff, len(data) - shoff)]
    # Symbols, strings, notes, dynamic symbols, and .eh_frame_hdr with .eh_frame behind it.
    where += [(s.offset, s.size) for s in elf.sections if s.type in (2, 3, 7, 11) and s.size]
    assert elf.eh_frame_hdr is not None
    where += [(elf.eh_frame_hdr.offset, 2048)] * 3
    code = next(s for s in elf.loads if s.executable)
    return Image(data, where, (code.offset, code.size))


def mutated(image: Image, chance: random.Random) -> bytes:
    data = bytearray(image.data)
    for _ in range(chance.randint(1, 12)):
        offset, size = chance.choice(image.where)
        at = min(offset + chance.randrange(size), len(data) - 9)
        kind = chance.randrange(4)
        if kind == 0:
            data[at] = chance.randrange(256)
        elif kind == 1:
            data[at : at + 8] = struct.pack("<Q", chance.choice(
                (0, 1, 2**31, 2**32 - 1, 2**63, 2**64 - 1, len(data), len(data) - 8)))  # fmt: skip
        elif kind == 2:
            n = chance.randint(1, 64)
            data[at : at + n] = chance.randbytes(n)
        else:
            del data[at:]
            break
    return bytes(data)


def read_everything(image: Image, data: bytes, chance: random.Random) -> tuple[int, int]:
    """Name and unwind all over a file as the child would; how many names and frames there were."""
    reader = Reader(lambda _: None, load())
    fd = os.memfd_create("hostile")
    os.write(fd, data)
    reader.take([7], [fd])
    size, (start, length) = len(data), image.code
    offsets = [0, 1, size - 1, size, 1 << 63, *range(start, start + length, 16)]
    _, names = reader.names(7, offsets)
    low = 1 << 40
    reader.maps(1, [(low, low + len(image.data), 0, 7)])
    frames = 0
    for _ in range(20):
        # A stack on which every word is an address of code.
        words = (low + start + chance.randrange(length) for _ in range(256))
        ip = low + start + chance.randrange(1, length)
        found, note = reader.unwind(1, ip, 1 << 46, [1 << 46] * 6, struct.pack("<256Q", *words))
        frames += len(found)
        assert len(found) <= 128
        assert isinstance(note, str)
    reader.idle()
    reader.drop([7])
    return sum(bool(name) for _, name in names), frames


@pytest.mark.parametrize("seed", SEEDS)
def test_mutated_files(image: Image, seed: int) -> None:
    chance = random.Random(seed)
    read_everything(image, image.data, chance)
    tracemalloc.start()
    slowest = 0.0
    try:
        for _ in range(ROUNDS):
            data = mutated(image, chance)
            begun = time.process_time()
            read_everything(image, data, chance)
            slowest = max(slowest, time.process_time() - begun)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < MAX_GROWTH
    assert slowest < 20  # an endless loop, not a speed


def test_the_unchanged_file_is_read(image: Image) -> None:
    """What the mutations are measured against is not already unreadable."""
    names, frames = read_everything(image, image.data, random.Random(1))
    assert names > 20
    assert frames > 30


def test_a_sparse_file_of_a_terabyte(image: Image) -> None:
    """Tables may claim any size that the file has."""
    data = bytearray(image.data)
    (shoff,) = struct.unpack_from("<Q", data, 0x28)
    (count,) = struct.unpack_from("<H", data, 0x3C)
    for i in range(count):
        at = shoff + 64 * i
        if struct.unpack_from("<I", data, at + 4)[0] in (2, 11):
            struct.pack_into("<Q", data, at + 32, 1 << 39)  # sh_size
    fd = os.memfd_create("sparse")
    os.write(fd, data)
    os.ftruncate(fd, 1 << 40)
    reader = Reader(lambda _: None, load())
    reader.take([1], [fd])
    tracemalloc.start()
    begun = time.process_time()
    _, names = reader.names(1, list(range(0x1000, 0x2000, 64)))
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    reader.drop([1])
    assert time.process_time() - begun < 5
    assert peak < 1 << 20
    assert {name for _, name in names} == {""}


def test_what_is_no_elf_file_has_no_names() -> None:
    for content in (b"", b"\x7fELF", b"\x7fELF\x02\x01" + bytes(58), b"#!/bin/sh\n" * 100):
        fd = os.memfd_create("other")
        os.write(fd, content)
        reader = Reader(lambda _: None, load())
        reader.take([1], [fd])
        assert reader.names(1, [0, 5]) == ("", [(0, ""), (5, "")])
        reader.drop([1])


def test_maps_of_any_text() -> None:
    chance = random.Random(3)
    whole = Path("/proc/self/maps").read_bytes()
    assert len(Maps.parse(whole).ranges) > 5
    for _ in range(300):
        data = bytearray(whole)
        for _ in range(5):
            data[chance.randrange(len(data))] = chance.randrange(256)
        Maps.parse(bytes(data))
    line = b"55555555%04x-55555555%04x r-xp 00000000 08:01 5  /x\n"
    many = b"".join(line % (i & 0xFFFF, i + 1 & 0xFFFF) for i in range(2 * MAX_RANGES))
    assert len(Maps.parse(many).ranges) == MAX_RANGES


@pytest.mark.parametrize(
    ("mangled", "readable"),
    [
        ("_ZNSt6vectorIiSaIiEE4backEv", "std::vector<int, std::allocator<int> >::back()"),
        ("_ZN3foo3barEv.cold", "foo::bar() [clone .cold]"),
        ("malloc", "malloc"),
        ("_ZNnonsense", "_ZNnonsense"),
        ("_ZN4core3ptr13drop_in_place17h0123456789abcdefE", "core::ptr::drop_in_place"),
        ("_ZN60_$LT$alloc..vec..Vec$LT$T$GT$$u20$as$u20$core..ops..Drop$GT$4drop17h0123456789abcdefE",
         "<alloc::vec::Vec<T> as core::ops::Drop>::drop"),
        ("_Z" + "1a" * 3000, "_Z" + "1a" * 254 + "1…"),
        ("\ufffd\ufffd", "\ufffd\ufffd"),
    ],
)  # fmt: skip
def test_names_are_as_in_the_source(mangled: str, readable: str) -> None:
    assert load()(mangled) == readable
