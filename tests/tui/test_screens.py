"""The number keys, and the keys of screens with rows that open, through Textual."""

from __future__ import annotations

import pytest

from dsprobe.tui.actions import ACTIONS, on_screen
from dsprobe.tui.glyphs import ASCII
from dsprobe.tui.treescreen import TreeBody
from tests.tui.cudascene import BOOT, MIB, SECOND, Scene, recording
from tests.tui.golden import compare
from tests.tui.rig import Rig, drive
from tests.tui.scenario import live

pytestmark = pytest.mark.asyncio


def at_end(rig: Rig) -> Rig:
    rig.player.jump(rig.player.end)
    return rig


def selected(rig: Rig) -> str:
    return next(line for line in rig.lines if line.startswith(">"))


async def test_number_keys_choose_the_screen_and_the_playhead_stays() -> None:
    async def script(rig: Rig) -> None:
        await rig.press("space")
        at = rig.player.position
        for key, said in (("2", "device memory"), ("3", "launches over"), ("1", "in synchronize"),
                          ("2", "device memory"), ("1", "in synchronize")):  # fmt: skip
            await rig.press(key)
            assert said in rig.text
            assert rig.player.position == at
        assert rig.app.failure is None

    await drive(at_end(Rig(recording(60))), script)
    scene = Scene(live=True)
    scene.advance(60)
    await drive(Rig(scene.session), script)


@pytest.mark.parametrize("screen", ["2", "3"])
async def test_time_is_the_same_on_every_screen(screen: str) -> None:
    async def script(rig: Rig) -> None:
        p = rig.player
        await rig.press(screen)
        at = p.position
        await rig.press("[")
        assert p.position == at - 5 * SECOND
        await rig.press("{")
        assert p.position == at - 65 * SECOND
        await rig.press("G", "-")
        assert "1s/col" in rig.lines[0]
        await rig.press("w")
        assert "+2:" in rig.lines[1], "the axis is relative as well"
        await rig.press("w", "b")
        await rig.type("1m")
        await rig.press("enter")
        assert p.position == p.start + 60 * SECOND
        await rig.press("m")
        await rig.type("here")
        await rig.press("enter")
        assert "▼" in rig.lines[1]
        await rig.press("?")
        assert "Lanes: everything on one clock" in rig.text
        await rig.press("q", "p")
        assert "On this screen" in rig.text
        await rig.press("escape")
        assert rig.app.is_running

    await drive(at_end(Rig(recording(150))), script, size=(100, 40))


async def test_rows_open_and_close() -> None:
    async def script(rig: Rig) -> None:
        await rig.press("2")
        assert "append_kv" in selected(rig), "it begins at the leak"
        await rig.press("left")
        assert "decode" in selected(rig)
        assert "forward" in rig.text
        await rig.press("left")
        assert "forward" not in rig.text
        assert "LEAK 1.00M/s decode" in selected(rig), "what is closed says that it leaks"
        await rig.press("right")
        assert "forward" in rig.text
        await rig.press("enter")
        assert "forward" not in rig.text
        await rig.press("*")
        assert "forward" in rig.text
        await rig.press("k", "k", "k", "k", "k")
        assert "python3:4711" in selected(rig)
        await rig.press("enter")
        assert "load (" not in rig.text
        assert "work (" in rig.text
        await rig.press("3", "enter")
        assert "stream 0x55d" not in rig.text
        await rig.press("right", "j")
        assert "engine:4720" in selected(rig)
        await rig.press("2")
        assert "python3:4711" in selected(rig), "each screen has its own rows"

    await drive(at_end(Rig(recording(150))), script)


async def test_the_selected_row_stays_while_rows_move() -> None:
    scene = Scene(live=True)
    scene.advance(120)

    async def script(rig: Rig) -> None:
        await rig.press("2", "o", "*", "j", "j", "j")
        name = selected(rig).split()[-2:]
        before = rig.lines.index(selected(rig))
        scene.leaking = False
        for _ in range(3):  # the worker's one stack grows over all others
            scene.other.alloc(scene.now, 4000 * MIB)
            scene.advance(1)
            await rig.settle()
        assert selected(rig).split()[-2:] == name
        assert rig.lines.index(selected(rig)) != before

    await drive(Rig(scene.session), script)


