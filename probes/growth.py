"""Rows out of counters that are read whole each time and only ever grow."""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from dsprobe.recordings.model import Rows, Stream

Reading = Mapping[str, Any]
"""Values by field name; a field that is absent is 0."""


def _fit(values: list[Any], dtype: np.dtype[Any]) -> npt.NDArray[Any]:
    """``values`` as ``dtype``; whole numbers that it does not hold become the nearest it does, as
    kernels have been seen to print a -1 as 2**64 - 1."""
    if dtype.kind in "iu":
        low, high = int(np.iinfo(dtype).min), int(np.iinfo(dtype).max)
        values = [min(max(v, low), high) for v in values]
    return np.array(values, dtype)


class Growth:
    """``fields`` of ``stream`` are counters, its others are taken as they are.

    A counter that went back grew by its new value, as it must have been reset; where ``wobbles`` is
    set it grew by nothing, as it may step back a little by itself.
    """

    def __init__(self, stream: Stream, *fields: str, wobbles: bool = False) -> None:
        self._stream, self._wobbles = stream, wobbles
        self._counters = fields
        self._plain = [f.name for f in stream.fields if f.name not in (*fields, "t", "dt")]
        self._before: Mapping[Hashable, Reading] = {}

    def start(self, readings: Mapping[Hashable, Reading]) -> None:
        """Count from these."""
        self._before = readings

    def rows(self, now: int, readings: Mapping[Hashable, Reading], idle: bool = True) -> Rows:
        """One row per key that was there the last time too; without ``idle`` only where a counter
        moved."""
        before, self._before = self._before, readings
        keys = [k for k in readings if k in before]
        rows = self._stream.empty(len(keys))
        rows["t"] = now
        for f in self._plain:
            rows[f] = _fit([readings[k].get(f, 0) for k in keys], rows[f].dtype)
        moved = np.full(len(keys), idle)
        for f in self._counters:
            new = _fit([readings[k].get(f, 0) for k in keys], np.dtype(np.uint64))
            old = _fit([before[k].get(f, 0) for k in keys], np.dtype(np.uint64))
            grown = np.where(new >= old, new - old, np.uint64(0) if self._wobbles else new)
            moved |= grown > 0
            rows[f] = np.minimum(grown, np.iinfo(rows[f].dtype).max)
        moving: Rows = rows[moved]
        return moving
