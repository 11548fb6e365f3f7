"""What a shared library exports, read without trust.

Any process may map a file that calls itself a driver library, and root reads it.  So every offset
and length is checked against the file, what is read is bounded, and so is the work: one table of
symbols of a kind, as linkers write them, whose names numpy compares; Python looks only at those
that were asked for.
Source: elf(5), System V ABI.
"""

from __future__ import annotations

import os
import struct
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from dsprobe.recordings.model import Rows

MAX_NAMES = 32 << 20
"""Bytes of a table of names."""
MAX_SYMBOLS = 1_000_000
"""In one table.  Drivers export a thousand; a program linked with much else has some 100,000."""
MAX_FUNCTIONS = 4096
"""That one asks for at once."""
MAX_SECTIONS, MAX_SEGMENTS, MAX_NOTES = 4096, 128, 16
_AT_ONCE = 1 << 16  # symbols: so little memory is needed beside the names
_MAX_NAME = 256
_EHDR = struct.Struct("<16sHHIQQQIHHHHHH")
_PHDR = struct.Struct("<IIQQQQQQ")
_SHDR = np.dtype(
    [("name", "<u4"), ("type", "<u4"), ("flags", "<u8"), ("addr", "<u8"), ("offset", "<u8"),
     ("size", "<u8"), ("link", "<u4"), ("info", "<u4"), ("align", "<u8"), ("entsize", "<u8")]
)  # fmt: skip
_SYMBOL = np.dtype(
    [("name", "<u4"), ("info", "u1"), ("other", "u1"), ("section", "<u2"), ("value", "<u8"),
     ("size", "<u8")]
)  # fmt: skip
_PF_X = 1
_PT_LOAD, _SHT_SYMTAB, _SHT_NOTE, _SHT_DYNSYM = 1, 2, 7, 11
_STT_FUNC, _STT_GNU_IFUNC = 2, 10
_NT_GNU_BUILD_ID = 3
MACHINES = {62: "x86_64", 183: "aarch64"}


class ElfError(ValueError):
    """Not a 64-bit little-endian shared library, or one whose tables lie outside the file."""


@dataclass(frozen=True)
class Function:
    """``offset`` in the file and ``size`` in bytes (0 where the library does not say)."""

    offset: int
    size: int


