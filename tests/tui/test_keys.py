"""Every key through Textual, on sessions that only move when a test moves them."""

from __future__ import annotations

import pytest

from dsprobe.recordings.timeline import LADDER
from dsprobe.tui.actions import ACTIONS
from dsprobe.tui.draw import columns
from dsprobe.tui.glyphs import ASCII
from dsprobe.tui.player import DEFAULT_WIDTH
from tests.tui.golden import compare
from tests.tui.rig import Rig, drive
from tests.tui.scenario import BOOT, SECOND, live, recording

pytestmark = pytest.mark.asyncio


async def test_the_keys_that_move_the_playhead_do_so_live_and_in_replay() -> None:
    async def script(rig: Rig) -> None:
        p = rig.player
        await rig.press("space")
        assert not p.playing
        at = p.end
        p.jump(at)
        for keys, want in (
            (("left",), at - 5 * SECOND), (("h", "["), at - 15 * SECOND),
            (("right", "l", "]"), at), (("shift+left",), max(at - 60 * SECOND, p.start)),
            (("shift+right",), at), (("g",), p.start),
            (("t",), p.start + LADDER[DEFAULT_WIDTH]), (("T",), p.start),
        ):  # fmt: skip
            await rig.press(*keys)
            want = want // p.width * p.width if keys in (("t",), ("T",)) else want
            assert abs(p.position - want) < p.width, keys
        await rig.press("G")
        assert p.position == p.end
        assert p.following == rig.session.live

    await drive(Rig(recording(100)), script)
    session, _ = live(100)
    await drive(Rig(session), script)


async def test_space_pauses_a_live_screen_while_collection_goes_on() -> None:
    session, scenario = live(60)

    async def script(rig: Rig) -> None:
        assert "LIVE" in rig.lines[0]
        await rig.press("space")
        before = rig.lines[2:16]
        scenario.run(12)
        await rig.settle()
        assert "PAUSED 12s behind" in rig.lines[0]
        assert rig.lines[2:15] == before[:13]
        await rig.press("G")
        assert "LIVE" in rig.lines[0]
        assert rig.player.position == scenario.now

    await drive(Rig(session), script)


async def test_speed_and_direction() -> None:
    async def script(rig: Rig) -> None:
        await rig.press(">", ">", ".")
        assert "PLAY x8" in rig.lines[0]
        rig.now += 2 * SECOND
        await rig.settle()
        assert rig.player.position == BOOT + 16 * SECOND + SECOND // 4
        await rig.press("r", "<", ",")
        assert "PLAY backwards x2" in rig.lines[0]
        rig.now += SECOND
        await rig.settle()
        assert rig.player.position == BOOT + 14 * SECOND + SECOND // 4

    # The scenario's first rows end a quarter of a second after BOOT.
    await drive(Rig(recording(60)), script)


async def test_zoom_and_fit() -> None:
    async def script(rig: Rig) -> None:
        await rig.press("-")
        assert "1s/col" in rig.lines[0]
        await rig.press("+", "=")
        assert "250ms/col" in rig.lines[0]
        await rig.press("0")
        assert "5s/col" in rig.lines[0] or "2s/col" in rig.lines[0]
        assert rig.player.window().end >= rig.player.end

    await drive(Rig(recording(100)), script)


async def test_jump_takes_what_people_type_and_says_what_it_did_not_take() -> None:
    async def script(rig: Rig) -> None:
        await rig.press("b")
        assert "jump to" in rig.lines[-1]
        await rig.type("14:00:30")
        await rig.press("enter")
        assert rig.player.position == BOOT + 30 * SECOND
        assert "14:00:30.0 UTC" in rig.lines[0]
        await rig.press("b")
        await rig.type("soon")
        await rig.press("enter")
        assert "not a time: soon" in rig.lines[-1]
        await rig.press("b")
        await rig.type("19:00")
        await rig.press("enter")
        assert "nearest" in rig.lines[-1]
        assert rig.player.position == rig.player.end
        await rig.press("b")
        await rig.type("10s")
        await rig.press("escape")
        assert rig.player.position == rig.player.end

    await drive(Rig(recording(60)), script)


