"""Rows that stand for intervals, ``(t - dt, t]``: which times they speak for."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import numpy.typing as npt

from dsprobe.recordings.assemble import fit, fits
from dsprobe.recordings.lane import Edges, spread
from dsprobe.recordings.model import Rows, Stream
from dsprobe.recordings.session import FOREVER, Session


def is_sampled(stream: Stream) -> bool:
    """Whether its rows stand for intervals; a file may declare anything."""
    return "dt" in stream.by_name and stream.dtype["dt"] == np.dtype("<u8")


def spoken(rows: Rows, edges: Edges) -> npt.NDArray[np.bool_]:
    """Buckets that a sample speaks for."""
    # All samples of one moment were taken together, after the same interval.
    first = np.flatnonzero(np.diff(rows["t"].astype(np.int64), prepend=-1))
    return np.asarray(spread(rows[first], np.ones(len(first)), edges) > 0)


def earliest(rows: Rows, late: int) -> int:
    """From when on the samples speak that were taken after an interval of over ``late`` ns."""
    t, dt = rows["t"].astype(np.int64), rows["dt"].astype(np.int64)
    after = dt > late
    # What was asked for before such a stall may have been given after it, too.
    return max(int((t - dt)[after].min()) - 1_000_000_000, 0) if after.any() else FOREVER


def ending(session: Session, stream: Stream, after: int, until: int) -> Rows:
    """Rows that end in (after, until], with the fields of ``stream`` alone: a later version may
    have written more.  None where they lack fields they need."""
    rows = session.read(stream.name, max(after, -1) + 1, until + 1)
    if not fits(stream, rows):
        return stream.empty()
    return fit(stream, rows)


SLAB = 60 * 10**9


def slabs(start: int, end: int) -> Iterator[tuple[int, int]]:
    """(start, end] in parts of a minute, so that a recording of hours is never held whole; longer
    ones where a file claims to reach over ages."""
    length = max(SLAB, (end - start) // 10_000)
    return ((at, min(at + length, end)) for at in range(start, end, length))


Column = npt.NDArray[Any]
Columns = dict[str, Column]


def summed(
    session: Session,
    stream: Stream,
    interval: tuple[int, int],
    keys: tuple[str, ...],
    sums: tuple[str, ...],
    most: tuple[str, ...] = ("t",),
) -> Columns:
    """The rows of ``stream`` that end in ``interval`` (start, end], one for each combination of the
    numbers ``keys``: with the sum of each field ``sums`` and the largest value of each of ``most``.
    """
    fields = (*keys, *sums, *most)
    parts = [{name: stream.empty()[name] for name in fields}]
    for start, end in slabs(*interval):
        rows = ending(session, stream, start, end)
        if len(rows):
            parts.append(_summed({name: rows[name] for name in fields}, keys, sums))
    return _summed({n: np.concatenate([p[n] for p in parts]) for n in fields}, keys, sums)


def _summed(columns: Columns, keys: tuple[str, ...], sums: tuple[str, ...]) -> Columns:
    order = np.lexsort([columns[key] for key in keys])
    if not len(order):
        return columns
    new = np.zeros(len(order), bool)
    new[0] = True
    for key in keys:
        values = columns[key][order]
        new[1:] |= values[1:] != values[:-1]
    begins = np.flatnonzero(new)
    out: Columns = {}
    for name, values in columns.items():
        if name in keys:
            out[name] = values[order][begins]
        elif name in sums:
            out[name] = np.add.reduceat(values[order], begins, axis=0, dtype=np.uint64)
        else:
            out[name] = np.maximum.reduceat(values[order], begins)
    return out
