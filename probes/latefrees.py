"""Frees that are seen after their address was given again, and blocks that wait for such a free."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

PATIENCE = 5 * 10**9
"""How long (ns) the return of a free may take to be seen."""
WAITING = 1 << 16
"""So many blocks wait at most."""
_WAIT = np.dtype([("address", "<u8"), ("born", "<u8"), ("since", "<u8"), ("process", "<u4"),
                  ("space", "<u4")])  # fmt: skip

Array = npt.NDArray[Any]


class LateFrees:
    def __init__(self) -> None:
        self._waiting = np.empty(0, _WAIT)
        self._missed = 0

    def replaced(self, blocks: Array, since: Array) -> None:
        """These blocks were counted out when others came in their place, at ``since``."""
        if not len(blocks):
            return
        new = np.empty(len(blocks), _WAIT)
        for name in ("address", "born", "process", "space"):
            new[name] = blocks[name]
        new["since"] = since
        self._waiting = np.concatenate([self._waiting, new])
        self._missed += max(0, len(self._waiting) - WAITING)
        self._waiting = self._waiting[-WAITING:]

    def unknown(self, keys: Array, t: Array) -> npt.NDArray[np.bool_]:
        """Which of these frees, begun at ``t``, are of no block that waits; the others no longer
        wait."""
        w = len(self._waiting)
        if not w or not len(keys):
            return np.ones(len(keys), bool)
        time, address, process, space = (
            np.concatenate([self._waiting[name], of]) for name, of in (
                ("born", t), ("address", keys["address"]), ("process", keys["process"]),
                ("space", keys["space"])))  # fmt: skip
        waits = np.arange(len(time)) < w
        order = np.lexsort((waits, time, address, space, process))
        by = [x[order] for x in (process, space, address)]
        first = np.r_[True, np.any([x[1:] != x[:-1] for x in by], axis=0)]
        group = np.cumsum(first) - 1
        starts = np.flatnonzero(first)
        # As with brackets: a free goes with a block that was born before it and has none yet.
        waits = waits[order]
        balance = np.cumsum(np.where(waits, 1, -1), dtype=np.int64)
        balance -= np.r_[0, balance][starts][group]
        apart = 2 * len(balance) * group
        least = np.minimum.accumulate(balance - apart) + apart
        before = np.minimum(np.where(first, 0, np.r_[0, least[:-1]]), 0)
        unknown = ~waits & (balance < before)
        met = np.bincount(group, ~waits & ~unknown)
        born = np.cumsum(waits, dtype=np.int64)
        born -= np.r_[0, born][starts][group]
        done = waits & (born <= met[group])
        self._waiting = np.delete(self._waiting, order[done])
        answer = np.zeros(len(keys), bool)
        answer[order[unknown] - w] = True
        return answer

    def missed(self, now: int) -> int:
        """Blocks whose free should have come before ``now``; each is told once."""
        late = self._waiting["since"] < max(0, now - PATIENCE)
        missed, self._missed = self._missed + int(late.sum()), 0
        if late.any():
            self._waiting = self._waiting[~late]
        return missed

    def forget(self, processes: set[int]) -> None:
        self._waiting = self._waiting[~np.isin(self._waiting["process"], list(processes))]