async def test_markers_of_a_file_live_in_the_viewer() -> None:
    async def script(rig: Rig) -> None:
        for second in ("10s", "20s"):
            await rig.press("b")
            await rig.type(second)
            await rig.press("enter", "m")
            await rig.type(f"at {second}")
            await rig.press("enter")
        assert "marked" in rig.lines[-1]
        assert rig.lines[1].count("▼") == 2
        await rig.press("g", "n")
        assert "marker: at 10s" in rig.lines[-1]
        await rig.press("n", "n")
        assert "no marker after" in rig.lines[-1]
        await rig.press("N")
        assert rig.player.position - rig.player.start == 10 * SECOND

    await drive(Rig(recording(60)), script)


async def test_a_marker_goes_to_the_session_that_takes_it() -> None:
    session, scenario = live(30)
    session.mark = lambda label: session.append(  # type: ignore[attr-defined]
        "marker", t=scenario.now, label=label
    )

    async def script(rig: Rig) -> None:
        await rig.press("m")
        await rig.type("deploy")
        await rig.press("enter")
        await rig.settle()
        assert [m.label for m in rig.player.markers] == ["deploy"]

    await drive(Rig(session), script)


async def test_lanes_are_chosen_scrolled_and_filtered() -> None:
    async def script(rig: Rig) -> None:
        await rig.press("j", "down")
        assert rig.lines[4].startswith(">raise")
        await rig.press("k", "up", "up")
        assert rig.lines[2].startswith(">net_rx worst CPU")
        await rig.press("pagedown", "pagedown", "pagedown", "pagedown")
        assert ">softirq RCU" in rig.text
        assert "net_rx worst CPU" not in rig.text
        await rig.press("pageup", "pageup", "pageup", "pageup", "/")
        await rig.type("tcp")
        await rig.settle()
        assert "TCP sockets" in rig.text, "the filter works while it is typed"
        assert "net_rx worst CPU" not in rig.text
        await rig.press("enter")
        assert "filter: tcp" in rig.lines[-1]
        await rig.press("escape")
        assert "net_rx worst CPU" in rig.text

    await drive(Rig(recording(30)), script)


async def test_tab_walks_through_the_tables() -> None:
    async def script(rig: Rig) -> None:
        assert "CPUs by net_rx" in rig.text
        columns = rig.player.columns
        await rig.press("tab")
        assert "flows by retransmits" in rig.text
        await rig.press("tab")
        assert "softirqs by vector" in rig.text
        await rig.press("tab")
        assert "slowest softirq runs" in rig.text
        await rig.press("tab")
        assert "by vector" not in rig.text
        assert rig.player.columns == columns
        await rig.press("tab")
        assert "CPUs by net_rx" in rig.text

    session, _ = live(30)
    await drive(Rig(session), script)


async def test_wall_clock_or_relative() -> None:
    async def script(rig: Rig) -> None:
        assert "14:00:00.2 UTC" in rig.lines[0]
        await rig.press("w")
        assert "+0:00.0" in rig.lines[0]
        assert "UTC" not in rig.text
        await rig.press("w")
        assert "UTC" in rig.lines[0]

    await drive(Rig(recording(30)), script)


async def test_the_palette_runs_what_is_picked() -> None:
    async def script(rig: Rig) -> None:
        await rig.press(":")
        await rig.type("longer")
        await rig.press("enter")
        assert "1s/col" in rig.lines[0]
        await rig.press("ctrl+p", "escape")
        assert rig.app.control.prompt is None
        await rig.press(":")
        await rig.type("nothing at all")
        await rig.press("enter")
        assert rig.app.is_running

    await drive(Rig(recording(30)), script)


async def test_help_scrolls_and_leaves() -> None:
    async def script(rig: Rig) -> None:
        await rig.press("?")
        assert "Pause, or go on" in rig.text
        assert "(more)" in rig.lines[-1]
        await rig.press("pagedown", "pagedown", "pagedown")
        assert "a marker, on the time axis" in rig.text
        await rig.press("q")
        assert "net_rx worst CPU" in rig.text
        assert rig.app.is_running, "q leaves the help, not the screen"

    await drive(Rig(recording(30)), script)


