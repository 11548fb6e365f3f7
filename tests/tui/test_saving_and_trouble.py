"""Saving, and sources that hang or break, while the keys go on."""

from __future__ import annotations

import threading
import time

import pytest

from tests.tui.rig import Rig, drive
from tests.tui.scenario import live, recording

pytestmark = pytest.mark.asyncio


async def test_save_asks_for_a_name_and_does_not_hold_up_the_keys() -> None:
    gate, asked = threading.Event(), []

    def save(path: str) -> str:
        gate.wait(20)
        asked.append(path)
        if path == "bad":
            raise OSError("no space left on the device")
        return f"saved {path}"

    session, _ = live(30)

    async def script(rig: Rig) -> None:
        await rig.press("s")
        await rig.type("out.mcap")
        await rig.press("enter")
        assert "saving" in rig.lines[-1]
        await rig.press("-")
        assert "1s/col" in rig.lines[0]
        gate.set()
        await rig.until(lambda: "saved out.mcap" in rig.lines[-1])
        await rig.press("s")
        await rig.type("bad")
        await rig.press("enter")
        await rig.until(lambda: "not saved: no space left" in rig.lines[-1])
        assert asked == ["out.mcap", "bad"]

    await drive(Rig(session, save=save), script)


async def test_a_file_needs_no_saving() -> None:
    async def script(rig: Rig) -> None:
        await rig.press("s")
        assert "this is a file already: gpu-07.mcap" in rig.lines[-1]

    await drive(Rig(recording(30)), script)


async def test_a_source_that_hangs_leaves_the_keys_alive() -> None:
    session, _ = live(30)
    gate = threading.Event()

    async def script(rig: Rig) -> None:
        plain = session.refresh
        session.refresh = lambda: gate.wait(60) and plain()  # type: ignore[method-assign]
        rig.app.request()
        rig.app.watcher._since = time.monotonic() - 100  # as if it had been long ago
        rig.app.paint()
        assert "stalled for 1m40s: no answer from /run/" in rig.lines[0]
        await rig.pilot.press("j", "?")
        await rig.pilot.pause()
        assert rig.app.control.page == "help"
        await rig.pilot.press("q", "q")
        await rig.until(lambda: not rig.app.is_running)

    rig = await drive(Rig(session), script)
    gate.set()
    assert rig.app.return_code == 0


async def test_a_fault_in_the_session_ends_the_screen_with_1() -> None:
    session, _ = live(30)

    async def script(rig: Rig) -> None:
        def broken() -> bool:
            raise ValueError("broken")

        session.refresh = broken  # type: ignore[method-assign]
        rig.app.request()
        await rig.until(lambda: rig.app.return_code is not None)

    rig = await drive(Rig(session), script)
    assert rig.app.return_code == 1
    assert str(rig.app.failure) == "broken"
