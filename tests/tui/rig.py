"""The viewer, driven key by key, on a session that only moves when a test moves it."""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable

from textual.pilot import Pilot

from dsprobe.tui.glyphs import BLOCKS, Glyphs
from dsprobe.tui.lines import text_of
from dsprobe.tui.observer import Observer
from dsprobe.tui.player import Player
from dsprobe.tui.viewer import Viewer
from tests.tui.memory import MemorySession


class Rig:
    """A screen, its pilot and the hand-set clock."""

    def __init__(self, session: MemorySession, glyphs: Glyphs = BLOCKS,
                 save: Callable[[str], str] | None = None) -> None:  # fmt: skip
        self.session = session
        self.now = 0
        self.player = Player(
            lambda: self.now, *session.span(), growing=session.live, live=session.live
        )
        self.app = Viewer(Observer(session, self.player), save, glyphs, hz=0)
        self.pilot: Pilot[None]

    async def until(self, condition: Callable[[], object]) -> None:
        """Let the app work until ``condition`` holds."""
        deadline = time.monotonic() + 20
        while not condition():
            assert time.monotonic() < deadline, "it never came to that"
            await self.pilot.pause()

    async def settle(self) -> None:
        """A snapshot of everything so far has been shown."""
        await self.pilot.pause()
        shown = self.app.shown
        self.app.request()
        await self.until(lambda: self.app.shown > shown and not self.app.watcher.waiting())

    async def press(self, *keys: str) -> None:
        await self.pilot.press(*keys)
        await self.settle()

    async def type(self, text: str) -> None:
        await self.pilot.press(*("space" if c == " " else c for c in text))

    @property
    def lines(self) -> list[str]:
        return [text_of(line) for line in self.app._canvas.lines]

    @property
    def text(self) -> str:
        return "\n".join(self.lines)


async def drive(
    rig: Rig, script: Callable[[Rig], Awaitable[None]], size: tuple[int, int] = (80, 24)
) -> Rig:
    async with rig.app.run_test(size=size) as pilot:
        rig.pilot = pilot
        await rig.settle()
        await script(rig)
    return rig
