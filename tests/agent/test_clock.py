"""Pairs of clocks: the truth lies within the uncertainty that is said."""

from __future__ import annotations

import time

from hypothesis import given
from hypothesis import strategies as some

from dsprobe.agent import clock

OFFSET = 1_700_000_000_000_000_000


class Clocks:
    """One time behind two clocks; each reading takes as long as the list says."""

    def __init__(self, delays: list[int]) -> None:
        self._delays, self._now, self._reads = delays, 1_000_000, 0

    def _read(self) -> int:
        self._now += self._delays[self._reads % len(self._delays)]
        self._reads += 1
        return self._now

    def monotonic(self) -> int:
        return self._read()

    def wall(self) -> int:
        return self._read() + OFFSET


@given(some.lists(some.integers(0, 10**9), min_size=1, max_size=20))
def test_error_is_within_uncertainty(delays: list[int]) -> None:
    clocks = Clocks(delays)
    t, wall, uncertainty = clock.pair(clocks.monotonic, clocks.wall)
    assert abs((wall - OFFSET) - t) <= uncertainty


def test_narrowest_of_a_few_tries_is_kept() -> None:
    # Of each three delays the first goes before the pair; only the third try is undisturbed.
    slow, quick = [0, 10**6, 10**6], [0, 100, 50]
    clocks = Clocks([*slow, *slow, *quick, *slow, *slow])
    t, wall, uncertainty = clock.pair(clocks.monotonic, clocks.wall)
    assert uncertainty == 75
    assert abs(wall - OFFSET - t) <= 75


def test_real_clocks() -> None:
    before = time.monotonic_ns(), time.time_ns()
    t, wall, uncertainty = clock.pair()
    after = time.monotonic_ns(), time.time_ns()
    assert before[0] <= t <= after[0]
    assert before[1] - uncertainty <= wall <= after[1] + uncertainty
    assert uncertainty < after[0] - before[0] + 1
