"""From when to when the rows of a recording reach."""

from __future__ import annotations

import numpy as np

from dsprobe.recordings import container as c
from dsprobe.recordings.chunks import Chunks


def of_rows(chunks: Chunks) -> tuple[int, int]:
    """First and last ``t`` of all rows but descriptions and sums; (0, 0) where there is none."""
    totals = [t for name, t in chunks.layout.totals.items() if _counts(name) and t.get("rows")]
    if totals:
        return min(t.get("first", 0) for t in totals), max(t.get("last", 0) for t in totals)
    return _find(chunks)


def _counts(name: str) -> bool:
    """Whether rows of the stream are events of the recording, not descriptions or sums of them."""
    return not name.startswith(("meta.", "rollup."))


def _find(chunks: Chunks) -> tuple[int, int]:
    """The span of a file without sums: from the chunks that may hold its first and last row."""
    lay = chunks.layout
    wanted = {ch for ch, s in lay.channels.items() if _counts(s.name)}
    slack = max((lay.spans[ch] for ch in wanted), default=0)
    table = lay.table.chunks
    first, last = 1 << 63, -1
    for n in np.argsort(table[:, 2], kind="stable").tolist():
        if table[n, 2] - slack > first:
            break
        first = min([first, *(m.t0 for m in _messages(chunks, n, wanted))])
    for n in np.argsort(-table[:, 3], kind="stable").tolist():
        if table[n, 3] <= last:
            break
        last = max([last, *(m.t1 for m in _messages(chunks, n, wanted))])
    return (first, last) if last >= 0 else (0, 0)


def _messages(chunks: Chunks, n: int, channels: set[int]) -> list[c.Message]:
    chunk = chunks.get(n)
    return [m for ch in channels for m in chunk.messages.get(ch, ())] if chunk else []
