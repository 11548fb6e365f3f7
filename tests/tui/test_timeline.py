"""The grid: what a bucket holds does not depend on how one came to look at it."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as some

from dsprobe.recordings import streams as st
from dsprobe.recordings.lane import spread
from dsprobe.recordings.lanes import BY_KEY, LANES
from dsprobe.recordings.model import Field, Stream
from dsprobe.recordings.rollups import COVERED, Rollups
from dsprobe.recordings.timeline import LADDER, MS, SECOND, Timeline, Window
from tests.tui.memory import MemorySession
from tests.tui.scenario import BOOT, TICK, Scenario, live, recording

INDEX = {lane.key: i for i, lane in enumerate(LANES)}


def values(timeline: Timeline, key: str, window: Window) -> np.ndarray:  # type: ignore[type-arg]
    return timeline.curves(window)[INDEX[key]].values


def at(t: int, width: int, count: int = 1) -> Window:
    return Window(t // width, count, width)


@given(
    some.lists(
        some.tuples(some.integers(0, 4000), some.integers(1, 900), some.integers(0, 10**6)),
        min_size=1,
        max_size=40,
    ),
    some.integers(1, 500),
)
def test_spreading_neither_makes_nor_loses_anything(
    rows: list[tuple[int, int, int]], width: int
) -> None:
    t, dt, amount = (np.array(c) for c in zip(*sorted(rows), strict=True))
    table = st.CPU_LOAD.rows(t=t + 1000, dt=dt, switches=amount)
    edges = np.arange(0, 6000 + width, width)
    out = spread(table, table["switches"], edges)
    assert out.sum() == pytest.approx(amount.sum())
    by_row = spread(table, table["switches"], edges, np.arange(len(t)))
    assert by_row.sum(axis=0) == pytest.approx(out)
    for i, (end, length) in enumerate(zip(t + 1000, dt, strict=True)):
        touched = np.flatnonzero(by_row[i])
        if len(touched):
            assert edges[touched[-1]] < end
            assert edges[touched[0] + 1] > end - length


def test_a_bucket_is_the_sum_of_its_rows() -> None:
    """Against a plain loop over the scenario's rows."""
    session = recording(60)
    window = at(BOOT + 10 * SECOND, 500 * MS, 60)
    got = values(Timeline(session), "tcp.retransmits", window)
    rows = session.read("tcp.retransmit", 0, 1 << 62)
    want = np.zeros(window.count)
    for row in rows:
        bucket = int(row["t"]) // window.width - window.first
        if 0 <= bucket < window.count:
            want[bucket] += int(row["segments"]) / 0.5
    assert want.sum() > 0
    assert got == pytest.approx(want)


moves = some.lists(
    some.tuples(some.integers(0, 3), some.integers(0, 6), some.floats(0, 1), some.integers(1, 120)),
    min_size=1,
    max_size=12,
)


@settings(max_examples=40, deadline=None)
@given(moves)
def test_a_live_view_that_wandered_agrees_with_a_fresh_look_at_the_finished_session(
    moves: list[tuple[int, int, float, int]],
) -> None:
    session, scenario = live(20, cpus=2)
    wandering = Timeline(session)
    seen = []
    for ticks, zoom, place, count in moves:
        for _ in range(ticks):
            scenario.advance()
        session.refresh()
        begin, end = session.span()
        first = int(begin + place * (end - begin)) // LADDER[zoom] - count // 2
        window = Window(first, count, LADDER[zoom])
        seen.append((window, [c.values for c in wandering.curves(window)]))
    scenario.run(10)
    session.refresh()
    session.live = False
    settled = Timeline(session)
    for window, curves in seen:
        for lane, before, after in zip(LANES, curves, settled.curves(window), strict=True):
            known = ~np.isnan(before)
            if window.width > SECOND:
                continue  # a longer bucket counts for its part so far while it is open
            if not lane.quiet:  # a quiet stream reads 0 for want of rows until they come
                assert before[known] == pytest.approx(after.values[known], nan_ok=True), lane.key
            else:
                said = known & (before > 0)
                assert before[said] == pytest.approx(after.values[said]), lane.key


