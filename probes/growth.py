"""Rows out of counters that are read whole each time and only ever grow."""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from typing import Any

import numpy as np

from dsprobe.recordings.model import Rows, Stream

Reading = Mapping[str, Any]
"""Values by field name; a field that is absent is 0."""


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
            rows[f] = [readings[k].get(f, 0) for k in keys]
        moved = np.full(len(keys), idle)
        for f in self._counters:
            new = np.array([readings[k].get(f, 0) for k in keys], np.int64)
            old = np.array([before[k].get(f, 0) for k in keys], np.int64)
            grown = np.where(new >= old, new - old, 0 if self._wobbles else new)
            moved |= grown > 0
            rows[f] = grown
        moving: Rows = rows[moved]
        return moving
