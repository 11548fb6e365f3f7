"""An ELF file read without trust: segments, sections, build id.

Runs in the child (:mod:`dsprobe.probes.native.child`), which has no numpy to stay small.  Every
offset and length is checked against the file; a table is read in pieces, or refused by its size.
Source: elf(5), System V ABI.
"""

from __future__ import annotations

import os
import struct
from dataclasses import dataclass

MAX_HEADERS = 4096
MAX_NOTES = 64 << 10
_EHDR = struct.Struct("<16sHHIQQQIHHHHHH")
_PHDR = struct.Struct("<IIQQQQQQ")
_SHDR = struct.Struct("<IIQQQQIIQQ")
_PT_LOAD, _PT_NOTE, _PT_GNU_EH_FRAME = 1, 4, 0x6474E550
_PF_X = 1
_NT_GNU_BUILD_ID = 3
X86_64 = 62


class ElfError(ValueError):
    """Not a 64-bit little-endian ELF file, or one whose tables lie outside it."""


@dataclass(frozen=True)
class Segment:
    offset: int
    address: int
    size: int  # bytes in the file
    executable: bool


@dataclass(frozen=True)
class Section:
    type: int
    address: int
    offset: int
    size: int
    link: int


class ElfFile:
    """The file behind ``fd``, which stays the caller's.  Raises :class:`ElfError` and OSError."""

    def __init__(self, fd: int) -> None:
        self._fd = fd
        self.size = os.fstat(fd).st_size
        head = _EHDR.unpack(self.read(0, _EHDR.size))
        ident, _, self.machine, _, _, phoff, shoff, _, _, phsize, phnum, shsize, shnum, _ = head
        if ident[:6] != b"\x7fELF\x02\x01":
            raise ElfError("not a 64-bit little-endian ELF file")
        if phsize != _PHDR.size or not 0 < phnum <= MAX_HEADERS:
            raise ElfError("no program headers of the known size")
        self.loads: list[Segment] = []
        self.eh_frame_hdr: Segment | None = None
        self._notes: list[Segment] = []
        for kind, flags, offset, vaddr, _, filesz, _, _ in _PHDR.iter_unpack(
            self.read(phoff, phnum * phsize)
        ):
            segment = Segment(offset, vaddr, filesz, bool(flags & _PF_X))
            if kind == _PT_LOAD:
                self.loads.append(segment)
            elif kind == _PT_NOTE:
                self._notes.append(segment)
            elif kind == _PT_GNU_EH_FRAME:
                self.eh_frame_hdr = segment
        self.sections = self._read_sections(shoff, shsize, shnum)

    def _read_sections(self, offset: int, size: int, count: int) -> list[Section]:
        """Section headers, which a program runs without: none where they cannot be read."""
        if size != _SHDR.size or count > MAX_HEADERS:
            return []
        try:
            table = self.read(offset, size * count)
        except ElfError:
            return []
        return [Section(s[1], s[3], s[4], s[5], s[6]) for s in _SHDR.iter_unpack(table)]

    def read(self, offset: int, size: int) -> bytes:
        """Exactly these bytes.  The caller bounds ``size``."""
        if size < 0 or offset + size > self.size:
            raise ElfError("a table lies outside the file")
        data = os.pread(self._fd, size, offset)
        if len(data) != size:
            raise ElfError("the file ends inside a table")
        return data

    def read_some(self, offset: int, size: int) -> bytes:
        """These bytes, fewer where the file ends."""
        return self.read(offset, max(0, min(size, self.size - offset)))

    def address(self, offset: int) -> int:
        """Address, as in the program headers, of the byte of code at ``offset`` of the file."""
        for s in self.loads:
            if s.executable and s.offset <= offset < s.offset + s.size:
                return s.address + offset - s.offset & (1 << 64) - 1
        raise ElfError("an offset outside the executable segments")

    def offset(self, address: int) -> int:
        """Where in the file the byte at ``address`` lies."""
        for s in self.loads:
            if s.address <= address < s.address + s.size:
                return address - s.address + s.offset
        raise ElfError("an address outside the loaded segments")

    def build_id(self) -> str:
        """The GNU build id in hexadecimal, "" where there is none."""
        for segment in self._notes:
            try:
                notes = self.read(segment.offset, min(segment.size, MAX_NOTES))
            except ElfError:
                continue
            at = 0
            while at + 12 <= len(notes):
                namesz, descsz, kind = struct.unpack_from("<III", notes, at)
                desc = at + 12 + (namesz + 3 & ~3)
                if kind == _NT_GNU_BUILD_ID and notes[at + 12 : at + 12 + namesz] == b"GNU\0":
                    return notes[desc : desc + min(descsz, 64)].hex()
                at = desc + (descsz + 3 & ~3)
        return ""
