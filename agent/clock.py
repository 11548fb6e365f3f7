"""Pairs of CLOCK_MONOTONIC and wall clock, with the uncertainty of the pairing."""

from __future__ import annotations

import time
from collections.abc import Callable

TRIES = 5


def pair(
    monotonic: Callable[[], int] = time.monotonic_ns, wall: Callable[[], int] = time.time_ns
) -> tuple[int, int, int]:
    """(monotonic ns, wall ns at that moment, ns by which they may differ).

    Reads monotonic, wall, monotonic a few times and keeps the narrowest: the wall clock was read
    somewhere between the two, so half their distance bounds the error.
    """
    best = (0, 0, 1 << 62)
    for _ in range(TRIES):
        before = monotonic()
        now = wall()
        after = monotonic()
        if after - before < best[2]:
            best = ((before + after) // 2, now, after - before)
    return best[0], best[1], (best[2] + 1) // 2