async def test_what_is_wrong_is_told_in_full() -> None:
    session, _ = live(30)
    session.problems = ("the connection was lost; " + "it is tried again " * 8,)
    session.losses = {"softirq.slow": 12_300}

    async def script(rig: Rig) -> None:
        await rig.press("p")
        assert "12.3k of softirq.slow" in rig.text
        words = " ".join(rig.text.split())
        assert session.problems[0].strip() in words
        assert "CPU pressure: missing: this kernel has no /proc/pressure; boot with psi=1" in words
        await rig.press("?")
        assert "Pause, or go on" in rig.text
        await rig.press("escape")
        assert "net_rx worst CPU" in rig.text

    await drive(Rig(session), script)


async def test_repaint_writes_every_cell_again() -> None:
    async def script(rig: Rig) -> None:
        before = rig.app.cells
        await rig.settle()
        assert rig.app.cells == before, "at rest nothing is written"
        await rig.press("ctrl+l")
        assert rig.app.cells - before >= 80 * 24

    session, _ = live(30)
    await drive(Rig(session), script)


async def test_only_a_closed_bucket_moves_the_curves() -> None:
    session, scenario = live(60)

    async def script(rig: Rig) -> None:
        await rig.press("-")  # a second per column
        curves = [line[31:] for line in rig.lines[2:10]]
        scenario.run(0.5)
        await rig.settle()
        assert [line[31:] for line in rig.lines[2:10]] == curves
        scenario.run(0.5)
        await rig.settle()
        assert [line[31:] for line in rig.lines[2:10]] != curves

    await drive(Rig(session), script)


async def test_every_action_can_be_carried_out() -> None:
    async def script(rig: Rig) -> None:
        for action in ACTIONS:
            if action.id in ("quit", "suspend"):
                continue
            rig.app.control.do(action)
            await rig.settle()
            rig.app.control.prompt, rig.app.control.page = None, ""
            assert rig.app.failure is None

    session, _ = live(30)
    await drive(Rig(session), script)


async def test_the_terminal_may_change_its_size_at_any_time() -> None:
    async def script(rig: Rig) -> None:
        for width, height in ((1, 1), (10, 3), (300, 100), (160, 50), (2, 40), (80, 24)):
            await rig.pilot.resize_terminal(width, height)
            await rig.settle()
            assert [len(line) for line in rig.lines] == [width] * height
            wanted = columns(rig.app.control.screen, width, height)
            assert rig.player.columns == wanted
            assert rig.app.control.snapshot is not None
            assert rig.app.control.snapshot.window.count == wanted
        assert "net_rx worst CPU" in rig.text

    session, _ = live(30)
    await drive(Rig(session), script, size=(40, 10))


@pytest.mark.parametrize("size", [(80, 24), (160, 50)])
async def test_the_picture_is_the_one_it_was(size: tuple[int, int]) -> None:
    async def script(rig: Rig) -> None:
        compare.svg(f"live-{size[0]}x{size[1]}.tsv", rig.app.export_screenshot())

    session, _ = live(60)
    await drive(Rig(session), script, size=size)


async def test_the_picture_without_colour_says_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    async def colour(rig: Rig) -> None:
        rig.said = rig.lines  # type: ignore[attr-defined]

    async def none(rig: Rig) -> None:
        rig.said = rig.lines  # type: ignore[attr-defined]
        assert rig.app.no_color

    first = await drive(Rig(live(60)[0]), colour)
    monkeypatch.setenv("NO_COLOR", "1")
    second = await drive(Rig(live(60)[0]), none)
    assert first.said == second.said  # type: ignore[attr-defined]


async def test_ascii_stays_ascii_in_every_page() -> None:
    async def script(rig: Rig) -> None:
        for keys in (("?",), ("q", ":"), ("escape", "b"), ("escape",)):
            await rig.press(*keys)
            assert rig.text.isascii()

    await drive(Rig(live(60)[0], glyphs=ASCII), script)
