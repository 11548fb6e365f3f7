"""Unwind rows of an ELF file: where, at an address, the caller's frame and registers are.

x86_64 code is built without frame pointers, so only the tables that exceptions use tell how to get
from a function to its caller.  Runs in the child.  A table that is not understood gives no row.
Sources: DWARF 5, 6.4; Linux Standard Base 5.0, .eh_frame and .eh_frame_hdr; System V ABI x86-64,
table 3.36 (register numbers).
"""

from __future__ import annotations

import struct
from dataclasses import dataclass, field

from dsprobe.probes.native.elffile import X86_64, ElfError, ElfFile

RBP, RSP, RA = 6, 7, 16
MAX_ENTRY = 64 << 10  # bytes of one CIE or FDE
MAX_STEPS = 20_000  # instructions of one row; the longest in real libraries have some hundreds
MAX_TABLE = 4 << 20  # functions of one file
MAX_REGISTER = 128
MAX_STATES = 64  # depth of DW_CFA_remember_state

_DATAREL_SDATA4 = 0x3B
_BYTES = {0: 8, 2: 2, 3: 4, 4: 8, 10: 2, 11: 4, 12: 8}  # DW_EH_PE formats of a fixed size


@dataclass(frozen=True)
class Rule:
    """How to find a register's value in the caller.

    ``kind``: "at" (saved ``value`` bytes from the CFA), "is" (CFA + ``value``), "register"
    (another one, ``value``), "at expression", "is expression" (``code``), or "undefined".
    """

    kind: str
    value: int = 0
    code: bytes = b""


@dataclass(frozen=True)
class Row:
    """The canonical frame address is register ``cfa`` + ``offset``, or what ``code`` computes.

    A register without a rule keeps its value.  ``signal``: the frame was interrupted, so its
    caller's address is that of an instruction and not a return address.
    """

    cfa: int
    offset: int
    code: bytes
    rules: dict[int, Rule]
    signal: bool


@dataclass
class _State:
    location: int
    cfa: int = RSP
    offset: int = 8
    code: bytes = b""
    rules: dict[int, Rule] = field(default_factory=dict)
    saved: list[tuple[int, int, bytes, dict[int, Rule]]] = field(default_factory=list)
    steps: int = 0


class Cursor:
    """Bytes read one after the other; raises ElfError past the end."""

    def __init__(self, data: bytes, at: int = 0) -> None:
        self.data, self.at = data, at

    def take(self, size: int) -> bytes:
        end = self.at + size
        if end > len(self.data):
            raise ElfError("an unwind entry ends too early")
        piece = self.data[self.at : end]
        self.at = end
        return piece

    def byte(self) -> int:
        return self.take(1)[0]

    def fixed(self, size: int, signed: bool = False) -> int:
        return int.from_bytes(self.take(size), "little", signed=signed)

    def uleb(self) -> int:
        result = 0
        for shift in range(0, 70, 7):
            b = self.byte()
            result |= (b & 127) << shift
            if b < 128:
                return result
        raise ElfError("a number without an end")

    def sleb(self) -> int:
        at = self.at
        result = self.uleb()
        bits = 7 * (self.at - at)
        return result - (1 << bits) if result >> (bits - 1) else result

    def block(self) -> bytes:
        return self.take(self.uleb())


@dataclass(frozen=True)
class _Cie:
    code_align: int
    data_align: int
    encoding: int
    augmented: bool
    signal: bool
    instructions: bytes