async def test_order_filter_and_kind() -> None:
    async def script(rig: Rig) -> None:
        await rig.press("2", "o")
        assert "live*" in rig.text
        await rig.press("tab", "tab", "tab")
        assert "growth*" in rig.text
        await rig.press("d")
        assert "host memory" in rig.text
        assert "stage (io.py:5)" in rig.text
        await rig.press("d", "d", "/")
        await rig.type("cache")
        await rig.settle()
        assert "append_kv" in rig.text, "the filter works while it is typed"
        assert "load (" not in rig.text
        await rig.press("enter")
        assert "filter: cache" in rig.lines[-1]
        await rig.press("3")
        assert "engine:4720" in rig.text, "each screen has its own filter"
        await rig.press("2", "escape")
        assert "load (" in rig.text

    await drive(at_end(Rig(recording(150))), script)


async def test_growth_since_a_marker() -> None:
    async def script(rig: Rig) -> None:
        rig.player.jump(BOOT + 100 * SECOND)
        await rig.press("2", "a")
        assert "no marker A before" in rig.text
        await rig.press("A")
        assert "growth is counted from this moment on" in rig.lines[-1]
        rig.player.jump(BOOT + 140 * SECOND)
        await rig.press("/")
        await rig.type("append")
        await rig.press("enter")
        assert "growth since A, 14:01:40.0 UTC" in rig.text
        assert "+40.0M" in rig.text
        await rig.press("a")
        assert "in view" in rig.text
        assert "+40.0M" not in rig.text

    await drive(Rig(recording(150)), script, size=(100, 24))


async def test_every_action_of_every_screen_can_be_carried_out() -> None:
    async def script(rig: Rig) -> None:
        for screen in [a for a in ACTIONS if a.group == "Screens"]:
            rig.app.control.do(screen)
            await rig.settle()
            for action in on_screen(screen.id):
                if action.id in ("quit", "suspend") or action.group == "Screens":
                    continue
                rig.app.control.do(action)
                await rig.settle()
                rig.app.control.prompt, rig.app.control.page = None, ""
                assert rig.app.failure is None, (screen.id, action.id)

    await drive(Rig(recording(60)), script)


async def test_screens_without_anything_to_show() -> None:
    async def script(rig: Rig) -> None:
        for key in ("2", "3"):
            await rig.press(key)
            assert "not part of this session" in rig.text
            await rig.press("j", "enter", "left", "right", "*", "o", "pagedown")
            assert rig.app.failure is None

    await drive(Rig(live(30)[0]), script)


async def test_the_terminal_may_change_its_size_on_any_screen() -> None:
    async def script(rig: Rig) -> None:
        for key in ("2", "3"):
            await rig.press(key)
            for width, height in ((1, 1), (10, 3), (300, 100), (2, 40), (80, 24)):
                await rig.pilot.resize_terminal(width, height)
                await rig.settle()
                assert [len(line) for line in rig.lines] == [width] * height
        assert isinstance(rig.app.control.snapshot.body, TreeBody)  # type: ignore[union-attr]

    await drive(at_end(Rig(recording(60))), script, size=(40, 10))


async def test_without_colour_and_in_ascii_it_says_the_same(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def script(rig: Rig) -> None:
        await rig.press("2")
        assert rig.text.isascii()
        assert "! LEAK 1.00M/s append_kv" in rig.text
        await rig.press("3")
        assert rig.text.isascii()

    monkeypatch.setenv("NO_COLOR", "1")
    await drive(at_end(Rig(recording(150), glyphs=ASCII)), script)


async def test_lanes_of_cuda_fold_where_nothing_uses_it() -> None:
    session, scenario = live(30)
    session.append("meta.coverage", t=BOOT, program="", status=0, reason="",
                   probe=["memory", "launches", "calls"])  # fmt: skip

    async def script(rig: Rig) -> None:
        assert rig.text.count("no process uses CUDA") == 1
        assert "GPU memory live" not in rig.text
        await rig.press("/")
        await rig.type("launch interval")
        await rig.press("enter")
        assert "launch interval P99" in rig.text, "a filter finds each of them"
        await rig.press("escape")
        session.append("meta.process", t=scenario.now, id=1, pid=7, comm="python3")
        await rig.settle()
        assert "GPU memory live" in rig.text
        assert "no process uses CUDA" not in rig.text

    await drive(Rig(session), script)


@pytest.mark.parametrize(("key", "name"), [("2", "memory"), ("3", "launches")])
async def test_the_picture_is_the_one_it_was(key: str, name: str) -> None:
    """With its colours."""

    async def script(rig: Rig) -> None:
        await rig.press(key)
        compare.svg(f"{name}-80x24.tsv", rig.app.export_screenshot())

    await drive(at_end(Rig(recording(150))), script)
