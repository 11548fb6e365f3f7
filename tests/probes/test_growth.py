"""Counters read whole: differences, resets, and values that make no sense."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as some

from dsprobe.probes.growth import Growth
from dsprobe.recordings.streams import CPU_USAGE, NET_DEVICE, NET_SOFTNET, TCP_SOCKETS


def one(growth: Growth, field: str, before: int, after: int) -> int:
    growth.start({"k": {field: before}})
    rows = growth.rows(7, {"k": {field: after}})
    assert rows["t"].tolist() == [7]
    return int(rows[field][0])


@given(some.integers(0, 2**64 - 1), some.integers(0, 2**64 - 1))
def test_grew_or_was_reset(before: int, after: int) -> None:
    want = after - before if after >= before else after
    assert one(Growth(NET_DEVICE, "rx_bytes"), "rx_bytes", before, after) == want


@given(some.integers(0, 2**64 - 1), some.integers(0, 2**64 - 1))
def test_wobbling_counter_never_jumps_by_its_whole_value(before: int, after: int) -> None:
    want = max(after - before, 0)
    assert one(Growth(CPU_USAGE, "idle", wobbles=True), "idle", before, after) == want


@pytest.mark.parametrize("odd", [-1, 2**64, 2**70, 2**63])
def test_impossible_values_are_borne(odd: int) -> None:
    """Kernels have printed -1 as 2**64 - 1, and a steal time that went backwards as a huge one."""
    growth = Growth(TCP_SOCKETS, "in_segs")
    growth.start({"k": {"in_segs": odd, "inuse": odd}})
    rows = growth.rows(1, {"k": {"in_segs": 5, "inuse": odd}})
    assert rows["inuse"][0] in (0, 2**32 - 1)
    assert rows["in_segs"][0] <= 5
    assert growth.rows(2, {"k": {"in_segs": odd}})["in_segs"][0] in (0, 2**32 - 1)


def test_a_narrow_field_says_its_most_rather_than_wrapping() -> None:
    assert one(Growth(NET_SOFTNET, "processed"), "processed", 0, 2**32 + 5) == 2**32 - 1


def test_keys_that_come_and_go() -> None:
    growth = Growth(NET_DEVICE, "rx_packets")
    growth.start({"a": {"rx_packets": 10}})
    assert growth.rows(1, {"a": {"rx_packets": 11}, "b": {"rx_packets": 500}})["rx_packets"] == [1]
    assert growth.rows(2, {"b": {"rx_packets": 501}})["rx_packets"].tolist() == [1]
    # One that was away may have been another one meanwhile: it counts from anew.
    assert growth.rows(3, {"a": {"rx_packets": 99}, "b": {"rx_packets": 501}}).size == 1
    assert growth.rows(4, {"a": {"rx_packets": 99}})["rx_packets"].tolist() == [0]


def test_only_what_moved() -> None:
    growth = Growth(NET_DEVICE, "rx_packets", "tx_packets")
    growth.start({k: {"rx_packets": 1, "tx_packets": 1, "netns": k} for k in range(3)})
    after = {k: {"rx_packets": 1 + (k == 1), "tx_packets": 1 + 3 * (k == 2), "netns": k}
             for k in range(3)}  # fmt: skip
    rows = growth.rows(9, after, idle=False)
    assert rows[["netns", "rx_packets", "tx_packets"]].tolist() == [(1, 1, 0), (2, 0, 3)]
    assert not len(growth.rows(10, after, idle=False))
    assert np.array_equal(growth.rows(11, after)["netns"], [0, 1, 2])
