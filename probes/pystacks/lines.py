"""Line numbers from the tables in code objects.

3.11 on: Objects/locations.md (or InternalDocs/code_objects.md); 3.10: Objects/lnotab_notes.txt.
The tables are another process's, and may say anything; numpy reads one as a whole, once.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

_NO_LINE = -128  # 3.10: this range belongs to no line
_HEAD, _NO_INFO, _LONG, _NO_COLUMNS, _ONE_LINE = 128, 15, 14, 13, range(10, 13)
_MAX_VARINT = 6  # bytes of 6 bits, for the 32 bits that CPython writes
MAX_LINE = (1 << 31) - 1

_Array = npt.NDArray[np.int64]


class Lines:
    """``table`` is co_linetable and ``first`` co_firstlineno."""

    def __init__(self, table: bytes, first: int, minor: int) -> None:
        data = np.frombuffer(table, np.uint8)
        widths, steps, known = _entries_310(data) if minor == 10 else _entries_311(data)
        lines = first + np.cumsum(steps)
        lines[~known | (lines <= 0) | (lines > MAX_LINE)] = 0
        self._ends = np.cumsum(widths).astype(np.int32)
        self._lines = lines.astype(np.int32)

    @property
    def bytes(self) -> int:
        """Of memory."""
        return self._ends.nbytes + self._lines.nbytes

    def at(self, offset: int) -> int:
        """The line of the instruction ``offset`` bytes into the code; 0 where it has none."""
        if not len(self._ends) or not 0 <= offset < self._ends[-1]:
            return 0
        return int(self._lines[np.searchsorted(self._ends, offset, "right")])


def _entries_311(data: npt.NDArray[np.uint8]) -> tuple[_Array, _Array, npt.NDArray[np.bool_]]:
    """Bytes of code, lines to go on, and whether it has a line, of each entry."""
    heads = np.flatnonzero(data & _HEAD)
    codes = data[heads] >> 3 & 15
    steps = np.zeros(len(heads), np.int64)
    known = codes != _NO_INFO
    same = (codes >= _ONE_LINE.start) & (codes < _ONE_LINE.stop)
    steps[same] = codes[same].astype(np.int64) - _ONE_LINE.start
    far = np.flatnonzero((codes == _LONG) | (codes == _NO_COLUMNS))
    numbers, more = np.zeros(len(far), np.int64), np.ones(len(far), np.bool_)
    padded = np.append(data, np.full(_MAX_VARINT + 1, 64, np.uint8))  # what is cut off goes on
    for i in range(_MAX_VARINT):
        digits = padded[heads[far] + 1 + i]
        numbers[more] |= (digits[more].astype(np.int64) & 63) << 6 * i
        more &= (digits & 64) != 0
    steps[far] = np.where(numbers & 1, -(numbers >> 1), numbers >> 1)
    if more.any():  # longer than any: what follows means nothing
        known[far[more][0] :] = False
    return 2 * ((data[heads] & 7).astype(np.int64) + 1), steps, known


def _entries_310(data: npt.NDArray[np.uint8]) -> tuple[_Array, _Array, npt.NDArray[np.bool_]]:
    pairs = data[: len(data) // 2 * 2].reshape(-1, 2)
    steps = pairs[:, 1].astype(np.int8).astype(np.int64)
    known = steps != _NO_LINE
    return pairs[:, 0].astype(np.int64), np.where(known, steps, 0), known
