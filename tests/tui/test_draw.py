"""The screen as lines of text, at every size and with every set of characters."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as some

from dsprobe.recordings import streams as st
from dsprobe.recordings.timeline import LADDER
from dsprobe.tui.draw import columns, draw
from dsprobe.tui.glyphs import ASCII, BLOCKS, Glyphs
from dsprobe.tui.lanes import LanesScreen, TablesBody
from dsprobe.tui.lines import ROLES, cells, changed, fit, text_of
from dsprobe.tui.observer import Observer
from dsprobe.tui.pages import problems_page
from dsprobe.tui.player import Player
from dsprobe.tui.snapshot import Snapshot
from dsprobe.tui.tables import TABLES
from dsprobe.tui.text import once
from tests.tui.golden import compare
from tests.tui.memory import MemorySession
from tests.tui.scenario import BOOT, SECOND, Scenario, live, recording

SIZES = [(1, 1), (2, 2), (10, 3), (20, 5), (40, 10), (80, 24), (110, 30), (160, 50), (300, 100)]


def observe(
    session: MemorySession, width: int, height: int, ui: LanesScreen, at: int | None = None
) -> Snapshot:
    player = Player(lambda: 0, *session.span(), growing=session.live, live=session.live)
    player.resize(columns(ui, width, height))
    if at is not None:
        player.jump(at)
    return Observer(session, player).look()


def screen(
    session: MemorySession, width: int, height: int, glyphs: Glyphs = BLOCKS, **kw: object
) -> list[str]:
    ui = LanesScreen(**kw)  # type: ignore[arg-type]
    snap = observe(session, width, height, ui)
    return [text_of(line) for line in draw(snap, ui, glyphs, width, height)]


@pytest.mark.parametrize(("width", "height"), SIZES)
@pytest.mark.parametrize("glyphs", [BLOCKS, ASCII], ids=["blocks", "ascii"])
def test_every_size_is_filled_to_the_cell(width: int, height: int, glyphs: Glyphs) -> None:
    session, _ = live(60)
    session.problems = ("the connection was lost → trying again",)
    for table in ("cpus", "flows", "vectors", "slow", ""):
        lines = screen(session, width, height, glyphs, table=table)
        assert [len(line) for line in lines] == [width] * height
        if glyphs is ASCII:
            assert all(line.isascii() for line in lines)


def test_what_is_said_at_each_size_is_true() -> None:
    session, _ = live(60)
    assert "LIVE" in screen(session, 10, 3)[0]
    assert screen(session, 10, 3)[1].strip(), "even so small there is a curve"
    small = "\n".join(screen(session, 80, 24))
    for part in ("gpu-07", "14:01:00.0 UTC", "LIVE", "dsprobe 0.50% of a core", "lost 0",
                 "net_rx worst CPU", "retransmitted segs", "CPUs by net_rx",
                 "14:00:50"):  # fmt: skip
        assert part in small
    large = "\n".join(screen(session, 160, 50))
    for part in (
        "flows by retransmits",
        "10.0.0.1:40000",
        "softirqs by vector",
        "slowest softirq runs and waits",
        "python3:78",
        "cpu.pressure"[4:],
    ):
        assert part in large


def test_the_most_important_is_dropped_last() -> None:
    session, _ = live(60)
    session.losses = {"softirq.cpu": 1234}
    session.problems = ("the file is truncated after 14:00:30",)
    assert "LIVE" in screen(session, 12, 5)[0]
    assert "LOST 1.23k" in screen(session, 30, 5)[0]
    assert "! the file is truncated after 14:00:30" in screen(session, 160, 50)[0]
    assert "! the file is" in screen(session, 80, 24)[0]


def test_a_missing_lane_says_why_in_its_row() -> None:
    session, _ = live(60)
    lines = screen(session, 80, 24, filter="pressure", table="")
    (row,) = [line for line in lines[2:-1] if "CPU pressure" in line]
    assert "missing: this kernel has no /proc/pressure; boot" in row
    assert "boot with psi=1" in lines[-1], "the whole reason is at the bottom"


def test_a_stalled_lane_keeps_its_past_and_says_so() -> None:
    session, scenario = live(60)
    session.append("meta.coverage", t=scenario.now, probe="sockets", program="", status=3,
                   reason="/proc gives no answer")  # fmt: skip
    end = scenario.now
    for _ in range(40):
        scenario.advance()
    session.refresh()
    assert scenario.now > end
    (row,) = [x for x in screen(session, 80, 24, table="") if "TCP sockets" in x]
    assert "stalled" in row
    assert "▅" in row or "▄" in row
    assert "stalled: /proc" in row


def test_losses_and_samples_are_marked_without_colour() -> None:
    session, _ = live(60)
    session.losses = {"tcp.retransmit": 5}
    lines = screen(session, 80, 24, table="")
    flag = {line[1:20].strip(): line[29:31].strip() for line in lines[2:-1]}
    assert flag["retransmitted segs"] == "!"
    assert flag["longest run queue"] == "~"
    assert flag["CPU busy"] == ""


def test_unknown_zero_and_something_look_different() -> None:
    session, scenario = live(20)
    (row,) = [x for x in screen(session, 80, 24, table="") if "retransmit calls" in x]
    plot = row[31:]
    first = scenario.now // (SECOND // 2) - len(plot)
    for column, char in enumerate(plot):
        t = (first + column) * SECOND // 2
        if t + SECOND // 2 <= BOOT - SECOND // 4:
            assert char == " "
    assert "." in plot
    assert set(plot) - {" ", "."}, "the burst is there"


def test_lanes_scroll_so_that_the_selected_one_is_seen() -> None:
    session, _ = live(20)
    ui = LanesScreen(table="", selected=999)
    snap = observe(session, 80, 12, ui)
    lines = [text_of(x) for x in draw(snap, ui, BLOCKS, 80, 12)]
    assert lines[-2].startswith(">softirq RCU")
    assert ui.selected == len(ui.lanes(snap)) - 1
    ui.selected = 0
    assert text_of(draw(snap, ui, BLOCKS, 80, 12)[2]).startswith(">net_rx worst CPU")


def test_a_filter_gives_the_lanes_left_more_rows() -> None:
    session, _ = live(60)
    lines = screen(session, 80, 24, table="", filter="tcp retransmit")
    assert sum("retransmit" in line for line in lines[2:-1]) == 2
    tall = [line[31:] for line in lines[2:-1]]
    assert sum(bool(set(line) & set("▁▂▃▄▅▆▇█")) for line in tall) > 2
    assert "no lane matches xyz" in "\n".join(screen(session, 80, 24, filter="xyz"))


def test_the_cursor_and_markers_are_on_the_axis() -> None:
    session = recording(60)
    session.append("marker", t=BOOT + 20 * SECOND, label="deploy")
    session.refresh()
    ui = LanesScreen(table="")
    snap = observe(session, 80, 24, ui, at=BOOT + 21 * SECOND)
    lines = draw(snap, ui, BLOCKS, 80, 24)
    assert "▼" in text_of(lines[1])
    roles = [role for text, role in lines[2]]
    assert roles.count("cursor") == 1
    axis = text_of(lines[1])
    column = axis.index("▼") - (80 - len(snap.lanes[0].values))
    first = snap.window.first + column
    assert first * snap.window.width <= BOOT + 20 * SECOND < (first + 1) * snap.window.width


def test_live_and_replay_show_the_same_numbers_at_the_same_moment() -> None:
    growing, scenario = live(40)
    player = Player(lambda: 0, *growing.span(), growing=True, live=True)
    player.resize(60)
    observer = Observer(growing, player)
    observer.look()
    player.pause()
    at = player.position
    scenario.run(10)
    paused = observer.look()
    replayed = observe(recording(60), 91, 24, LanesScreen(table="cpus"), at)
    for a, b in zip(paused.lanes, replayed.lanes, strict=True):
        assert a.now == pytest.approx(b.now, nan_ok=True), a.key
    assert isinstance(paused.body, TablesBody)
    assert isinstance(replayed.body, TablesBody)
    assert set(paused.body.tables) == set(TABLES)
    assert paused.body.tables.items() >= replayed.body.tables.items()
    assert paused.time == replayed.time


def test_the_header_tells_live_from_paused_from_replay() -> None:
    session, scenario = live(40)
    player = Player(lambda: 0, *session.span(), growing=True, live=True)
    observer = Observer(session, player)
    assert observer.look().mode == "LIVE"
    player.pause()
    scenario.run(12)
    snap = observer.look()
    assert (snap.mode, snap.detail) == ("PAUSED", "12s behind")
    player.reverse()
    player.faster(1)
    assert observer.look().detail.startswith("backwards x2")
    player.live()
    observer.look()
    session.live = False
    session.problems = ("the agent ended",)
    snap = observer.look()
    assert (snap.mode, snap.detail) == ("PAUSED", "end")
    assert snap.problems == ("the agent ended: quit and run dsprobe top again",)


def test_an_agent_that_says_nothing_does_not_look_healthy() -> None:
    session, scenario = live(40)
    now = 0
    player = Player(lambda: now, *session.span(), growing=True, live=True)
    observer = Observer(session, player)
    now += SECOND
    snap = observer.look()
    assert (snap.mode, snap.detail, snap.problems) == ("LIVE", "", ())
    now += 4 * SECOND
    snap = observer.look()
    assert (snap.mode, snap.detail) == ("LIVE", "5s behind")
    assert "nothing has come from the agent for 5s" in snap.problems[0]
    player.pause()
    assert observer.look().detail == "5s behind"
    scenario.run(1)
    snap = observer.look()
    assert (snap.detail, snap.problems) == ("1s behind", ())


def test_a_quiet_host_goes_on_while_its_agent_lives() -> None:
    session = MemorySession(live=True)
    session.append("meta.coverage", t=BOOT, probe="tcp", program="", status=0, reason="")
    now = 0
    player = Player(lambda: now, 0, 0, growing=True, live=True)
    observer = Observer(session, player)
    for second in range(60):
        now += SECOND
        t = BOOT + second * SECOND
        session.append("meta.clock", t=t, wall=t, uncertainty=1)
        snap = observer.look()
        assert (snap.mode, snap.detail, snap.problems) == ("LIVE", "", ())
    (lane,) = [lane for lane in snap.lanes if lane.key == "tcp.retransmits"]
    player.resize(20)
    (lane,) = [lane for lane in observer.look().lanes if lane.key == "tcp.retransmits"]
    assert (lane.values == 0).all()


def test_hostile_names_do_not_reach_the_terminal() -> None:
    session = MemorySession(live=True)
    Scenario(session).run(20)
    session.append("meta.session", t=BOOT, key="host", value="a\x1b]0;x\x07b\n")
    session.append("meta.coverage", t=BOOT, probe="tcp", program="", status=1, reason="\x1b[2J世")
    session.problems = ("\x1b[31mred",)
    session.refresh()
    for width, height in SIZES:
        for line in screen(session, width, height):
            assert line.isprintable()
    assert once(session, 100, BLOCKS).replace("\n", "").isprintable()


def test_an_empty_session_says_it_waits() -> None:
    lines = screen(MemorySession(live=True), 80, 24)
    assert len(lines) == 24
    assert "gpu" not in lines[0]
    text = once(MemorySession(live=True), 80, BLOCKS)
    assert "no data yet" in text


def test_once_is_plain_text_of_the_same_numbers() -> None:
    session, _ = live(60)
    text = once(session, 100, BLOCKS)
    assert "\x1b" not in text
    assert max(len(line) for line in text.splitlines()) <= 100
    snap = observe(session, 100, 24, LanesScreen())
    assert f"{snap.lanes[0].now:.1f}%" in text
    assert "10.0.0.1:40000" in text
    assert once(session, 100, ASCII).isascii()
    assert once(session, 1, ASCII), "no width is too small"
    compare.text("once.txt", text)


@pytest.mark.parametrize(("width", "height"), [(80, 24), (160, 50), (40, 12)])
def test_the_screen_looks_as_it_did(width: int, height: int) -> None:
    session, _ = live(60)
    compare.text(f"live-{width}x{height}.txt", "\n".join(screen(session, width, height)) + "\n")


@settings(max_examples=60, deadline=None)
@given(
    some.integers(1, 320), some.integers(1, 110), some.integers(0, len(LADDER) - 1),
    some.integers(0, 70), some.sampled_from(["cpus", "flows", "vectors", "slow", ""]),
)  # fmt: skip
def test_no_size_zoom_or_place_breaks_it(
    width: int, height: int, zoom: int, second: int, table: str
) -> None:
    ui = LanesScreen(table=table, selected=second)
    player = Player(lambda: 0, *SESSION.span(), growing=False, live=False)
    player.zoom = zoom
    player.resize(columns(ui, width, height))
    player.jump(BOOT + second * SECOND)
    lines = draw(Observer(SESSION, player).look(), ui, BLOCKS, width, height)
    assert [len(text_of(line)) for line in lines] == [width] * height
    assert {role for line in lines for _, role in line} <= set(ROLES)


SESSION = recording(60, cpus=2)

spans = some.lists(
    some.tuples(some.text("ab▁ ", min_size=1, max_size=9), some.sampled_from(ROLES)), max_size=8
)


@given(spans, spans)
def test_exactly_the_cells_that_differ_are_written(
    old: list[tuple[str, str]], new: list[tuple[str, str]]
) -> None:
    a, b = fit(old, 40), fit(new, 40)
    written = np.zeros(40, bool)
    for start, stop in changed(a, b, gap=0):
        written[start:stop] = True
    assert (written == (cells(a) != cells(b))).all()
    joined = changed(a, b)
    assert len(joined) <= len(changed(a, b, gap=0))


def test_a_screen_at_rest_writes_nothing() -> None:
    session = recording(60)
    ui = LanesScreen()
    snap = observe(session, 80, 24, ui, at=BOOT + 30 * SECOND)
    first = draw(snap, ui, BLOCKS, 80, 24)
    again = draw(replace(snap), ui, BLOCKS, 80, 24)
    assert not any(changed(a, b) for a, b in zip(first, again, strict=True))


_GOLDEN = (".txt", ".tsv")


def test_goldens_are_all_in_use() -> None:
    here = {p.name for p in (Path(__file__).parent / "golden").iterdir() if p.suffix in _GOLDEN}
    used = "".join(p.read_text(encoding="utf-8") for p in Path(__file__).parent.glob("test_*.py"))
    assert {name for name in here if name.partition("-")[0] + "-" not in used} <= {"once.txt"}


def test_a_marker_makes_no_other_time_of_a_label() -> None:
    session = recording(60)
    for at in range(20, 24):
        session.append("marker", t=BOOT + at * SECOND, label="x")
    session.refresh()
    snap = observe(session, 80, 24, LanesScreen(table=""), at=BOOT + 30 * SECOND)
    axis = text_of(draw(snap, LanesScreen(table=""), BLOCKS, 80, 24)[1])
    assert axis.count("▼") == 4
    labels = {text for _, text in snap.ticks}
    for word in axis.replace("│", " ").replace("▼", " ▼ ").split()[2:]:
        assert word in labels | {"▼"}


def storm(seconds: float) -> MemorySession:
    """As in a flood: the program on softirq_raise is taken off, but for one second in ten."""
    session, scenario = live(30)
    shed = st.STATUSES.index("shed")
    session.append("meta.coverage", t=scenario.now, probe="softirq", status=shed,
                   program=["softirq_raise", ""], reason="seen 1 s in 10")  # fmt: skip
    for _ in range(round(seconds * 4)):
        scenario.advance()
        for name, rows in session._pending:
            if name == "softirq.cpu":
                rows["wait_hist"] = 0
    session.refresh()
    return session


def test_only_the_lanes_of_a_program_that_is_shed_are_marked() -> None:
    snap = observe(storm(8), 160, 50, LanesScreen())
    marked = {lane.key for lane in snap.lanes if lane.status == "shed"}
    assert marked == {"softirq.wait"}
    assert {lane.key for lane in snap.lanes if "shed" in lane.flags} == {"softirq.wait"}
    (wait,) = [lane for lane in snap.lanes if lane.key == "softirq.wait"]
    assert np.isfinite(wait.now), "the last sample is shown until the next"
    (row,) = [x for x in screen(storm(8), 160, 50) if "raise→run" in x]
    assert "sampled: seen" in row
    assert "ms~" in row


def test_what_concerns_many_lanes_is_said_once() -> None:
    session, scenario = live(30)
    session.append("meta.coverage", t=scenario.now, probe="softirq", program="", status=1,
                   reason="needs root")  # fmt: skip
    session.refresh()
    snap = observe(session, 160, 50, LanesScreen())
    page = "\n".join(text_of(x) for x in problems_page(snap, BLOCKS, 60))
    assert page.count("needs root") == 1
    assert "softirq RCU" in page
