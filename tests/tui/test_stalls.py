"""An agent, or one of its probes, that stands still for a while: no zero is made up meanwhile, and
what it says afterwards stands where it belongs, on a live screen as in a replay."""

from __future__ import annotations

import numpy as np
import pytest

from dsprobe.recordings import streams as st
from dsprobe.recordings.lanes import LANES
from dsprobe.recordings.model import Rows
from dsprobe.recordings.rollups import Rollups
from dsprobe.recordings.timeline import MS, SECOND, Timeline, Window
from tests.tui.memory import MemorySession

BOOT = 1_000 * SECOND
TICK = SECOND // 4
STALL = 12_200 * MS
INDEX = {lane.key: i for i, lane in enumerate(LANES)}
RX = "softirq.net_rx"
WIDTHS = (250 * MS, 500 * MS, SECOND, 2 * SECOND, 10 * SECOND)


class Host:
    """Two softirq vectors at work, and a TCP stack that never has to send anything again."""

    def __init__(self) -> None:
        self.session = MemorySession(live=True)
        self.t = self.said = BOOT
        self.written: list[tuple[str, Rows]] = []
        self.put("meta.coverage", t=BOOT, probe=["softirq", "tcp", "sockets", "netdev"], program="",
                 status=0, reason="")  # fmt: skip
        self.beat()

    def put(self, stream: str, **columns: object) -> None:
        rows = st.STREAMS[stream].rows(**columns)
        self.written.append((stream, rows))
        self.session.append_rows(st.STREAMS[stream], rows)

    def beat(self) -> None:
        self.put("meta.clock", t=self.t, wall=self.t, uncertainty=100)

    def collect(self) -> None:
        dt, self.said = self.t - self.said, self.t
        self.put("softirq.cpu", t=self.t, dt=dt, cpu=0, vec=[1, 3], count=9,
                 busy=[dt // 10, dt // 2])  # fmt: skip
        self.put("tcp.sockets", t=self.t, dt=dt, netns=1, inuse=5, out_segs=dt // MS)

    def run(self, seconds: float) -> None:
        for _ in range(round(seconds * SECOND / TICK)):
            self.t += TICK
            self.collect()
            if self.t % SECOND == 0:
                self.beat()

    def replay(self, rolled: bool) -> Timeline:
        """What was written, at rest; ``rolled`` with the roll-ups that a recorder makes."""
        session = MemorySession(live=False)
        rollups = Rollups()
        for stream, rows in self.written:
            session.append_rows(st.STREAMS[stream], rows)
            if rolled:
                rollups.feed(stream, rows)
                session.append_rows(st.ROLLUP_LANE, rollups.take())
        session.append_rows(st.ROLLUP_LANE, rollups.take(all=True))
        session.refresh()
        return Timeline(session)


def window(width: int) -> Window:
    return Window(BOOT // width, 60 * SECOND // width, width)


def stalled(width: int) -> tuple[Host, Timeline, int, int]:
    """A viewer watched 20 s of it, then the agent stood still from .. to .. and went on."""
    host = Host()
    timeline = Timeline(host.session)
    for _ in range(40):
        host.run(0.5)
        host.session.refresh()
        timeline.curves(window(width))
    begin = host.t
    host.t += STALL
    return host, timeline, begin, host.t


@pytest.mark.parametrize("width", WIDTHS)
def test_no_zero_is_said_of_a_time_the_agent_stood_still(width: int) -> None:
    host, timeline, begin, end = stalled(width)
    host.put("tcp.sockets", t=end, dt=1, netns=1, inuse=5)  # its frame comes before all others
    view = window(width)
    first, last = begin // width - view.first, -(-end // width) - view.first
    steps = [lambda: None, host.collect, host.beat, *[lambda: host.run(0.25)] * 30]
    for step in steps:
        step()
        host.session.refresh()
        curves = timeline.curves(view)
        for lane, curve in zip(LANES, curves, strict=True):
            inside = curve.values[first + 1 : last - 1]
            if lane.probe == "softirq" and lane.key not in (RX, "softirq.timer"):
                inside = inside[:0]  # a vector that did not run: the reading at the end says so
            if lane.key.startswith(("softirq.", "tcp.", "net_rx.")):
                assert not (inside == 0).any(), lane.key


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("rolled", [False, True], ids=["rows", "roll-ups"])
def test_after_a_stall_live_and_replay_agree(width: int, rolled: bool) -> None:
    host, timeline, begin, end = stalled(width)
    host.collect()
    host.session.refresh()
    timeline.curves(window(width))
    host.beat()
    for _ in range(20):
        host.run(0.5)
        host.session.refresh()
        timeline.curves(window(width))
    view = window(width)
    view = Window(view.first, (host.t - 8 * SECOND) // width - view.first, width)
    for lane, now, later in zip(
        LANES, timeline.curves(view), host.replay(rolled).curves(view), strict=True
    ):
        assert now.values == pytest.approx(later.values, rel=1e-5, nan_ok=True), lane.key
        gap = now.values[begin // width - view.first + 1 : end // width - view.first - 1]
        if lane.key == RX:
            assert gap == pytest.approx(np.full(len(gap), 0.5))
        if lane.key == "tcp.retransmits":
            assert np.isnan(gap).all(), "what might have been sent again then, nobody knows"


@pytest.mark.parametrize("width", [250 * MS, 500 * MS])
def test_a_probe_that_answers_late_corrects_what_was_closed_without_it(width: int) -> None:
    host = Host()
    timeline = Timeline(host.session)
    view = window(width)

    def watch(seconds: float) -> None:
        for _ in range(round(seconds * 2)):
            host.run(0.5)
            host.session.refresh()
            timeline.curves(view)

    def drop(dt: int, packets: int) -> None:
        host.put("net.device", t=host.t, dt=dt, netns=1, device=b"eth0", rx_dropped=packets)

    def cover(status: str) -> None:
        host.put("meta.coverage", t=host.t, probe="netdev", program="",
                 status=st.STATUSES.index(status), reason="")  # fmt: skip

    watch(8)
    drop(8 * SECOND, 80)
    watch(3)
    cover("stalled")
    watch(15)
    cover("attached")
    drop(18 * SECOND, 1800)
    watch(3)
    drops = timeline.curves(view)[INDEX["net.drops"]].values
    per = SECOND // width
    assert drops[per : 8 * per] == pytest.approx(np.full(7 * per, 10.0))
    assert drops[8 * per : 11 * per] == pytest.approx(np.full(3 * per, 100.0))
    assert np.isnan(drops[11 * per : 26 * per]).all()
    later = host.replay(rolled=False).curves(view)[INDEX["net.drops"]].values
    assert later[: 26 * per] == pytest.approx(drops[: 26 * per], nan_ok=True)


def test_a_sum_of_a_stream_without_a_row_is_unknown_not_zero() -> None:
    host = Host()
    host.run(5)
    for _ in range(20):
        host.t += SECOND
        host.beat()
        host.put("softirq.cpu", t=host.t, dt=SECOND, cpu=0, vec=3, count=1, busy=1)
    host.session.refresh()
    out = Timeline(host.session).curves(window(SECOND))[INDEX["tcp.out_segs"]].values
    assert (out[:5] > 0).all()
    assert np.isnan(out[6:]).all()
