"""From a frame to its callers, over a copy of the top of a stack.

Runs in the child.  A wrong table can end the walk or lead it astray inside the copy; it reads
nothing else.  Sources: DWARF 5, 2.5 and 6.4.4; System V ABI x86-64, 3.2.1 (which registers a
function preserves).
"""

from __future__ import annotations

import struct
from bisect import bisect_right
from collections.abc import Callable, Sequence

from dsprobe.probes.native.ehframe import RA, RBP, RSP, Cursor, Row, Rule
from dsprobe.probes.native.elffile import ElfError

MAX_FRAMES = 128
MAX_OPERATIONS = 256
PRESERVED = (3, RBP, 12, 13, 14, 15)  # rbx, rbp, r12 to r15
_ALL = (1 << 64) - 1

Registers = dict[int, int]
RowAt = Callable[[int, int], "Row | None"]
"""File and offset in it to the row that holds there."""


class Ranges:
    """Executable memory of a process: (low, high, offset in the file, file), sorted."""

    def __init__(self, ranges: Sequence[tuple[int, int, int, int]]) -> None:
        self._ranges = ranges
        self._lows = [r[0] for r in ranges]

    def find(self, address: int) -> tuple[int, int] | None:
        """File (0: none) and offset in it; None where nothing executable is mapped."""
        i = bisect_right(self._lows, address) - 1
        if i < 0 or address >= self._ranges[i][1]:
            return None
        low, _, offset, file = self._ranges[i]
        return file, offset + address - low


class _Copy:
    def __init__(self, base: int, data: bytes) -> None:
        self._base, self._data = base, data

    def word(self, address: int) -> int | None:
        at = address - self._base
        if not 0 <= at <= len(self._data) - 8:
            return None
        value: int = struct.unpack_from("<Q", self._data, at)[0]
        return value


def walk(
    ranges: Ranges, row_at: RowAt, ip: int, registers: Registers, base: int, copy: bytes
) -> tuple[list[tuple[int, int]], str]:
    """Addresses from ``ip`` on, innermost first, and why they end early.

    With each, how far before it the instruction is: 1, as it is a return address and may be the
    first of the next function; 0 where a signal interrupted.  ``ip`` is a return address.
    ``registers`` are by DWARF number; ``base`` is the address of the first byte of ``copy``.
    """
    stack = _Copy(base, copy)
    found: list[tuple[int, int]] = []
    returned = 1
    while True:
        place = ranges.find(ip - returned)
        if place is None:
            return found, "no code at the return address"
        if len(found) >= MAX_FRAMES:
            return found, f"more than {MAX_FRAMES} frames"
        found.append((ip, returned))
        file, offset = place
        if not file:
            return found, "code that lies in no file"
        try:
            row = row_at(file, offset)
            if row is None:
                return found, "no unwind table for this code"
            after = _caller(row, registers, ip, stack)
        except ElfError as e:
            return found, f"unwinding ends here: {e}"
        if after is None:
            return found, ""
        ip, registers = after
        if not ip:
            return found, ""
        returned = 0 if row.signal else 1


def _caller(row: Row, registers: Registers, ip: int, stack: _Copy) -> tuple[int, Registers] | None:
    """Address and registers of the caller, None where this is the outermost frame."""
    rule = row.rules.get(RA)
    if rule is None or rule.kind == "undefined":
        return None
    known = {**registers, RA: ip}
    if row.code:
        cfa = evaluate(row.code, known, stack.word, [])
    elif row.cfa in registers:
        cfa = registers[row.cfa] + row.offset & _ALL
    else:
        raise ElfError("the frame depends on a register that is not known")
    if not row.signal and cfa <= registers[RSP]:
        raise ElfError("a frame above its caller's")
    address = _value(rule, cfa, known, stack)
    if address is None:
        raise ElfError("the copy of the stack ends")
    after = {RSP: cfa}
    for register in PRESERVED:
        rule = row.rules.get(register)
        value = registers.get(register) if rule is None else _value(rule, cfa, known, stack)
        if value is not None:
            after[register] = value
    if row.signal:
        rule = row.rules.get(RSP)
        sp = None if rule is None else _value(rule, cfa, known, stack)
        after[RSP] = cfa if sp is None else sp
    return address, after