def test_a_refresh_reads_the_newest_rows_only() -> None:
    session, scenario = live(120, cpus=192)
    timeline = Timeline(session)
    window = at(scenario.now, 500 * MS, 200)
    timeline.curves(Window(window.first - 200, 200, window.width))
    session.reads.clear()
    for _ in range(4):
        scenario.advance()
        scenario.advance()
        session.refresh()
        timeline.curves(Window(scenario.now // (500 * MS) - 200, 200, 500 * MS))
    softirq = sum(n for name, _, _, n in session.reads if name == "softirq.cpu")
    per_second = 192 * 2 * 4
    assert softirq <= 4 * 4 * per_second, "each refresh reads no more than some four seconds"
    assert softirq > 0


def test_a_closed_bucket_is_not_computed_again_when_the_ring_has_dropped_its_rows() -> None:
    session, _ = live(60)
    timeline = Timeline(session)
    window = at(BOOT + 20 * SECOND, SECOND, 10)
    before = values(timeline, "net_rx.worst", window)
    session.drop_before(BOOT + 25 * SECOND)
    after = values(timeline, "net_rx.worst", window)
    assert np.isfinite(before).all()
    assert (after[5:] == before[5:]).all()


def test_zero_is_said_only_where_the_probe_was_attached() -> None:
    session = MemorySession(live=False)
    scenario = Scenario(session)
    scenario.run(10)
    detached = st.STATUSES.index("detached")
    session.append("meta.coverage", t=scenario.now, probe="tcp", program="", status=detached,
                   reason="the tracepoint went away")  # fmt: skip
    middle = scenario.now
    scenario.run(10)
    session.refresh()
    timeline = Timeline(session)
    before = timeline.curves(at(BOOT - 3 * SECOND, SECOND, 3))[INDEX["tcp.retransmits"]]
    assert np.isnan(before.values).all()
    on = values(timeline, "tcp.retransmits", at(BOOT + SECOND, SECOND, 3))
    assert (on == 0).all()
    off = timeline.curves(at(middle + 6 * SECOND, SECOND, 3))[INDEX["tcp.retransmits"]]
    assert np.isnan(off.values).all()
    assert (off.status, off.reason) == ("detached", "the tracepoint went away")
    earlier = timeline.curves(at(middle, SECOND, 3), BOOT + SECOND)[INDEX["tcp.retransmits"]]
    assert earlier.status == "attached"


def test_what_has_not_arrived_yet_is_unknown_not_zero() -> None:
    session, scenario = live(20)
    scenario.session.append("cpu.runq", t=scenario.now + SECOND, dt=TICK, cpu=0, longest=1)
    session.refresh()  # one stream is a second ahead of the others
    window = at(scenario.now - SECOND, 250 * MS, 8)
    worst = values(Timeline(session), "net_rx.worst", window)
    assert np.isfinite(worst[:4]).all()
    assert np.isnan(worst[4:]).all()


def test_a_probe_without_a_row_reads_zero_though_its_stream_was_never_declared() -> None:
    session = recording(10)
    assert "net.device" not in session.streams
    curve = Timeline(session).curves(at(BOOT + 2 * SECOND, SECOND, 5))[INDEX["net.drops"]]
    assert (curve.values == 0).all()
    assert curve.status == "attached"


def test_a_lane_says_why_it_is_missing() -> None:
    session = recording(10)
    curve = Timeline(session).curves(at(BOOT, SECOND, 5))[INDEX["cpu.pressure"]]
    assert (curve.status, curve.reason) == (
        "missing",
        "this kernel has no /proc/pressure; boot with psi=1",
    )
    nothing = MemorySession(live=False)
    nothing.append("tcp.retransmit", t=[5, 9 * SECOND])
    nothing.refresh()
    curves = Timeline(nothing).curves(at(0, SECOND, 5))
    assert curves[INDEX["cpu.busy"]].status == "missing"
    assert curves[INDEX["cpu.busy"]].reason
    assert np.isnan(curves[INDEX["tcp.retransmits"]].values[1:]).all(), (
        "nobody said it was attached"
    )


def test_a_stream_of_another_version_costs_its_lane_and_nothing_else() -> None:
    session = recording(10)
    odd = Stream("cpu.load", "", "", (Field("t", "<u8", "ns", ""), Field("dt", "<u8", "ns", "")))
    session.append_rows(odd, odd.rows(t=[BOOT + SECOND], dt=SECOND))
    session._frames.pop("cpu.load")
    session.refresh()
    curves = Timeline(session).curves(at(BOOT + SECOND, SECOND, 5))
    assert curves[INDEX["cpu.running"]].status == "missing"
    assert "cpu.load" in curves[INDEX["cpu.running"]].reason
    assert np.isfinite(curves[INDEX["net_rx.worst"]].values).all()


def rollups(session: MemorySession, first: int, seconds: int) -> None:
    """Roll-ups of the session's own rows, as a writer stores them."""
    session.live = True  # so that single seconds are computed from rows
    values = [c.values for c in Timeline(session).curves(at(first, SECOND, seconds))]
    session.live = False
    for second in range(seconds):
        known = [(la.id, v[second]) for la, v in zip(LANES, values, strict=True)
                 if np.isfinite(v[second])]  # fmt: skip
        session.append(
            "rollup.lane",
            t=(first // SECOND + second) * SECOND,
            lane=[i for i, _ in known],
            value=[v for _, v in known],
        )
    session.refresh()


@pytest.mark.parametrize("width", [SECOND, 2 * SECOND, 10 * SECOND, 60 * SECOND])
def test_roll_ups_and_rows_say_the_same(width: int) -> None:
    plain, rolled = recording(130), recording(130)
    rollups(rolled, BOOT, 70)  # the rest has to come from rows
    rolled.reads.clear()
    window = at(BOOT, width, 130 * SECOND // width + 1)
    a, b = Timeline(plain).curves(window), Timeline(rolled).curves(window)
    for lane, x, y in zip(LANES, a, b, strict=True):
        assert y.values == pytest.approx(x.values, rel=1e-5, nan_ok=True), lane.key
    assert np.isfinite(b[INDEX["net_rx.worst"]].values).any()
    covered = [r for r in rolled.reads if r[0] == "softirq.cpu" and r[1] < BOOT + 60 * SECOND]
    assert not covered, "no rows are read where the roll-ups suffice"


def test_a_lane_that_older_roll_ups_lack_is_drawn_from_rows() -> None:
    plain, rolled = recording(60), recording(60)
    sums = Rollups()
    for name in ("softirq.cpu", "cpu.usage"):
        sums.feed(name, plain.read(name, 0, 1 << 62))
    rows = sums.take(all=True)
    newer = [lane.id for lane in LANES if lane.since > 1]
    assert newer
    rows = rows[~np.isin(rows["lane"], newer)]
    rows["value"][rows["lane"] == COVERED] = 1
    rolled.append_rows(st.ROLLUP_LANE, rows)
    rolled.refresh()
    window = at(BOOT, 10 * SECOND, 6)
    for key in ("softirq.wait", "softirq.run", "net_rx.worst"):
        want = values(Timeline(plain), key, window)
        assert np.isfinite(want).all()
        assert values(Timeline(rolled), key, window) == pytest.approx(want, rel=1e-5), key


def test_long_buckets_keep_what_a_maximum_is_for() -> None:
    session = recording(60)
    timeline = Timeline(session)
    seconds = values(timeline, "net_rx.worst", at(BOOT, SECOND, 60))
    wide = values(timeline, "net_rx.worst", at(BOOT, 10 * SECOND, 6))
    assert wide == pytest.approx(seconds.reshape(6, 10).max(axis=1))
    mean = values(timeline, "net_rx.all", at(BOOT, 10 * SECOND, 6))
    all_seconds = values(timeline, "net_rx.all", at(BOOT, SECOND, 60))
    assert mean == pytest.approx(all_seconds.reshape(6, 10).mean(axis=1))


def test_keys_from_a_file_cannot_ask_for_memory() -> None:
    rows = st.SOFTIRQ_CPU.rows(t=[10, 20], dt=10, cpu=[0, 65535], vec=3, busy=[5, 10])
    worst = BY_KEY["net_rx.worst"].compute(rows, np.array([0, 10, 20]))
    assert worst.tolist() == [50.0, 100.0]


@pytest.mark.parametrize("width", LADDER[:6])
def test_the_buckets_at_the_ends_are_not_low_for_being_short(width: int) -> None:
    session = MemorySession(live=False)
    t = BOOT + 370 * MS + np.arange(1, 80) * 100 * MS
    session.append("meta.coverage", t=0, probe="tcp", program="", status=0)
    session.append("tcp.retransmit", t=t, segments=3)
    session.refresh()
    begin, end = session.span()
    window = Window(begin // width, end // width - begin // width + 1, width)
    got = values(Timeline(session), "tcp.retransmits", window)
    seconds = np.diff([begin, *np.arange(1, window.count) * width + window.start, end + 1]) / 1e9
    if width <= SECOND:
        assert (got * seconds).sum() == pytest.approx(3 * len(t)), "every segment is counted"
    if width >= SECOND:
        assert got == pytest.approx(np.full(window.count, 30.0), rel=0.4)


def test_a_bucket_half_watched_does_not_read_zero() -> None:
    session = MemorySession(live=False)
    session.append("meta.coverage", t=BOOT + SECOND // 2, probe="tcp", program="", status=0)
    session.append("tcp.retransmit", t=[BOOT, BOOT + 2500 * MS, BOOT + 5 * SECOND])
    session.refresh()
    got = values(Timeline(session), "tcp.retransmits", at(BOOT, SECOND, 4))
    assert np.isnan(got[0]), "watched from its middle on"
    assert got[1] == 0


def test_rows_that_come_late_are_counted_in_buckets_already_seen() -> None:
    session, scenario = live(20)
    timeline = Timeline(session)
    window = at(scenario.now - 2 * SECOND, 250 * MS, 12)
    before = values(timeline, "net_rx.worst", window)
    t = scenario.now
    session.append("softirq.cpu", t=t, dt=TICK, cpu=9, vec=3, count=1, busy=TICK)
    scenario.run(1)
    session.refresh()
    after = values(timeline, "net_rx.worst", window)
    assert np.isnan(before[8:]).all()
    assert before[7] < 50
    assert after[7] == 100
    assert np.isfinite(after).all(), "what was open has been filled in"
