"""Counters that only grow, by key: what to tell of them, and how much they grew since."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

Keys = npt.NDArray[np.uint64]
Sums = npt.NDArray[np.uint64]
"""A row of counters for each key."""


def summed(keys: Keys, sums: Sums) -> tuple[Keys, Sums]:
    """One row for each key, in ascending order; sums may wrap round."""
    if not len(keys):
        return keys, sums
    order = np.argsort(keys, kind="stable")
    keys, sums = keys[order], sums[order]
    first = np.flatnonzero(np.r_[True, keys[1:] != keys[:-1]])
    return keys[first], np.add.reduceat(sums, first, axis=0)


def words(values: npt.NDArray[Any]) -> Sums:
    """Structs of u64 as rows of numbers."""
    return values.view("<u8").reshape(len(values), values.dtype.itemsize // 8)


def wide(sums: Sums, columns: int, at: tuple[int, ...]) -> Sums:
    """``sums`` put into these of so many columns."""
    out = np.zeros((len(sums), columns), np.uint64)
    out[:, at] = sums
    return out


class Told:
    """What was last told of each key."""

    def __init__(self, columns: int) -> None:
        self.keys: Keys = np.empty(0, np.uint64)
        self.sums: Sums = np.empty((0, columns), np.uint64)
        self.t: npt.NDArray[np.uint64] = np.empty(0, np.uint64)

    def since(self, keys: Keys, start: int) -> tuple[npt.NDArray[np.intp], Sums, Any]:
        """Of each key (ascending): its place, its sums as last told, and when that was; of new ones
        zeros, told at ``start``."""
        new = keys[~np.isin(keys, self.keys, assume_unique=True)]
        if len(new):
            at = np.searchsorted(self.keys, new)
            self.keys = np.insert(self.keys, at, new)
            self.sums = np.insert(self.sums, at, 0, axis=0)
            self.t = np.insert(self.t, at, start)
        place = np.searchsorted(self.keys, keys)
        return place, self.sums[place], self.t[place]

    def tell(self, place: npt.NDArray[np.intp], sums: Sums, now: int) -> None:
        """These are told now."""
        self.sums[place] = sums
        self.t[place] = now

    def forget(self, gone: npt.NDArray[np.bool_]) -> None:
        """Drop the keys of this mask."""
        if gone.any():
            self.keys, self.sums, self.t = self.keys[~gone], self.sums[~gone], self.t[~gone]