class UnwindTable:
    """The rows of ``elf``, by way of its .eh_frame_hdr."""

    def __init__(self, elf: ElfFile) -> None:
        self._elf = elf
        self._count = 0
        header = elf.eh_frame_hdr
        if header is None or elf.machine != X86_64:
            return
        version, frame, count, table = elf.read(header.offset, 4)
        if version != 1 or count != 3 or table != _DATAREL_SDATA4 or frame & 15 not in (3, 11):
            raise ElfError("an unwind table of an unknown kind")
        (self._count,) = struct.unpack("<I", elf.read(header.offset + 8, 4))
        if self._count > MAX_TABLE:
            raise ElfError("an unwind table of too many functions")
        self._base, self._table = header.address, header.offset + 12

    def __len__(self) -> int:
        return self._count

    def row(self, address: int) -> Row | None:
        """The row that holds at ``address``, None where the file has none."""
        entry = self._find(address)
        return None if entry is None else self._interpret(entry, address)

    def _find(self, address: int) -> int | None:
        """File offset of the entry of the last function that begins at or before ``address``."""
        low, high = 0, self._count
        found = None
        while low < high:
            middle = (low + high) // 2
            start, entry = struct.unpack("<ii", self._elf.read(self._table + 8 * middle, 8))
            if self._base + start <= address:
                low, found = middle + 1, entry
            else:
                high = middle
        return None if found is None else self._elf.offset(self._base + found)

    def _entry(self, at: int) -> bytes:
        (size,) = struct.unpack("<I", self._elf.read(at, 4))
        if not 8 <= size <= MAX_ENTRY:
            raise ElfError("an unwind entry of an unlikely size")
        return self._elf.read(at + 4, size)

    def _interpret(self, at: int, address: int) -> Row | None:
        c = Cursor(self._entry(at))
        cie = self._cie(at + 4 - c.fixed(4))
        size = _BYTES.get(cie.encoding & 15)
        if size is None or cie.encoding & 0x70 not in (0, 0x10):
            raise ElfError("an address in an unknown encoding")
        where = _address_of(self._elf, at + 4 + c.at)
        start = c.fixed(size, signed=bool(cie.encoding & 8))
        if cie.encoding & 0x70:
            start += where
        if not start <= address < start + c.fixed(size):
            return None
        if cie.augmented:
            c.block()
        state = _State(start)
        _execute(Cursor(cie.instructions), cie, state, address, {})
        _execute(c, cie, state, address, dict(state.rules))
        return Row(state.cfa, state.offset, state.code, state.rules, cie.signal)

    def _cie(self, at: int) -> _Cie:
        c = Cursor(self._entry(at))
        if c.fixed(4) != 0 or c.byte() not in (1, 3):
            raise ElfError("an unwind entry without a head")
        end = c.data.find(b"\0", c.at)
        augmentation = c.take(max(0, end - c.at))
        c.byte()
        code_align, data_align = c.uleb(), c.sleb()
        if c.uleb() != RA:
            raise ElfError("a return address in an unknown register")
        encoding, augmented = 0, augmentation[:1] == b"z"
        if augmented:
            rest = c.uleb() + c.at
            for letter in augmentation[1:]:
                if letter == ord("R"):
                    encoding = c.byte()
                elif letter == ord("P"):
                    c.take(_BYTES.get(c.byte() & 15, 0))
                elif letter == ord("L"):
                    c.byte()
                elif letter not in b"SB":
                    break
            c.at = rest
        elif augmentation:
            raise ElfError("an unwind entry of an unknown kind")
        return _Cie(code_align, data_align, encoding, augmented, b"S" in augmentation,
                    c.data[c.at :])  # fmt: skip


def _address_of(elf: ElfFile, offset: int) -> int:
    for s in elf.loads:
        if s.offset <= offset < s.offset + s.size:
            return s.address + offset - s.offset
    raise ElfError("an unwind entry outside the loaded segments")


def _execute(c: Cursor, cie: _Cie, state: _State, address: int, initial: dict[int, Rule]) -> None:
    """Run the instructions that hold at ``address``."""
    rules, factor = state.rules, cie.data_align
    while c.at < len(c.data):
        state.steps += 1
        if state.steps > MAX_STEPS:
            raise ElfError("an unwind entry without an end")
        op = c.byte()
        low, high = op & 63, op >> 6
        advance = 0
        if high == 1:
            advance = low
        elif high == 2:
            rules[low] = Rule("at", c.uleb() * factor)
        elif high == 3 or low == 0x06:  # restore, restore_extended
            register = low if high == 3 else c.uleb()
            rules.pop(register, None)
            if register in initial:
                rules[register] = initial[register]
        elif low in (2, 3, 4):
            advance = c.fixed(1 << (low - 2))
        elif low == 0x05:  # offset_extended
            _set(rules, c.uleb(), Rule("at", c.uleb() * factor))
        elif low == 0x07:
            _set(rules, c.uleb(), Rule("undefined"))
        elif low == 0x08:  # same_value
            rules.pop(c.uleb(), None)
        elif low == 0x09:
            _set(rules, c.uleb(), Rule("register", c.uleb()))
        elif low == 0x0A:  # remember_state
            if len(state.saved) >= MAX_STATES:
                raise ElfError("unwind states without an end")
            state.saved.append((state.cfa, state.offset, state.code, dict(rules)))
        elif low == 0x0B:  # restore_state
            if not state.saved:
                raise ElfError("an unwind state that was never remembered")
            state.cfa, state.offset, state.code, before = state.saved.pop()
            rules.clear()
            rules.update(before)
        elif low == 0x0C:  # def_cfa
            state.cfa, state.offset, state.code = c.uleb(), c.uleb(), b""
        elif low == 0x0D:
            state.cfa, state.code = c.uleb(), b""
        elif low == 0x0E:
            state.offset = c.uleb()
        elif low == 0x0F:
            state.code = c.block()
        elif low in (0x10, 0x16):  # expression, val_expression
            kind = "at expression" if low == 0x10 else "is expression"
            _set(rules, c.uleb(), Rule(kind, code=c.block()))
        elif low == 0x11:  # offset_extended_sf
            _set(rules, c.uleb(), Rule("at", c.sleb() * factor))
        elif low == 0x12:  # def_cfa_sf
            state.cfa, state.offset, state.code = c.uleb(), c.sleb() * factor, b""
        elif low == 0x13:
            state.offset = c.sleb() * factor
        elif low in (0x14, 0x15):  # val_offset, val_offset_sf
            register = c.uleb()
            _set(rules, register, Rule("is", (c.sleb() if low & 1 else c.uleb()) * factor))
        elif low == 0x2E:  # GNU_args_size
            c.uleb()
        elif low != 0:
            raise ElfError("an unknown unwind instruction")
        if advance:
            state.location += advance * cie.code_align
            if state.location > address:
                return


def _set(rules: dict[int, Rule], register: int, rule: Rule) -> None:
    if register > MAX_REGISTER:
        raise ElfError("an unlikely register")
    rules[register] = rule
