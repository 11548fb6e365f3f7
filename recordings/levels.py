"""Live memory of every stack as it went up and down, in a bounded number of steps of time."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from dsprobe.recordings import cudastreams as cuda
from dsprobe.recordings.model import Rows
from dsprobe.recordings.references import by_keys
from dsprobe.recordings.samples import ending, slabs
from dsprobe.recordings.session import Session
from dsprobe.recordings.stacks import Stacks

CELLS = 240
"""At most so many steps of time."""
MAX_STACKS = 4096
_ADDRESS_SPACE = [cuda.MEMORY_KINDS.index(kind) for kind in ("mapped", "reserved")]

Key = tuple[int, int, int]
"""Process, stack and kind."""
Cells = npt.NDArray[np.float64]


@dataclass(frozen=True, eq=False)
class Levels:
    """Stacks of one process, over cells of ``width`` ns from ``start`` on; (stacks, cells).

    ``low`` and ``high`` are the least and the most bytes live in each cell, ``last`` and ``blocks``
    what was at its end, ``born`` the mean time (ns) of allocation of that, 0 where not known.
    ``first`` is when the process was first seen to hold anything.
    """

    process: int
    first: int
    start: int
    width: int
    keys: tuple[Key, ...]
    low: Cells
    high: Cells
    last: Cells
    blocks: Cells
    born: Cells

    def merged(self, stacks: Stacks) -> Levels:
        """With stacks that read alike as one."""
        same: dict[Key, list[int]] = {}
        for i, (process, stack, kind) in enumerate(self.keys):
            same.setdefault((process, stacks.same(stack), kind), []).append(i)
        if len(same) == len(self.keys):
            return self
        parts = list(same.values())
        low, high, last, blocks = (
            np.array([of[part].sum(axis=0) for part in parts])
            for of in (self.low, self.high, self.last, self.blocks)
        )
        weighted = self.born * self.last
        born = np.array([weighted[part].sum(axis=0) for part in parts]) / np.maximum(last, 1)
        return Levels(
            self.process, self.first, self.start, self.width, tuple(same), low, high, last, blocks,
            born,
        )  # fmt: skip


def read_levels(session: Session, start: int, end: int, least: int) -> tuple[list[Levels], int]:
    """Levels of every process within [start, end], in cells of at least ``least`` ns; and how many
    stacks were left out, as there are too many."""
    width = max(least, -(-(end - start) // CELLS), 1)
    table = _Table(start, width, max(-(-(end - start) // width), 1))
    left_out: set[Key] = set()
    for begin, until in slabs(start - 1, end):
        rows = ending(session, cuda.GPU_STACK, begin, until)
        rows = rows[~np.isin(rows["kind"], _ADDRESS_SPACE)]
        if len(rows):
            left_out |= table.take(rows)
    return table.levels(), len(left_out)


class _Table:
    """Cells of all stacks, with room for twice as many whenever it is full."""

    def __init__(self, start: int, width: int, cells: int) -> None:
        self.start, self.width, self.cells = start, width, cells
        self._numbers: dict[Key, int] = {}
        self._first: dict[int, int] = {}
        self._columns = {name: self._room(64) for name in ("low", "high", "last", "blocks", "born")}

    def _room(self, n: int) -> Cells:
        return np.full((n, self.cells), np.nan)

    def take(self, rows: Rows) -> set[Key]:
        """Take rows in order of time; the stacks there was no room for."""
        begins, rows = by_keys(rows, "process", "stack", "kind")
        ends = np.append(begins[1:], len(rows))
        heads = (rows[name][begins].tolist() for name in ("process", "stack", "kind"))
        number = np.empty(len(begins), np.int64)
        full = set()
        for i, key in enumerate(zip(*heads, strict=True)):
            number[i] = self._number(key)
            if number[i] < 0:
                full.add(key)
            t = int(rows["t"][begins[i]])
            self._first[key[0]] = min(self._first.get(key[0], t), t)
        stack = np.repeat(number, ends - begins)
        rows, stack = rows[stack >= 0], stack[stack >= 0]
        cell = (rows["t"].astype(np.int64) - self.start) // self.width
        where = (stack, np.minimum(cell, self.cells - 1))
        live = rows["live"].astype(float)
        c = self._columns
        np.fmin.at(c["low"], where, live)
        np.fmax.at(c["high"], where, live)
        # Rows of a stack are in order of time: the last one of a cell stays.
        c["last"][where] = live
        c["blocks"][where] = rows["blocks"]
        c["born"][where] = rows["born"]
        return full

    def _number(self, key: Key) -> int:
        n = self._numbers.get(key, len(self._numbers))
        if n >= MAX_STACKS:
            return -1
        self._numbers[key] = n
        if n >= len(self._columns["low"]):
            for name, held in self._columns.items():
                self._columns[name] = np.vstack([held, self._room(len(held))])
        return n

    def levels(self) -> list[Levels]:
        by_process: dict[int, list[Key]] = {}
        for key in self._numbers:
            by_process.setdefault(key[0], []).append(key)
        return [self._levels(process, keys) for process, keys in by_process.items()]

    def _levels(self, process: int, keys: list[Key]) -> Levels:
        at = [self._numbers[key] for key in keys]
        low, high, last, blocks, born = (self._columns[name][at] for name in self._columns)
        # Without a row what was there before still is, and before the first row nothing was; in a
        # cell with rows it was until the first of them.
        held = ~np.isnan(last)
        since = np.maximum.accumulate(np.where(held, np.arange(self.cells), -1), axis=1)
        last, blocks, born = (_carried(column, since) for column in (last, blocks, born))
        before = np.hstack([np.zeros((len(at), 1)), last[:, :-1]])
        low, high = np.fmin(low, before), np.fmax(high, before)
        return Levels(
            process, self._first[process], self.start, self.width, tuple(keys), low, high, last,
            blocks, born,
        )  # fmt: skip


def _carried(column: Cells, since: npt.NDArray[np.int64]) -> Cells:
    filled = np.take_along_axis(column, np.maximum(since, 0), axis=1)
    return np.where(since >= 0, filled, 0.0)
