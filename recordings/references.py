"""Which rows of the ``meta.*`` streams other rows point at, by what the declarations say.

A meta stream with a field ``id`` is *interned*: it explains numbers that fields with
``ref="meta.x"`` hold.  The other meta streams describe the session as time goes by.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import numpy as np
import numpy.typing as npt

from dsprobe.recordings import cudastreams as cuda
from dsprobe.recordings import nvmlstreams as nvml
from dsprobe.recordings import streams as st
from dsprobe.recordings.model import Rows, Stream

STATE_KEYS: dict[str, tuple[str, ...]] = {
    st.META_SESSION.name: ("key",),
    st.META_COVERAGE.name: ("probe", "program"),
    st.META_CLOCK.name: (),
    cuda.META_PLACEMENT.name: ("library", "build_id", "function"),
}
"""Meta streams whose last row (per value of these fields) holds on until the next one."""

NUMBERED = frozenset(
    s.name
    for s in (cuda.META_PROCESS, cuda.META_THREAD, cuda.META_KERNEL, cuda.META_STACK,
              cuda.META_FRAME, nvml.META_GPU)
)  # fmt: skip
"""Interned streams whose ids an agent gives: what it says of one may change, and the same id of the
same agent means the same nevertheless."""

ALIKE = frozenset({cuda.META_STACK.name, cuda.META_FRAME.name})
"""Of these, what reads alike is the same whoever says it; two processes are two, however alike."""

LASTING = frozenset(
    {st.META_SESSION.name, st.META_STRING.name, st.META_NETNS.name, st.META_COVERAGE.name,
     cuda.META_PLACEMENT.name, *NUMBERED}
)  # fmt: skip
"""Streams whose rows give later rows their meaning, so age does not end them."""


def is_interned(stream: Stream) -> bool:
    return stream.is_meta and "id" in stream.by_name


class Needed:
    """Collects the ids that rows refer to, by the meta stream they are of."""

    def __init__(self) -> None:
        self.ids: dict[str, set[int]] = {}

    def add(self, stream: Stream, rows: Rows) -> bool:
        """Take the references of ``rows``; whether any of them is new."""
        new = False
        for f in stream.fields:
            if f.ref and len(rows):
                held = self.ids.setdefault(f.ref, set())
                before = len(held)
                held.update(np.unique(rows[f.name]).tolist())
                new |= len(held) > before
        return new

    def of(self, stream: Stream, rows: Rows) -> Rows:
        """The rows of an interned stream that something refers to."""
        wanted = list(self.ids.get(stream.name, ()))
        return rows[np.isin(rows["id"], wanted)]

    def close(self, interned: Mapping[str, tuple[Stream, Rows]]) -> dict[str, Rows]:
        """Needed rows of all ``interned`` streams, with those that these in turn refer to."""
        while True:
            kept = {name: self.of(stream, rows) for name, (stream, rows) in interned.items()}
            new = [self.add(interned[name][0], rows) for name, rows in kept.items()]
            if not any(new):
                return kept


def last_of_ids(stream: Stream, rows: Rows) -> Rows:
    """What holds of each id in ordered ``rows`` of an interned stream: its last row, in order.

    A stack has a row for each frame: of one, the last row of each depth.
    """
    keys = ("id", "depth") if "depth" in stream.by_name else ("id",)
    return last_of(rows, *keys)


def last_of(rows: Rows, *keys: str) -> Rows:
    """The last row of each combination of the numbers ``keys`` in ``rows``, in order."""
    order = np.lexsort([rows[key] for key in keys])  # stable: later rows of a key come later
    last = np.ones(len(rows), bool)
    last[:-1] = False
    for key in keys:
        values = rows[key][order]
        last[:-1] |= values[1:] != values[:-1]
    held: Rows = rows[np.sort(order[last])]
    return held


def by_keys(rows: Rows, *keys: str) -> tuple[npt.NDArray[np.intp], Rows]:
    """Where each combination of the numbers ``keys`` begins, and ``rows`` sorted by them, else in
    the order they had."""
    order = np.lexsort([rows[key] for key in keys])  # stable: later rows of a key come later
    held: Rows = rows[order]
    new = np.zeros(len(rows), bool)
    new[:1] = True
    for key in keys:
        new[1:] |= held[key][1:] != held[key][:-1]
    return np.flatnonzero(new), held


def last_states(rows: Rows, keys: Iterable[str]) -> Rows:
    """The last row of each combination of ``keys`` in ordered ``rows``, in order."""
    keys = tuple(keys)
    if not len(rows):
        return rows
    last = {tuple(row[k] for k in keys): i for i, row in enumerate(rows)} if keys else {}
    return rows[sorted(last.values())] if keys else rows[-1:]
