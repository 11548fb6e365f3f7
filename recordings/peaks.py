"""The most GPU memory that was live at once."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from dsprobe.recordings import cudastreams as cuda
from dsprobe.recordings.cudalanes import grouped
from dsprobe.recordings.model import Rows
from dsprobe.recordings.samples import ending, slabs
from dsprobe.recordings.session import Session

ALLOC = cuda.ALLOC_OPS.index("alloc")


def peaks(session: Session, start: int, end: int) -> dict[tuple[int, str], int]:
    """The most bytes live within (start, end] by process and kind: as many as are known to have
    been, so that there may have been more.

    Within the interval of a row of gpu.memory the single calls tell, where each has a row; else
    what was live at its ends, and the mean size of its allocations.
    """
    found: dict[tuple[int, int], int] = {}
    for begin, until in slabs(start, end):
        rows = ending(session, cuda.GPU_MEMORY, begin, until)
        if not len(rows):
            continue
        calls = ending(session, cuda.GPU_ALLOC, int((rows["t"] - rows["dt"]).min()), until)
        calls = calls[calls["result"] == 0]
        for of in grouped(rows["process"].astype(np.int64) << 8 | rows["kind"]):
            mine = rows[of]
            key = (int(mine["process"][0]), int(mine["kind"][0]))
            own = calls[(calls["process"] == key[0]) & (calls["kind"] == key[1])]
            found[key] = max(found.get(key, 0), _peak(mine, own))
    kinds = cuda.MEMORY_KINDS
    return {(p, kinds[k] if k < len(kinds) else f"kind {k}"): n for (p, k), n in found.items()}


def _peak(rows: Rows, calls: Rows) -> int:
    """Of one process and kind."""
    live, allocated, freed = (rows[n].astype(np.int64) for n in ("live", "allocated", "freed"))
    begun = np.maximum(live - allocated + freed, 0)
    one = allocated // np.maximum(rows["allocs"].astype(np.int64), 1)
    known = np.maximum(np.maximum(live, begun), one)
    within = np.where(freed == 0, begun + allocated, _within(rows, calls, begun))
    # Rows of single calls and sums are read one after the other: no more than was allocated.
    return int(np.maximum(known, np.minimum(within, begun + allocated)).max())


def _within(
    rows: Rows, calls: Rows, begun: npt.NDArray[np.int64]
) -> npt.NDArray[np.int64]:  # fmt: skip
    """The most live in the interval of each row, by its calls; 0 where some are not there."""
    out = np.zeros(len(rows), np.int64)
    size = calls["bytes"].astype(np.int64)
    live = np.cumsum(np.where(calls["op"] == ALLOC, size, -size))
    first = np.searchsorted(calls["t"], rows["t"] - rows["dt"], "right")
    last = np.searchsorted(calls["t"], rows["t"], "right")
    some = np.flatnonzero((first < last) & (rows["shed"] == 0))
    if len(some):
        first, last = first[some], last[some]
        pairs = np.stack([first, last], axis=1).ravel()
        most = np.maximum.reduceat(np.append(live, 0), pairs)[::2]
        before = np.where(first > 0, live[np.maximum(first, 1) - 1], 0)
        out[some] = begun[some] + most - before
    return out
