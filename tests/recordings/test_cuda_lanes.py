"""Lanes of processes that use CUDA: they neither dip between rows nor hide a call that hangs."""

from __future__ import annotations

import numpy as np
import pytest

from dsprobe.recordings import streams as st
from dsprobe.recordings.cut import cut
from dsprobe.recordings.filesession import open_file
from dsprobe.recordings.lane import Edges, Values
from dsprobe.recordings.lanes import BY_KEY, LANES
from dsprobe.recordings.session import FOREVER
from dsprobe.recordings.timeline import MS, Timeline, Window
from dsprobe.recordings.writer import Writer
from tests.recordings.cudahost import BOOT, CALL, KIND, SECOND, CudaHost, hist
from tests.recordings.sample import random_rows
from tests.recordings.test_rollups_and_rows import WithoutRollups
from tests.tui.memory import MemorySession

INDEX = {lane.key: i for i, lane in enumerate(LANES)}
CUDA = [lane for lane in LANES if lane.stream.startswith(("gpu.", "cuda."))]


def values(session: MemorySession, key: str, start: int, end: int, width: int) -> Values:
    window = Window(start // width, (end - start) // width, width)
    return Timeline(session).curves(window)[INDEX[key]].values


def host(live: bool = False) -> CudaHost:
    made = CudaHost(live)
    made.process(1, 41)
    made.process(2, 42)
    return made


def beat(made: CudaHost, seconds: int) -> None:
    """Something that comes every second, so that the session reaches so far."""
    for second in range(1, seconds + 1):
        made.session.append("cpu.load", t=BOOT + second * SECOND, dt=SECOND)
        made.session.append("meta.clock", t=BOOT + second * SECOND, wall=second)
    made.session.refresh()


def memory(made: CudaHost, t: int, dt: int, process: int, live: int, **more: int) -> None:
    kind = KIND[str(more.pop("kind", "device"))]
    made.session.append("gpu.memory", t=t, dt=dt, process=process, kind=kind, live=live, **more)


@pytest.mark.parametrize("width", [50 * MS, 100 * MS, 250 * MS, 500 * MS, SECOND, 2 * SECOND])
def test_live_memory_does_not_dip(width: int) -> None:
    """One process says something four times a second, one every 1.03 s: the sum stands."""
    made = host()
    for tick in range(1, 81):
        memory(made, BOOT + tick * SECOND // 4, SECOND // 4, 1, 1000, allocated=7, freed=7)
    for n in range(1, 20):
        memory(made, BOOT + n * 1030 * MS, 1030 * MS, 2, 500)
    beat(made, 20)
    found = values(made.session, "gpu.live", BOOT + 4 * SECOND, BOOT + 16 * SECOND, width)
    assert set(found.tolist()) == {1500.0}


def test_live_memory_changes_when_it_did() -> None:
    made = host()
    memory(made, BOOT + 10 * SECOND, SECOND, 1, 100, allocated=100)
    memory(made, BOOT + 11 * SECOND, SECOND, 1, 100)
    memory(made, BOOT + 11_300 * MS, 300 * MS, 1, 700, allocated=700, freed=100)
    memory(made, BOOT + 12_300 * MS, SECOND, 1, 700)
    memory(made, BOOT + 12_400 * MS, 100 * MS, 1, 0, freed=700)  # it ends
    memory(made, BOOT + 11 * SECOND, SECOND, 1, 1 << 40, kind="mapped")  # address space only
    beat(made, 20)
    found = values(made.session, "gpu.live", BOOT + 8 * SECOND, BOOT + 14 * SECOND, 100 * MS)
    at = dict(enumerate(found.tolist()))
    assert set(found[:19].tolist()) == {0.0}
    assert {at[i] for i in range(20, 32)} == {100.0}
    assert {at[i] for i in range(33, 43)} == {700.0}
    assert set(found[44:].tolist()) == {0.0}


def test_where_nobody_uses_cuda_lanes_read_nothing_happened() -> None:
    made = CudaHost()
    beat(made, 20)
    for key in ("gpu.live", "gpu.allocated", "cuda.launches", "cuda.sync", "cuda.open"):
        found = values(made.session, key, BOOT + 4 * SECOND, BOOT + 16 * SECOND, SECOND)
        assert set(found.tolist()) == {0.0}, key
    curve = Timeline(made.session).curves(Window(BOOT // SECOND, 10, SECOND))[INDEX["gpu.live"]]
    assert curve.status == "attached"


def test_where_no_probe_was_attached_nothing_is_known() -> None:
    made = CudaHost()
    status = st.STATUSES.index("missing")
    made.session.append("meta.coverage", t=BOOT, probe="memory", status=status, reason="no BPF")
    beat(made, 20)
    found = values(made.session, "gpu.live", BOOT + 4 * SECOND, BOOT + 16 * SECOND, SECOND)
    assert np.isnan(found).all()


def test_a_call_that_hangs_shows_while_it_does() -> None:
    """It began at second 5.25, was seen to be open until 12, and returned soon after."""
    made = host()
    since = BOOT + 5250 * MS
    for second in range(6, 13):
        made.session.append("cuda.open", t=BOOT + second * SECOND, process=1, thread=1, since=since)
        if second > 8:
            made.session.append("cuda.open", t=BOOT + second * SECOND, process=1, thread=2,
                                since=BOOT + 8500 * MS)  # fmt: skip
    beat(made, 20)
    for width in (50 * MS, 250 * MS, SECOND, 2 * SECOND):
        found = values(made.session, "cuda.open", BOOT + SECOND, BOOT + 20 * SECOND, width)
        t = (BOOT + SECOND) // width * width + np.arange(len(found)) * width
        found[np.isnan(found)] = 0  # before the first row
        assert not found[t + width <= since].any()
        assert (found[(t >= since) & (t + width <= BOOT + 8500 * MS)] == 1).all()
        assert (found[(t >= BOOT + 8500 * MS) & (t < BOOT + 12 * SECOND)] == 2).all()
        assert not found[t > BOOT + 14 * SECOND].any()
    longest = values(made.session, "cuda.open_longest", BOOT, BOOT + 20 * SECOND, SECOND)
    assert longest[11] == 12 * SECOND - 5250 * MS
    assert np.nanargmax(longest) in (12, 13)


def test_time_in_calls_counts_by_kind() -> None:
    made = host()
    for second in range(1, 20):
        for kind, busy in (("sync", 1500), ("copy", 250), ("other", 125)):
            made.session.append("cuda.calls", t=BOOT + second * SECOND, dt=SECOND, process=1,
                                kind=CALL[kind], count=3, busy=busy * MS)  # fmt: skip
    beat(made, 20)
    expected = {"cuda.sync": 1.5, "cuda.copy": 0.25, "cuda.other": 0.125, "cuda.graph": 0.0}
    for key, threads in expected.items():
        found = values(made.session, key, BOOT + 4 * SECOND, BOOT + 16 * SECOND, SECOND)
        assert found.tolist() == [threads] * 12, key


def test_intervals_between_launches_are_of_all_threads_together() -> None:
    made = host()
    for second in range(1, 20):
        made.session.append("cuda.thread", t=BOOT + second * SECOND, dt=SECOND, process=1,
                            thread=[1, 2], count=[1000, 10], longest=[5000, 8_000_000],
                            hist=[hist(s12=1000), hist(s22=10)])  # fmt: skip
    beat(made, 20)
    span = (BOOT + 4 * SECOND, BOOT + 16 * SECOND, SECOND)
    assert set(values(made.session, "cuda.launches", *span).tolist()) == {1010.0}
    assert set(values(made.session, "cuda.interval_p50", *span).tolist()) == {2.0**13}
    assert set(values(made.session, "cuda.interval_p99", *span).tolist()) == {2.0**13}
    assert set(values(made.session, "cuda.gap", *span).tolist()) == {8_000_000.0}


def test_a_live_screen_does_not_dip_at_its_edge() -> None:
    """The newest column is drawn before each process has said something in it."""
    made = host(live=True)
    timeline = Timeline(made.session)
    for tick in range(1, 200):
        t = BOOT + tick * 100 * MS
        memory(made, t, 100 * MS, 1, 1000)
        if tick % 10 == 3:
            memory(made, t, SECOND, 2, 500)
        if tick % 10 == 0:
            made.session.append("meta.clock", t=t, wall=t)
        made.session.refresh()
        if tick > 60:
            window = Window(t // (250 * MS) - 16, 16, 250 * MS)
            found = timeline.curves(window)[INDEX["gpu.live"]].values
            assert set(found[~np.isnan(found)].tolist()) == {1500.0}, tick


def test_roll_ups_say_the_same(tmp_path) -> None:
    made = host()
    for tick in range(1, 130):
        memory(made, BOOT + tick * 970 * MS, 970 * MS, 1, 1000 + tick, allocated=1)
        if tick % 3:
            made.session.append("cuda.open", t=BOOT + tick * SECOND, process=1, thread=1,
                                since=BOOT + (tick - tick % 3) * SECOND)  # fmt: skip
        made.session.append("cuda.thread", t=BOOT + tick * SECOND, dt=SECOND, process=1,
                            thread=1, count=tick, longest=tick, hist=[hist(s12=tick)])  # fmt: skip
    beat(made, 126)
    with Writer(tmp_path / "a.mcap") as writer:
        for name, stream in made.session.streams.items():
            writer.append(stream, made.session.read(name, 0, FOREVER))
    with open_file(tmp_path / "a.mcap") as source:
        cut(source, tmp_path / "b.mcap", 0, FOREVER)
    with open_file(tmp_path / "b.mcap") as source:
        for width in (SECOND, 5 * SECOND):
            window = Window(BOOT // width + 2, 110 * SECOND // width, width)
            rolled = Timeline(source, CUDA).curves(window)
            rows = Timeline(WithoutRollups(source), CUDA).curves(window)
            for a, b in zip(rolled, rows, strict=True):
                np.testing.assert_allclose(a.values, b.values, rtol=1e-5, err_msg=a.lane.key)
            assert np.nanmax(rolled[0].values) > 1000


@pytest.mark.parametrize("key", [lane.key for lane in CUDA])
def test_any_rows_give_values(key: str) -> None:
    """What a hostile file may hold: every legal value in every field, at times far and near."""
    lane = BY_KEY[key]
    edges: Edges = BOOT + np.arange(41, dtype=np.int64) * 250 * MS
    for seed in range(5):
        rows = random_rows(st.STREAMS[lane.stream], 300, seed, BOOT, 10 * SECOND)
        rows["t"][-3:] = [1 << 62, (1 << 63) - 1, (1 << 64) - 1]
        with np.errstate(all="ignore"):
            assert len(lane.compute(rows, edges)) == 40
            assert len(lane.compute(rows[:0], edges)) == 40


def test_numbers_and_words_of_lanes_are_their_own() -> None:
    assert len({lane.id for lane in LANES}) == len({lane.key for lane in LANES}) == len(LANES)
    assert all(lane.since == 3 for lane in CUDA)
