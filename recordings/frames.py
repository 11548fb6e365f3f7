"""Frames: one batch of rows of one stream, and their bytes.

The bytes are the same on a socket and in a file: msgpack ``{"n": rows, "cols": {field: column}}``
where a column is the little-endian bytes of a numpy array, or a list of strings for text fields.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import msgpack
import numpy as np

from dsprobe.recordings.model import Rows, Stream

MAX_FRAME_BYTES = 16 << 20
MAX_FRAME_ROWS = 1 << 20
MAX_TEXT = 64 << 10


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


def encode(stream: Stream, rows: Rows) -> bytes:
    """The bytes of ``rows`` (dtype of ``stream``)."""
    cols: dict[str, Any] = {}
    for f in stream.fields:
        column = rows[f.name]
        if f.is_text:
            cols[f.name] = [str(v)[:MAX_TEXT] for v in column]
        else:
            cols[f.name] = np.ascontiguousarray(column).tobytes()
    packed: bytes = msgpack.packb({"n": len(rows), "cols": cols})
    return packed


def make(stream: Stream, seq: int, rows: Rows) -> Frame:
    """A frame of ``rows``, which must not be empty."""
    t = rows["t"]
    return Frame(stream.name, seq, int(t.min()), int(t.max()), len(rows), encode(stream, rows))


def decode(stream: Stream, data: bytes) -> Rows:
    """Rows of ``stream`` from bytes written by any version of dsprobe, or by an enemy.

    A column the writer did not have reads as zero or ``""``; columns that ``stream`` does not
    declare are ignored.  Raises :class:`FrameError` when the bytes do not fit the declaration.
    """
    if len(data) > MAX_FRAME_BYTES:
        raise FrameError(f"a frame of {len(data)} bytes")
    try:
        body = msgpack.unpackb(data, strict_map_key=False)
        n, cols = body["n"], body["cols"]
        if not isinstance(n, int) or not 0 <= n <= MAX_FRAME_ROWS or not isinstance(cols, dict):
            raise FrameError("no row count or columns")
        if n * stream.dtype.itemsize > 4 * MAX_FRAME_BYTES:
            raise FrameError(f"{n} rows of {stream.dtype.itemsize} bytes")
        rows = stream.empty(n)
        for f in stream.fields:
            if f.name in cols:
                rows[f.name] = _column(f.name, f.is_text, rows.dtype[f.name], cols[f.name], n)
    except FrameError:
        raise
    except (ValueError, KeyError, TypeError, OverflowError, RecursionError, MemoryError) as e:
        raise FrameError(f"unreadable frame: {e}") from None
    return rows


def _column(name: str, is_text: bool, dtype: np.dtype[Any], raw: Any, n: int) -> Any:
    if is_text:
        if not isinstance(raw, list) or len(raw) != n or not all(isinstance(v, str) for v in raw):
            raise FrameError(f"column {name} is not {n} strings")
        column = np.empty(n, object)
        column[:] = raw
        return column
    if not isinstance(raw, bytes) or len(raw) != n * dtype.itemsize:
        raise FrameError(f"column {name} is not {n} values")
    return np.frombuffer(raw, dtype.base).reshape(n, *dtype.shape)
