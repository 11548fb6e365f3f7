"""Function symbols of an ELF file, sorted by address.

Runs in the child.  Which of several names of one address is shown follows perf
(tools/perf/util/symbol.c, choose_best_symbol): a global one before a weak one before a local one,
then the fewest underscores in front.
"""

from __future__ import annotations

import struct
from array import array
from bisect import bisect_left, bisect_right

from dsprobe.probes.native.elffile import ElfError, ElfFile, Section

MAX_SYMBOLS = 1_000_000
MAX_NAME = 4096
_PIECE = 4096  # symbols read at once
_SYMBOL = struct.Struct("<IBBHQQ")
_SHT_SYMTAB, _SHT_DYNSYM = 2, 11
_FUNCTIONS = (2, 10)  # STT_FUNC, STT_GNU_IFUNC
_RANK = {1: 0, 10: 0, 2: 1, 0: 2}  # STB_GLOBAL, STB_GNU_UNIQUE, STB_WEAK, STB_LOCAL
_AROUND = 32  # symbols before an address that are looked at for one that covers it


class Symbols:
    """The functions of ``elf`` in parallel arrays; from .symtab, or .dynsym of a stripped file."""

    def __init__(self, elf: ElfFile) -> None:
        self._elf = elf
        self._starts, self._sizes = array("Q"), array("Q")
        self._names, self._ranks = array("I"), array("B")
        self._strings: Section | None = None
        for kind in (_SHT_SYMTAB, _SHT_DYNSYM):
            for section in elf.sections:
                if section.type == kind and section.link < len(elf.sections):
                    self._strings = elf.sections[section.link]
                    self._load(section, whole=kind == _SHT_SYMTAB)
                    if self._starts:
                        return

    def __len__(self) -> int:
        return len(self._starts)

    def _load(self, section: Section, whole: bool) -> None:
        count = section.size // _SYMBOL.size
        if count > MAX_SYMBOLS:
            raise ElfError(f"{count} symbols")
        starts, sizes, names, ranks = array("Q"), array("Q"), array("I"), array("B")
        for first in range(0, count, _PIECE):
            piece = self._elf.read(
                section.offset + first * _SYMBOL.size, min(_PIECE, count - first) * _SYMBOL.size
            )
            for name, info, _, index, value, size in _SYMBOL.iter_unpack(piece):
                if info & 15 in _FUNCTIONS and index and name and (size or whole):
                    starts.append(value)
                    sizes.append(size)
                    names.append(name)
                    ranks.append(_RANK.get(info >> 4, 3))
        order = sorted(range(len(starts)), key=starts.__getitem__)
        self._starts = array("Q", map(starts.__getitem__, order))
        self._sizes = array("Q", map(sizes.__getitem__, order))
        self._names = array("I", map(names.__getitem__, order))
        self._ranks = array("B", map(ranks.__getitem__, order))

    def name(self, address: int) -> str:
        """The mangled name of the function that ``address`` lies in, "" where none is known."""
        last = bisect_right(self._starts, address)
        for i in range(last - 1, max(-1, last - 1 - _AROUND), -1):
            if address < self._end(i):
                return self._best(self._starts[i], address)
        return ""

    def _end(self, i: int) -> int:
        start = self._starts[i]
        if self._sizes[i]:
            return start + self._sizes[i]
        # Hand-written assembly may give no size: it ends with the next symbol or its section.
        after = bisect_right(self._starts, start)
        end = self._starts[after] if after < len(self._starts) else 1 << 64
        for s in self._elf.sections:
            if s.address and s.address <= start < s.address + s.size:
                return min(end, s.address + s.size)
        return start

    def _best(self, start: int, address: int) -> str:
        best: tuple[bool, int, int, str] | None = None
        first = bisect_left(self._starts, start)
        for i in range(first, min(first + _AROUND, len(self._starts))):
            if self._starts[i] != start:
                break
            if address >= self._end(i):
                continue
            name = self._string(self._names[i])
            plain = name.lstrip("_")
            grade = (not self._sizes[i], self._ranks[i], len(name) - len(plain), name)
            if name and (best is None or grade < best):
                best = grade
        return best[3] if best else ""

    def _string(self, at: int) -> str:
        strings = self._strings
        if strings is None or at >= strings.size:
            return ""
        try:
            raw = self._elf.read_some(strings.offset + at, min(MAX_NAME, strings.size - at))
        except ElfError:
            return ""
        name, end, _ = raw.partition(b"\0")
        return name.decode("ascii", "replace") if end else ""
