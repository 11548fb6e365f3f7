"""Frames: one batch of rows of one stream, and their bytes.

The bytes are the same on a socket and in a file: msgpack
``{"n": rows, "enc": coding, "cols": {field: column}}``, where a column is the little-endian bytes
of a numpy array, or a list of strings for text fields.  ``enc`` is absent for plain columns, which
are the cheapest to make.  Files use ``"planes"``: numbers wider than a byte are stored byte plane
by byte plane, and ``t`` as differences (modulo 2**64) from the row before it; that takes a tenth to
a third off what zstd makes of them.  Keys and columns that a reader does not know are skipped.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import msgpack
import numpy as np

from dsprobe.recordings.model import Field, Rows, Stream

MAX_FRAME_BYTES = 16 << 20
MAX_FRAME_ROWS = 1 << 20
MAX_TEXT = 64 << 10
MAX_DECODED_BYTES = 32 << 20
TEXT_CELL_BYTES = 64
"""What a short string costs in memory, over its pointer."""

PLANES = "planes"

# First bytes of msgpack values (https://github.com/msgpack/msgpack/blob/master/spec.md).  A value
# is unpacked only after its first byte said that it is a number, string or bytes: those cannot
# cost more memory than their own length, while nested arrays grow a hundredfold.
_INTS = frozenset((*range(0x80), 0xCC, 0xCD, 0xCE, 0xCF))
_STRS = frozenset((*range(0xA0, 0xC0), 0xD9, 0xDA, 0xDB))
_BINS = frozenset((0xC4, 0xC5, 0xC6))


_BAD = (
    ValueError,
    IndexError,
    KeyError,
    TypeError,
    OverflowError,
    MemoryError,
    msgpack.UnpackException,
)


class FrameError(ValueError):
    """Bytes that are not a frame of the stream they claim to belong to."""


@dataclass(frozen=True)
class Frame:
    """``seq`` counts the frames of this stream from 0; ``t0``/``t1`` are its first and last ``t``.

    ``n`` is the number of rows.  ``data`` is what :func:`encode` returned.
    """

    stream: str
    seq: int
    t0: int
    t1: int
    n: int
    data: bytes


def cost(stream: Stream, n: int) -> int:
    """Bytes of memory that ``n`` decoded rows of ``stream`` take, long texts not counted."""
    texts = sum(f.is_text for f in stream.fields)
    return n * (stream.dtype.itemsize + TEXT_CELL_BYTES * texts)


def encode(stream: Stream, rows: Rows, coding: str = "") -> bytes:
    """The bytes of ``rows`` (dtype of ``stream``); ``coding`` is ``""`` or :data:`PLANES`."""
    cols: dict[str, Any] = {}
    for f in stream.fields:
        column = rows[f.name]
        if f.is_text:
            cols[f.name] = [str(v)[:MAX_TEXT] for v in column]
        elif coding == PLANES:
            cols[f.name] = _to_planes(f, np.ascontiguousarray(column))
        else:
            cols[f.name] = np.ascontiguousarray(column).tobytes()
    body: dict[str, Any] = {"n": len(rows)}
    if coding:
        body["enc"] = coding
    body["cols"] = cols
    # A process may carry any bytes in its name; what is not UTF-8 becomes "?".
    packed: bytes = msgpack.packb(body, unicode_errors="replace")
    return packed


def make(stream: Stream, seq: int, rows: Rows) -> Frame:
    """A frame of ``rows``, which must not be empty."""
    t = rows["t"]
    return Frame(stream.name, seq, int(t.min()), int(t.max()), len(rows), encode(stream, rows))


def count(data: bytes) -> int:
    """Number of rows a frame says it has; :class:`FrameError` where it does not say."""
    try:
        return _Reader(data).header()[0]
    except _BAD as e:
        raise FrameError(f"unreadable frame: {e}") from None


def decode(stream: Stream, data: bytes) -> Rows:
    """Rows of ``stream`` from bytes written by any version of dsprobe, or by an enemy.

    A column the writer did not have reads as zero or ``""``; columns that ``stream`` does not
    declare are ignored.  Raises :class:`FrameError` when the bytes do not fit the declaration, or
    when the rows would take more than :data:`MAX_DECODED_BYTES`.
    """
    if len(data) > MAX_FRAME_BYTES:
        raise FrameError(f"a frame of {len(data)} bytes")
    try:
        reader = _Reader(data)
        n, coding = reader.header()
        if coding not in ("", PLANES):
            raise FrameError(f"columns coded as {coding[:20]!r}")
        if n > len(data) or cost(stream, n) > MAX_DECODED_BYTES:
            raise FrameError(f"{n} rows of {stream.dtype.itemsize} bytes")
        rows = stream.empty(n)
        seen = set()
        for _ in range(reader.map_header()):
            name = reader.text()
            f = stream.by_name.get(name)
            if f is None:
                reader.skip()
            elif f.is_text:
                rows[name] = reader.texts(name, n)
                seen.add(name)
            else:
                rows[name] = _column(f, reader.bytes(), n, coding)
                seen.add(name)
        if "t" not in seen or (n and int(rows["t"].max()) >> 62):
            raise FrameError("no usable column t")
    except FrameError:
        raise
    except _BAD as e:
        raise FrameError(f"unreadable frame: {e}") from None
    return rows


class _Reader:
    """A msgpack reader that takes only what the grammar of a frame has at that place."""

    def __init__(self, data: bytes) -> None:
        self._data = data
        self._in = msgpack.Unpacker(
            max_buffer_size=len(data) or 1,
            max_str_len=4 * MAX_TEXT,
            max_bin_len=len(data),
            max_array_len=MAX_FRAME_ROWS,
            max_map_len=4096,
        )
        self._in.feed(data)

    def header(self) -> tuple[int, str]:
        """``n`` and ``enc``; the reader then stands before the map of columns."""
        n, coding = -1, ""
        for _ in range(min(self.map_header(), 16)):
            key = self.text()
            if key == "cols":
                break
            if key == "n":
                n = self._take(_INTS, "a row count")
            elif key == "enc":
                coding = self.text()
            else:
                self.skip()
        if not 0 <= n <= MAX_FRAME_ROWS:
            raise FrameError("no row count")
        return n, coding

    def _take(self, first: frozenset[int], what: str) -> Any:
        if self._data[self._in.tell()] not in first:
            raise FrameError(f"something that is not {what}")
        return self._in.unpack()

    def map_header(self) -> int:
        n: int = self._in.read_map_header()
        return n

    def text(self) -> str:
        value: str = self._take(_STRS, "text")
        return value

    def bytes(self) -> bytes:
        value: bytes = self._take(_BINS, "a column")
        return value

    def texts(self, name: str, n: int) -> Any:
        if self._in.read_array_header() != n:
            raise FrameError(f"column {name} is not {n} strings")
        column = np.empty(n, object)
        for i in range(n):
            column[i] = self.text()
        return column

    def skip(self) -> None:
        self._in.skip()


def _to_planes(f: Field, column: Rows) -> bytes:
    if f.name == "t":
        column = np.diff(column, prepend=column.dtype.type(0))
    return _transpose(column).tobytes() if _wide(column.dtype) else column.tobytes()


def _wide(dtype: np.dtype[Any]) -> bool:
    return dtype.itemsize > 1 and dtype.kind != "S"


def _transpose(column: Rows) -> Rows:
    return column.reshape(-1).view(np.uint8).reshape(-1, column.dtype.itemsize).T


def _column(f: Field, raw: bytes, n: int, coding: str) -> Any:
    dtype = np.dtype(f.type)
    cells = n * max(f.shape, 1)
    if len(raw) != cells * dtype.itemsize:
        raise FrameError(f"column {f.name} is not {n} values")
    if coding == PLANES and _wide(dtype):
        planes = np.frombuffer(raw, np.uint8).reshape(dtype.itemsize, cells)
        column = np.ascontiguousarray(planes.T).view(dtype).reshape(-1)
        if f.name == "t":
            column = np.cumsum(column, dtype=dtype)
    else:
        column = np.frombuffer(raw, dtype)
    return column.reshape(n, f.shape) if f.shape else column
