"""Rows that stand for intervals, ``(t - dt, t]``: which times they speak for."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from dsprobe.recordings.assemble import fits
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
    """Rows that end in (after, until]; none where they lack fields they need."""
    rows = session.read(stream.name, max(after, -1) + 1, until + 1)
    return rows if fits(stream, rows) else stream.empty()