class Library:
    """The ELF file behind ``fd``, which stays the caller's."""

    def __init__(self, fd: int) -> None:
        self._fd = fd
        self._length = os.fstat(fd).st_size
        try:
            head = _EHDR.unpack(self._read(0, _EHDR.size))
        except struct.error:
            raise ElfError("shorter than an ELF header") from None
        ident, _, machine, _, _, phoff, shoff, _, _, phsize, phnum, shsize, shnum, _ = head
        if ident[:6] != b"\x7fELF\x02\x01":
            raise ElfError("not a 64-bit little-endian ELF file")
        if phsize != _PHDR.size or shsize != _SHDR.itemsize or shnum > MAX_SECTIONS:
            raise ElfError("headers of an unknown size")
        if phnum > MAX_SEGMENTS:
            raise ElfError(f"more than {MAX_SEGMENTS} segments")
        self.machine = MACHINES.get(machine, f"machine {machine}")
        self._loads = [
            p for p in _PHDR.iter_unpack(self._read(phoff, phnum * phsize)) if p[0] == _PT_LOAD
        ]
        self._sections = np.frombuffer(self._read(shoff, shnum * shsize), _SHDR)

    def _read(self, offset: int, size: int) -> bytes:
        if offset + size > self._length:
            raise ElfError("a table lies outside the file")
        data = os.pread(self._fd, size, offset)
        if len(data) != size:
            raise ElfError("the file ends inside a table")
        return data

    def _symbols(self, kind: int) -> Iterator[tuple[Rows, npt.NDArray[np.uint8]]]:
        """Defined symbols of the first table of a kind, some at a time, and all names."""
        for section in self._sections[self._sections["type"] == kind][:1]:
            if section["link"] >= len(self._sections):
                raise ElfError("a symbol table without names")
            names_at = self._sections[section["link"]]
            count = int(section["size"]) // _SYMBOL.itemsize
            if count > MAX_SYMBOLS or names_at["size"] > MAX_NAMES:
                raise ElfError(
                    f"more than {MAX_SYMBOLS:,} symbols, or {MAX_NAMES >> 20} MiB of their names"
                )
            names = np.frombuffer(
                self._read(int(names_at["offset"]), int(names_at["size"])), np.uint8
            )
            for first in range(0, count, _AT_ONCE):
                size = min(count - first, _AT_ONCE) * _SYMBOL.itemsize
                at = int(section["offset"]) + first * _SYMBOL.itemsize
                symbols = np.frombuffer(self._read(at, size), _SYMBOL)
                yield symbols[symbols["section"] != 0], names

    def _file_offset(self, address: int) -> int:
        for _, _, offset, vaddr, _, filesz, _, _ in self._loads:
            if vaddr <= address < vaddr + filesz:
                return int(address - vaddr + offset)
        raise ElfError("an address outside the loaded segments")

    def text(self, f: Function) -> tuple[int, int]:
        """Where in the file the executable segment begins and ends that holds a function."""
        for _, flags, offset, _, _, filesz, _, _ in self._loads:
            if flags & _PF_X and offset <= f.offset < offset + filesz:
                return int(offset), int(offset + filesz)
        raise ElfError("a function outside the executable segments")

    def functions(self, prefix: str) -> dict[str, Function]:
        """Exported functions whose names begin with ``prefix``, by name."""
        found: dict[str, Function] = {}
        looked = 0
        for symbols, names in self._symbols(_SHT_DYNSYM):
            kind = symbols["info"] & 15
            code = symbols[(kind == _STT_FUNC) | (kind == _STT_GNU_IFUNC)]
            code = _beginning(code, names, prefix.encode())
            looked += len(code)
            if looked > MAX_FUNCTIONS:
                raise ElfError(f"more than {MAX_FUNCTIONS:,} functions whose names begin so")
            for s in code:
                at = int(s["name"])
                name = names[at : at + _MAX_NAME].tobytes().partition(b"\0")[0]
                where = self._file_offset(int(s["value"]))
                found[name.decode("ascii", "replace")] = Function(where, int(s["size"]))
        return found

    def addresses(self, *wanted: str) -> dict[str, int]:
        """Addresses of symbols, exported or not, as the file's program headers count them."""
        found: dict[str, int] = {}
        for kind in (_SHT_DYNSYM, _SHT_SYMTAB):
            if len(found) == len(wanted):
                break
            for symbols, names in self._symbols(kind):
                for name in (n for n in wanted if n not in found):
                    here = _beginning(symbols, names, name.encode() + b"\0")
                    if len(here):
                        found[name] = int(here[0]["value"])
        return found

    def address_of(self, offset: int) -> int:
        """Address, as the program headers count it, of what lies at ``offset`` in the file."""
        page = 4096
        for _, _, begin, vaddr, _, filesz, _, _ in self._loads:
            if begin // page * page <= offset < begin + filesz:
                return int(vaddr + offset - begin)
        raise ElfError("an offset outside the loaded segments")

    def build_id(self) -> str:
        """The GNU build id in hexadecimal, "" where there is none."""
        for section in self._sections[self._sections["type"] == _SHT_NOTE][:MAX_NOTES]:
            if section["size"] > 4096:
                continue
            note = self._read(int(section["offset"]), int(section["size"]))
            if len(note) < 16:
                continue
            namesz, descsz, kind = struct.unpack_from("<III", note)
            if kind == _NT_GNU_BUILD_ID and namesz == 4 and descsz <= len(note) - 16:
                return note[16 : 16 + descsz].hex()
        return ""

    def code(self, f: Function, size: int) -> bytes:
        """The first ``size`` bytes of a function, fewer where the file or the function ends."""
        limit = min(size, f.size or size, max(self._length - f.offset, 0))
        return self._read(f.offset, limit)


def _beginning(symbols: Rows, names: npt.NDArray[np.uint8], text: bytes) -> Rows:
    """Those symbols whose names begin with ``text``."""
    symbols = symbols[symbols["name"].astype(np.int64) + len(text) <= len(names)]
    for i, letter in enumerate(text):
        symbols = symbols[names[symbols["name"].astype(np.int64) + i] == letter]
    return symbols
