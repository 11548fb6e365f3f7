"""Calls that have not returned yet, as the threads' own tables have them."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from dsprobe.probes.functions import Flag

LONG_NS = 100_000_000
"""From when on a call that goes on is told of."""

OPEN = np.dtype([("process", "<u4"), ("thread", "<u4"), ("function", "<u4"), ("since", "<u8")])


def open_calls(
    threads: npt.NDArray[Any], functions: npt.NDArray[Any], now: int
) -> npt.NDArray[Any]:
    """Those that have gone on for :data:`LONG_NS` at ``now`` (dtype :data:`OPEN`), of ``threads``
    (:data:`~dsprobe.probes.cudamaps.THREAD`).  ``functions`` has one element for each cookie."""
    busy = threads[(threads["depth"] > 0) & (threads["ended"] == 0)]
    level = np.arange(busy["open"].shape[1])
    is_open = (level < busy["depth"][:, None]) & (busy["open"]["t"] + LONG_NS <= now)
    which, depth = np.nonzero(is_open)
    them = busy["open"][which, depth]
    of = functions[np.minimum(them["cookie"], len(functions) - 1)]
    seen = of["flags"] & Flag.ENTRY_ONLY == 0  # else nobody would say that it returned
    found = np.zeros(int(seen.sum()), OPEN)
    found["process"], found["thread"] = busy["process"][which[seen]], busy["id"][which[seen]]
    found["function"], found["since"] = of["name"][seen], them["t"][seen]
    return found


def stand_in(cells: npt.NDArray[Any], told: npt.NDArray[Any], calls: npt.NDArray[Any],
             now: int) -> None:  # fmt: skip
    """Add to ``busy`` of the counters in ``cells`` what open ``calls`` have taken up to ``now``.

    The kernel adds a call's time when it returns, so a thread that hangs would seem to do nothing,
    and later to have stood in many calls at once.  ``told`` are the counters as they were told the
    last time: none goes back, should a call have returned in between.
    """
    for call in calls:
        at = (cells["process"] == call["process"]) & (cells["name"] == call["function"])
        cells["busy"][at] += np.uint64(now - int(call["since"]))
    np.maximum(cells["busy"], told["busy"], out=cells["busy"])
