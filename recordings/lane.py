"""What a lane is, and the functions of rows that lanes are made of.

A lane is computed over *buckets*, the spans between ``edges`` (int64 ns, ascending).  A value is
NaN where the rows say nothing about a bucket; where a probe was attached and nothing happened the
caller turns that into 0 (see :func:`dsprobe.recordings.session.coverage`).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from dsprobe.recordings.model import Rows

Values = npt.NDArray[np.float64]
Edges = npt.NDArray[np.int64]


@dataclass(frozen=True)
class Lane:
    """``id`` is stored in roll-ups and never reused.  ``fold`` says how one-second values combine
    into a longer bucket: ``mean``, ``max`` or ``last``.  ``quiet`` lanes read 0, not NaN, where
    their probe was attached and no row came.  Unit ``≤ns`` is a bound: the value is below it.
    ``program`` is the one BPF program that the lane alone depends on, and ``since`` the version of
    roll-ups (:data:`dsprobe.recordings.rollups.VERSION`) that has it.  Rows that lie up to
    ``reach`` ns outside of a bucket may tell of it, too."""

    id: int
    key: str
    title: str
    unit: str
    probe: str
    stream: str
    fold: str
    quiet: bool
    compute: Callable[[Rows, Edges], Values]
    program: str = ""
    since: int = 1
    reach: int = 0


def spread(
    rows: Rows,
    amount: npt.NDArray[Any],
    edges: Edges,
    keys: npt.NDArray[Any] | None = None,
    where: npt.NDArray[np.bool_] | None = None,
) -> Values:
    """Sum of ``amount`` per bucket, each row spread evenly over its ``(t - dt, t]``.

    ``where`` picks rows.  Without ``keys`` the shape is (buckets,); with integer ``keys`` per row
    it is (distinct keys in ascending order, at least one; buckets).  Buckets no row touches hold 0.
    """
    nb = len(edges) - 1
    end = rows["t"].astype(np.int64)
    start = end - np.maximum(rows["dt"].astype(np.int64), 1)
    keep = (end > edges[0]) & (start < edges[-1])
    if where is not None:
        keep &= where
    end, start = end[keep], start[keep]
    per_ns = np.asarray(amount)[keep].astype(float) / (end - start)
    ng, group = 1, np.zeros(len(end), np.int64)
    if keys is not None and len(end):
        # Keys come from files: number the ones in use rather than allocate up to the largest.
        distinct, group = np.unique(keys[keep], return_inverse=True)
        ng = len(distinct)
    out = np.zeros(ng * nb)
    first = np.maximum(np.searchsorted(edges, start, "right") - 1, 0)
    last = np.minimum(np.searchsorted(edges, end, "left") - 1, nb - 1)
    steps = int((last - first).max()) + 1 if len(first) else 0
    for step in range(steps):
        b = first + step
        if step:
            on = b <= last
            b, group, last, first = b[on], group[on], last[on], first[on]
            start, end, per_ns = start[on], end[on], per_ns[on]
        overlap = np.minimum(end, edges[b + 1]) - np.maximum(start, edges[b])
        out += np.bincount(group * nb + b, overlap * per_ns, ng * nb)
    return out if keys is None else out.reshape(ng, nb)


def _width(edges: Edges) -> Values:
    return np.diff(edges) / 1e9


def events_per_second(field: str | None) -> Callable[[Rows, Edges], Values]:
    """Rate of instants: the sum of ``field`` (or the number of rows) per second."""

    def compute(rows: Rows, edges: Edges) -> Values:
        t = rows["t"].astype(np.int64)
        b = np.searchsorted(edges, t, "right") - 1
        ok = (b >= 0) & (b < len(edges) - 1)
        weights = None if field is None else rows[field][ok].astype(float)
        n = np.bincount(b[ok], weights, len(edges) - 1)
        return n / _width(edges)

    return compute


def rate(*fields: str) -> Callable[[Rows, Edges], Values]:
    """Sum of ``fields`` of a sampled stream, per second."""

    def compute(rows: Rows, edges: Edges) -> Values:
        amount = sum(rows[f].astype(float) for f in fields)
        return spread(rows, np.asarray(amount), edges) / _width(edges)

    return compute


def cpus(field: str, vector: int | None = None) -> Callable[[Rows, Edges], Values]:
    """Time in ``field`` as a number of CPUs kept busy (1.0 is one whole CPU)."""

    def compute(rows: Rows, edges: Edges) -> Values:
        where = None if vector is None else rows["vec"] == vector
        busy: Values = spread(rows, rows[field], edges, where=where) / np.diff(edges)
        return busy

    return compute


def worst_cpu(*fields: str, vector: int | None = None) -> Callable[[Rows, Edges], Values]:
    """Share (%) of the one CPU that spent the most time in ``fields``."""

    def compute(rows: Rows, edges: Edges) -> Values:
        where = None if vector is None else rows["vec"] == vector
        amount = np.asarray(sum(rows[f].astype(float) for f in fields))
        by_cpu = spread(rows, amount, edges, rows["cpu"], where)
        # The kernel counts in ticks, so one interval may hold a few ms of its neighbour's.
        worst: Values = np.minimum(100.0 * by_cpu.max(axis=0) / np.diff(edges), 100.0)
        return worst

    return compute


def share(*fields: str) -> Callable[[Rows, Edges], Values]:
    """Share (%) of the CPU time that the rows account for which went to ``fields``."""

    def compute(rows: Rows, edges: Edges) -> Values:
        amount = np.asarray(sum(rows[f].astype(float) for f in fields))
        part, whole = spread(rows, amount, edges), spread(rows, rows["dt"], edges)
        out: Values = np.full(len(part), np.nan)
        np.divide(100.0 * part, whole, out=out, where=whole > 0)
        return np.minimum(out, 100.0)  # ticks, as above

    return compute


def _reach(rows: Rows, edges: Edges) -> tuple[npt.NDArray[np.intp], npt.NDArray[np.intp]]:
    """Pairs (row, bucket), ascending by bucket: a sampled row counts where its ``t`` is, and in
    those buckets of its ``(t - dt, t]`` in which no row ends (they are shorter than a sample)."""
    nb = len(edges) - 1
    end = rows["t"].astype(np.int64)
    # A sampled row ends at t, so one that ends on an edge belongs to the bucket before it.
    own = np.searchsorted(edges, end, "left") - 1
    start = end - np.maximum(rows["dt"].astype(np.int64), 1)
    first = np.maximum(np.searchsorted(edges, start, "right") - 1, 0)
    row = np.arange(len(rows))
    here = (own >= 0) & (own < nb)
    vacant = np.ones(nb, bool)
    vacant[own[here]] = False
    pairs = [(row[here], own[here])]
    early = first < np.minimum(own, nb)
    row, b, last = row[early], first[early], np.minimum(own[early], nb)
    while len(b):
        on = vacant[b]
        pairs.append((row[on], b[on]))
        b = b + 1
        on = b < last
        row, b, last = row[on], b[on], last[on]
    rows_at, buckets = (np.concatenate(part) for part in zip(*pairs, strict=True))
    order = np.argsort(buckets, kind="stable")
    return rows_at[order], buckets[order]


def gauge(field: str, per: str = "netns") -> Callable[[Rows, Edges], Values]:
    """Last value in the bucket, summed over ``per`` (each namespace reports its own)."""

    def compute(rows: Rows, edges: Edges) -> Values:
        i, b = _reach(rows, edges)
        out = np.full(len(edges) - 1, np.nan)
        keys = rows[per][i]
        for key in np.unique(keys):
            of = keys == key
            last = np.full(len(out), np.nan)
            last[b[of]] = rows[field][i[of]]  # ascending t: the last one written stays
            out = np.where(np.isnan(out), last, out + np.nan_to_num(last))
        return out

    return compute


def highest(field: str) -> Callable[[Rows, Edges], Values]:
    """Largest value in the bucket."""

    def compute(rows: Rows, edges: Edges) -> Values:
        i, b = _reach(rows, edges)
        out = np.full(len(edges) - 1, -np.inf)
        np.maximum.at(out, b, rows[field][i].astype(float))
        return np.where(np.isinf(out), np.nan, out)

    return compute


def quantile(hist: npt.NDArray[Any], q: float) -> Values:
    """Upper bound (ns) of the slot that holds quantile ``q`` of log2 histograms (..., slots).

    NaN where a histogram is empty.
    """
    cum = np.cumsum(hist, axis=-1, dtype=float)
    total = cum[..., -1]
    slot = (cum < (q * total)[..., None]).sum(axis=-1)
    return np.where(total > 0, 2.0 ** (slot + 1), np.nan)


def worst_quantile(field: str, q: float) -> Callable[[Rows, Edges], Values]:
    """The highest of the quantiles of each CPU and vector: a flood of quick runs hides no slow one.

    An upper bound, as of :func:`quantile`.
    """

    def compute(rows: Rows, edges: Edges) -> Values:
        i, b = _reach(rows, edges)
        key = (rows["cpu"].astype(np.int64) << 8 | rows["vec"])[i]
        order = np.lexsort((key, b))
        i, b, key = i[order], b[order], key[order]
        out = np.full(len(edges) - 1, np.nan)
        if not len(i):
            return out
        begins = np.flatnonzero(
            np.diff(b, prepend=-1).astype(bool) | np.diff(key, prepend=-1).astype(bool)
        )
        if len(begins) == len(i):  # as for buckets that are no longer than a sample
            found = quantile(rows[field], q)[i]
        else:
            found = quantile(np.add.reduceat(rows[field][i], begins, axis=0, dtype=np.uint64), q)
        some, first = np.unique(b[begins], return_index=True)
        out[some] = np.fmax.reduceat(found, first)
        return out

    return compute


def overall_quantile(field: str, q: float) -> Callable[[Rows, Edges], Values]:
    """The quantile of all rows together; an upper bound, as of :func:`quantile`."""

    def compute(rows: Rows, edges: Edges) -> Values:
        i, b = _reach(rows, edges)
        out = np.full(len(edges) - 1, np.nan)
        if len(i):
            some, begins = np.unique(b, return_index=True)
            hist = np.add.reduceat(rows[field][i], begins, axis=0, dtype=np.uint64)
            out[some] = quantile(hist, q)
        return out

    return compute


def _mean(values: Values) -> Values:
    known = ~np.isnan(values)
    n = known.sum(axis=-1)
    mean: Values = np.full(len(n), np.nan)
    np.divide(values.sum(axis=-1, where=known), n, out=mean, where=n > 0)
    return mean


def _last(values: Values) -> Values:
    back = np.argmax(~np.isnan(values[:, ::-1]), axis=-1)
    last: Values = values[np.arange(len(values)), values.shape[1] - 1 - back]
    return last


FOLDS: dict[str, Callable[[Values], Values]] = {
    "mean": _mean,
    "last": _last,
    "max": lambda values: np.fmax.reduce(values, axis=-1),
}
"""(buckets, seconds) to (buckets,), passing over the seconds nobody knows."""
