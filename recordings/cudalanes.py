"""The lanes of processes that use CUDA; part of :data:`dsprobe.recordings.lanes.LANES`."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import numpy.typing as npt

from dsprobe.recordings import cudastreams as cuda
from dsprobe.recordings.lane import (
    Edges,
    Lane,
    Values,
    events_per_second,
    highest,
    overall_quantile,
    rate,
    spread,
)
from dsprobe.recordings.model import Rows

HOLD = 2_000_000_000
"""What a row says of live memory holds so long (ns) without another: they come once a second."""
OPEN_HOLD = 1_200_000_000
"""So long (ns) a call is taken to go on after a row of cuda.open, and to have gone on before."""


def live_memory(kinds: tuple[str, ...]) -> Callable[[Rows, Edges], Values]:
    """Live bytes of ``kinds`` at the end of each bucket, summed over processes; 0 where nobody
    holds any.

    Each process and kind has its own rows, at its own times: between two of them the sum is what
    the earlier one left, or what the later one began with.
    """
    wanted = np.array([name in kinds for name in cuda.MEMORY_KINDS])

    def compute(rows: Rows, edges: Edges) -> Values:
        rows = rows[rows["kind"] < len(wanted)]
        rows = rows[wanted[rows["kind"]]]
        out = np.zeros(len(edges) - 1)
        for of in grouped(rows["process"].astype(np.int64) << 8 | rows["kind"]):
            out += _level(rows[of], edges[1:])
        return out

    return compute


def _level(rows: Rows, at: Edges) -> Values:
    """Live bytes of one process and kind at the moments ``at``."""
    t = rows["t"].astype(np.int64)
    live, allocated, freed = (rows[name].astype(float) for name in ("live", "allocated", "freed"))
    begun = np.maximum(live - allocated + freed, 0)
    start = t - rows["dt"].astype(np.int64)
    last = np.searchsorted(t, at, "right") - 1
    after = np.minimum(last + 1, len(t) - 1)
    held = (last >= 0) & (at <= t[np.maximum(last, 0)] + HOLD)
    ahead = ~held & (last + 1 < len(t)) & (start[after] <= at)
    out: Values = np.where(held, live[np.maximum(last, 0)], np.where(ahead, begun[after], 0.0))
    return out


def grouped(keys: npt.NDArray[np.int64]) -> list[npt.NDArray[np.intp]]:
    """Indices of each distinct key, in order."""
    order = np.argsort(keys, kind="stable")
    begins = np.flatnonzero(np.diff(keys[order], prepend=keys[order][:1] - 1))
    return np.split(order, begins[1:]) if len(keys) else []


def threads_in(*kinds: str) -> Callable[[Rows, Edges], Values]:
    """Threads that stood in calls of these kinds, on average."""
    numbers = [cuda.CALL_KINDS.index(kind) for kind in kinds]

    def compute(rows: Rows, edges: Edges) -> Values:
        where = np.isin(rows["kind"], numbers)
        busy: Values = spread(rows, rows["busy"], edges, where=where) / np.diff(edges)
        return busy

    return compute


def _open(rows: Rows, edges: Edges) -> tuple[npt.NDArray[np.intp], npt.NDArray[np.intp]]:
    """Pairs (row, bucket) in which the row says that its call was going on."""
    t = rows["t"].astype(np.int64)
    begun = np.minimum(rows["since"], rows["t"]).astype(np.int64)
    first = np.searchsorted(edges, np.maximum(begun, t - OPEN_HOLD), "right") - 1
    last = np.searchsorted(edges, t + OPEN_HOLD, "left") - 1
    b, last = np.maximum(first, 0), np.minimum(last, len(edges) - 2)
    row = np.arange(len(rows))
    pairs = [(row[:0], b[:0])]
    while (on := b <= last).any():
        row, b, last = row[on], b[on], last[on]
        pairs.append((row, b))
        b = b + 1
    rows_at, buckets = (np.concatenate(part) for part in zip(*pairs, strict=True))
    return rows_at, buckets


def open_threads(rows: Rows, edges: Edges) -> Values:
    """Threads that were in a call that had been going on for long."""
    row, bucket = _open(rows, edges)
    who = rows["process"].astype(np.uint64) << np.uint64(32) | rows["thread"].astype(np.uint64)
    _, number = np.unique(who, return_inverse=True)
    nb = len(edges) - 1
    distinct = np.unique(number[row].astype(np.int64) * nb + bucket)
    return np.bincount(distinct % nb, minlength=nb).astype(float)


def open_longest(rows: Rows, edges: Edges) -> Values:
    """For how long (ns) the longest of these calls had been going on."""
    row, bucket = _open(rows, edges)
    begun = np.minimum(rows["since"], rows["t"]).astype(np.int64)
    out = np.zeros(len(edges) - 1)
    known = np.minimum(edges[bucket + 1], rows["t"][row].astype(np.int64) + OPEN_HOLD)
    np.maximum.at(out, bucket, (known - begun[row]).astype(float))
    return out


_MEM, _CALLS, _OPEN = ("memory", "gpu.memory"), ("calls", "cuda.calls"), ("calls", "cuda.open")
_LAUNCH = ("launches", "cuda.thread")

CUDA_LANES: tuple[Lane, ...] = (
    Lane(50, "gpu.live", "GPU memory live", "B", *_MEM, "last", True,
         live_memory(cuda.ON_DEVICE), since=3, reach=HOLD),
    Lane(51, "gpu.allocated", "GPU allocated", "B/s", *_MEM, "mean", True, rate("allocated"),
         since=3, reach=HOLD),
    Lane(52, "gpu.allocs", "GPU allocations", "/s", *_MEM, "mean", True, rate("allocs"), since=3,
         reach=HOLD),
    Lane(60, "cuda.launches", "kernel launches", "/s", *_LAUNCH, "mean", True, rate("count"),
         since=3),
    Lane(61, "cuda.interval_p50", "launch interval P50", "≤ns", *_LAUNCH, "max", False,
         overall_quantile("hist", 0.5), since=3),
    Lane(62, "cuda.interval_p99", "launch interval P99", "≤ns", *_LAUNCH, "max", False,
         overall_quantile("hist", 0.99), since=3),
    Lane(63, "cuda.gap", "longest launch gap", "ns", *_LAUNCH, "max", False, highest("longest"),
         since=3),
    Lane(70, "cuda.sync", "in synchronize", "threads", *_CALLS, "mean", True, threads_in("sync"),
         since=3),
    Lane(71, "cuda.copy", "in copies", "threads", *_CALLS, "mean", True, threads_in("copy", "set"),
         since=3),
    Lane(72, "cuda.graph", "in graph calls", "threads", *_CALLS, "mean", True,
         threads_in("graph"), since=3),
    Lane(73, "cuda.module", "loading modules", "threads", *_CALLS, "mean", True,
         threads_in("module"), since=3),
    Lane(74, "cuda.other", "in other CUDA calls", "threads", *_CALLS, "mean", True,
         threads_in("other"), since=3),
    Lane(76, "cuda.open", "CUDA calls ≥0.1s", "threads", *_OPEN, "max", True, open_threads,
         since=3, reach=OPEN_HOLD),
    Lane(77, "cuda.open_longest", "longest open call", "ns", *_OPEN, "max", True, open_longest,
         since=3, reach=OPEN_HOLD),
    Lane(53, "gpu.failed", "failed allocations", "/s", *_MEM, "mean", True, rate("failed"),
         since=3, reach=HOLD),
    Lane(64, "cuda.single", "launches kept", "/s", "launches", "cuda.launch", "mean", True,
         events_per_second(None), since=3),
)  # fmt: skip