def _value(rule: Rule, cfa: int, registers: Registers, stack: _Copy) -> int | None:
    if rule.kind == "at":
        return stack.word(cfa + rule.value & _ALL)
    if rule.kind == "is":
        return cfa + rule.value & _ALL
    if rule.kind == "register":
        return registers.get(rule.value)
    if rule.kind == "undefined":
        return None
    value = evaluate(rule.code, registers, stack.word, [cfa])
    return stack.word(value) if rule.kind == "at expression" else value


def _signed(value: int) -> int:
    return value - (1 << 64) if value >> 63 else value


_BINARY: dict[int, Callable[[int, int], int]] = {
    0x1A: lambda a, b: a & b,
    0x1C: lambda a, b: a - b,
    0x1E: lambda a, b: a * b,
    0x21: lambda a, b: a | b,
    0x22: lambda a, b: a + b,
    0x24: lambda a, b: a << b if b < 64 else 0,
    0x25: lambda a, b: a >> b if b < 64 else 0,
    0x27: lambda a, b: a ^ b,
    0x29: lambda a, b: int(a == b),
    0x2A: lambda a, b: int(_signed(a) >= _signed(b)),
    0x2B: lambda a, b: int(_signed(a) > _signed(b)),
    0x2C: lambda a, b: int(_signed(a) <= _signed(b)),
    0x2D: lambda a, b: int(_signed(a) < _signed(b)),
    0x2E: lambda a, b: int(a != b),
}
_CONSTANTS = {0x08: (1, False), 0x09: (1, True), 0x0A: (2, False), 0x0B: (2, True),
              0x0C: (4, False), 0x0D: (4, True), 0x0E: (8, False), 0x0F: (8, True)}  # fmt: skip


def evaluate(
    code: bytes, registers: Registers, word: Callable[[int], int | None], stack: list[int]
) -> int:
    """The value of a DWARF expression without branches, which unwind tables do not use."""
    c = Cursor(code)
    for _ in range(MAX_OPERATIONS):
        if c.at == len(code):
            if not stack:
                raise ElfError("an expression without a value")
            return stack[-1]
        op = c.byte()
        if 0x30 <= op <= 0x4F:  # lit
            stack.append(op - 0x30)
        elif 0x70 <= op <= 0x8F:  # breg
            register, offset = op - 0x70, c.sleb()
            if register not in registers:
                raise ElfError("an expression with a register that is not known")
            stack.append(registers[register] + offset & _ALL)
        elif op in _CONSTANTS:
            stack.append(c.fixed(*_CONSTANTS[op]) & _ALL)
        elif op == 0x10:
            stack.append(c.uleb() & _ALL)
        elif op == 0x11:
            stack.append(c.sleb() & _ALL)
        elif op in _BINARY:
            if len(stack) < 2:
                raise ElfError("an expression short of values")
            b, a = stack.pop(), stack.pop()
            stack.append(_BINARY[op](a, b) & _ALL)
        elif not stack:
            raise ElfError("an expression short of values")
        elif op == 0x06:  # deref
            value = word(stack.pop())
            if value is None:
                raise ElfError("the copy of the stack ends")
            stack.append(value)
        elif op == 0x12:  # dup
            stack.append(stack[-1])
        elif op == 0x13:  # drop
            stack.pop()
        elif op == 0x23:  # plus_uconst
            stack.append(stack.pop() + c.uleb() & _ALL)
        elif op == 0x96:  # nop
            pass
        else:
            raise ElfError("an unknown operation in an expression")
    raise ElfError("an expression without an end")
