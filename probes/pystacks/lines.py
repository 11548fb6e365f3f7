"""Line numbers from the tables in code objects.

3.11 on: Objects/locations.md (or InternalDocs/code_objects.md); 3.10: Objects/lnotab_notes.txt.
The tables are another process's: whatever they hold, a walk ends at their end.
"""

from __future__ import annotations

_NO_LINE = -128  # 3.10: this range belongs to no line
_NO_INFO, _LONG, _NO_COLUMNS, _ONE_LINE = 15, 14, 13, range(10, 13)
MAX_LINE = (1 << 31) - 1


def line_at(table: bytes, first: int, offset: int, minor: int) -> int:
    """The line of the instruction ``offset`` bytes into the code; 0 where it has none.

    ``table`` is co_linetable and ``first`` co_firstlineno.
    """
    line = _line_310(table, first, offset) if minor == 10 else _line_311(table, first, offset)
    return line if 0 < line <= MAX_LINE else 0


def _line_311(table: bytes, line: int, offset: int) -> int:
    at, begin, n = 0, 0, len(table)
    while at < n:
        head = table[at]
        code, end = head >> 3 & 15, begin + 2 * ((head & 7) + 1)
        at += 1
        if code in (_LONG, _NO_COLUMNS):
            step, shift, more = 0, 0, True
            while more and at < n:
                b = table[at]
                at += 1
                step |= (b & 63) << min(shift, 64)
                shift += 6
                more = bool(b & 64)
            line += -(step >> 1) if step & 1 else step >> 1
        elif code in _ONE_LINE:
            line += code - _ONE_LINE.start
        if offset < end:
            return line if offset >= begin and code != _NO_INFO else 0
        begin = end
        while at < n and not table[at] & 128:  # columns
            at += 1
    return 0


def _line_310(table: bytes, line: int, offset: int) -> int:
    begin = 0
    for i in range(0, len(table) - 1, 2):
        end, step = begin + table[i], (table[i + 1] ^ 128) - 128
        if step != _NO_LINE:
            line += step
        if offset < end:
            return line if offset >= begin and step != _NO_LINE else 0
        begin = end
    return 0
