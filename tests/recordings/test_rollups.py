"""Roll-ups say what the rows below them say."""

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as some

from dsprobe.recordings import lanes
from dsprobe.recordings import streams as st
from dsprobe.recordings.filesession import open_file
from dsprobe.recordings.rollups import COVERED, Rollups, covered
from dsprobe.recordings.writer import Writer
from tests.recordings.sample import FOREVER, SECOND, T0, host_second, random_rows, write_host


def values(rows: np.ndarray, key: str) -> dict[int, float]:
    of = rows[rows["lane"] == lanes.BY_KEY[key].id]
    assert len(of) == len(np.unique(of["t"]))
    return dict(zip(of["t"].tolist(), of["value"].tolist(), strict=True))


def test_they_equal_the_lanes_over_the_rows(tmp_path) -> None:
    rows = write_host(tmp_path / "a.mcap", 150)
    with open_file(tmp_path / "a.mcap") as source:
        sums = source.read("rollup.lane", 0, FOREVER)
    edges = T0 + np.arange(151) * SECOND
    assert covered(sums).tolist() == edges[:-1].tolist()
    compared = 0
    for lane in lanes.LANES:
        if lane.stream not in rows:
            assert not values(sums, lane.key)
            continue
        expected = lane.compute(rows[lane.stream], edges)
        found = values(sums, lane.key)
        for t, want in zip(edges[:-1].tolist(), expected.tolist(), strict=True):
            if t in found:
                assert found[t] == pytest.approx(want, rel=1e-6)
                compared += 1
            else:
                assert np.isnan(want) or want == 0
    assert compared > 1000


@settings(max_examples=30, deadline=None)
@given(
    jitter=some.lists(some.integers(0, 1_900_000_000), min_size=1, max_size=9),
    step=some.integers(1, 40),
)
def test_rows_that_come_up_to_two_seconds_late_count(jitter: list[int], step: int) -> None:
    """In any order within the watermark the sums are those of the ordered rows."""
    ordered = [host_second(n)[st.SOFTIRQ_CPU] for n in range(12)]
    rows = np.concatenate(ordered)
    delay = np.resize(np.array(jitter, np.int64), len(rows))
    arrival = np.argsort(rows["t"].astype(np.int64) + delay, kind="stable")

    def total(order: np.ndarray) -> np.ndarray:
        rollups, out = Rollups(), []
        for part in np.array_split(order, step):
            rollups.feed("softirq.cpu", rows[part])
            out.append(rollups.take())
        out.append(rollups.take(all=True))
        assert rollups.late == 0
        return np.sort(np.concatenate(out), order=("t", "lane"))

    late, plain = total(arrival), total(np.arange(len(rows)))
    assert (late[["t", "lane"]] == plain[["t", "lane"]]).all()
    assert np.allclose(late["value"], plain["value"], rtol=1e-5)


def test_rows_that_come_later_are_counted() -> None:
    rollups = Rollups()
    for number in range(10):
        rollups.feed("softirq.cpu", host_second(number)[st.SOFTIRQ_CPU])
        rollups.take()
    rollups.feed("softirq.cpu", host_second(1)[st.SOFTIRQ_CPU])
    assert rollups.late == 40
    assert len(covered(rollups.take(all=True))) == 3


def test_a_value_only_where_a_row_speaks() -> None:
    rollups = Rollups()
    event = st.TCP_RETRANSMIT.rows(t=[T0, T0 + 3 * SECOND + 5], segments=2)
    rollups.feed("tcp.retransmit", event)
    rows = rollups.take(all=True)
    assert values(rows, "tcp.retransmits") == {T0: 2.0, T0 + 3 * SECOND: 2.0}
    assert covered(rows).tolist() == [T0 + i * SECOND for i in range(4)]
    assert set(rows["lane"].tolist()) == {COVERED, 30, 31}


def test_a_sampled_row_speaks_for_all_of_its_interval() -> None:
    rollups = Rollups()
    row = st.SOFTIRQ_CPU.rows(t=[T0 + SECOND // 2], dt=SECOND, vec=3, busy=SECOND // 2)
    rollups.feed("softirq.cpu", row)
    found = values(rollups.take(all=True), "net_rx.all")
    assert found == {T0 - SECOND: 0.25, T0: 0.25}


def test_wild_times_cost_nothing() -> None:
    rollups = Rollups()
    wild = [0, 1, T0, 1 << 40, (1 << 62) - 1]
    for name, t in itertools.product(("softirq.cpu", "tcp.retransmit"), wild):
        stream = st.STREAMS[name]
        rows = random_rows(stream, 3)
        rows["t"] = t
        rollups.feed(name, rows)
        rollups.take()
    assert len(rollups.take(all=True)) < 10_000


def test_streams_of_another_version_are_left_alone(tmp_path) -> None:
    from dataclasses import replace

    older = replace(st.SOFTIRQ_CPU, fields=st.SOFTIRQ_CPU.fields[:5])
    with Writer(tmp_path / "o.mcap") as writer:
        writer.append(older, random_rows(older, 10))
    with open_file(tmp_path / "o.mcap") as source:
        assert not len(source.read("rollup.lane", 0, FOREVER))


def test_a_crash_costs_at_most_a_minute_of_them(tmp_path) -> None:
    write_host(tmp_path / "cut.mcap", 150, end=False)
    with open_file(tmp_path / "cut.mcap") as source:
        seconds = covered(source.read("rollup.lane", 0, FOREVER))
    assert seconds[0] == T0
    assert (np.diff(seconds) == SECOND).all()
    assert seconds[-1] >= T0 + 85 * SECOND
