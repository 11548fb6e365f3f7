"""Rows in order, and frames that are missing: what every session does with the frames it gets."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from dsprobe.recordings.frames import TEXT_CELL_BYTES
from dsprobe.recordings.model import Rows, Stream


def in_order(rows: Rows) -> Rows:
    """``rows`` by ``t``, rows of one moment in the order they came."""
    t = rows["t"]
    if len(t) < 2 or bool((t[1:] >= t[:-1]).all()):
        return rows
    return rows[np.argsort(t, kind="stable")]


def between(rows: Rows, start: int, end: int) -> Rows:
    """The part of ordered ``rows`` with ``start <= t < end`` (a view)."""
    limits = np.array([min(max(v, 0), 1 << 63) for v in (start, end)], np.uint64)
    low, high = np.searchsorted(rows["t"], limits)
    return rows[low:high]


def join(stream: Stream, parts: Sequence[Rows]) -> Rows:
    """The ordered rows of several batches of ``stream``, given in the order they were written."""
    parts = [p for p in parts if len(p)]
    if not parts:
        return stream.empty()
    if len(parts) == 1:
        return in_order(parts[0])
    if stream.dtype.hasobject:
        return in_order(np.concatenate(parts))
    # As opaque bytes: numpy else copies field by field, twenty times slower.
    opaque = f"V{stream.dtype.itemsize}"
    return in_order(np.concatenate([p.view(opaque) for p in parts]).view(stream.dtype))


def fit(stream: Stream, rows: Rows) -> Rows:
    """``rows`` in the dtype of ``stream``: fields that they lack are zero, others are left out."""
    if rows.dtype == stream.dtype:
        return rows
    out = stream.empty(len(rows))
    for name in rows.dtype.names or ():
        if name in stream.by_name:
            out[name] = rows[name]
    return out


NEWER = {"gpu.memory": frozenset(("reclaimed", "reclaimed_bytes"))}
"""Fields, by stream, that sessions of an older version lack; they count as 0 there."""


def fits(stream: Stream, rows: Rows) -> bool:
    """Whether ``rows`` have the fields of ``stream``, in their types: a file may declare anything,
    and one of an older version lacks those of :data:`NEWER`, which :func:`fit` adds."""
    names, newer = rows.dtype.names or (), NEWER.get(stream.name, frozenset())
    return all(
        rows.dtype[name] == stream.dtype[name] if name in names else name in newer
        for name in stream.by_name
    )


def memory(stream: Stream, rows: Rows) -> int:
    """Bytes that ``rows`` take, texts included."""
    size = int(rows.nbytes)
    for f in stream.fields:
        if f.is_text:
            size += sum(map(len, rows[f.name])) + TEXT_CELL_BYTES * len(rows)
    return size


class Sequences:
    """Counts the frames of each stream that never came, by their sequence numbers."""

    def __init__(self) -> None:
        self._next: dict[str, int] = {}
        self.missing: dict[str, int] = {}

    def see(self, stream: str, seq: int, bits: int = 64) -> int:
        """Take note of frame ``seq``; how many are missing just before it.

        The first frame seen of a stream misses nothing: a reader may come late.  A number that
        went back is a producer that started again.  ``bits`` is the width at which numbers wrap.
        """
        wrap = 1 << bits
        expected = self._next.get(stream, seq)
        self._next[stream] = (seq + 1) % wrap
        gap = (seq - expected) % wrap
        if not gap or gap >= wrap // 2:
            return 0
        self.missing[stream] = self.missing.get(stream, 0) + gap
        return gap
