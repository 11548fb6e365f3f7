"""The Textual side: it hears the keys and shows lines; what they mean and say is made elsewhere."""

from __future__ import annotations

import asyncio
import threading
from dataclasses import replace

from textual import events
from textual.app import App, ComposeResult, SuspendNotSupported
from textual.geometry import Size
from textual.message import Message
from textual.timer import Timer

from dsprobe.tui import units
from dsprobe.tui.canvas import Canvas
from dsprobe.tui.control import Control, Save
from dsprobe.tui.glyphs import Glyphs
from dsprobe.tui.observer import Observer
from dsprobe.tui.snapshot import Snapshot
from dsprobe.tui.watcher import Watcher

HZ = 2.0
STALLED = 3.0  # seconds without a snapshot after which the screen says so


class Arrived(Message):
    """The watcher's answer: a snapshot, what to say at the bottom, or what went wrong."""

    def __init__(
        self, snapshot: Snapshot | None = None, said: str = "", failure: Exception | None = None
    ) -> None:
        super().__init__()
        self.snapshot, self.said, self.failure = snapshot, said, failure


class Viewer(App[None], inherit_bindings=False):
    """``hz`` 0 leaves refreshes to whoever calls :meth:`request` (tests do)."""

    ENABLE_COMMAND_PALETTE = False
    CSS = "Screen { background: ansi_default; }"

    def __init__(
        self, observer: Observer, save: Save | None, glyphs: Glyphs, hz: float = HZ
    ) -> None:
        super().__init__(ansi_color=True)
        self.observer, self.player = observer, observer.player
        self.control = Control(observer, self, save, glyphs)
        self.failure: Exception | None = None
        self.shown = 0  # snapshots shown so far
        self.cells = 0  # cells written so far
        self._hz = hz
        self._canvas = Canvas()
        self._terminal = Size(0, 0)
        self._timer: Timer | None = None
        self._events: asyncio.AbstractEventLoop | None = None
        self.watcher = Watcher(
            observer,
            lambda snapshot: self.post_message(Arrived(snapshot)),
            lambda failure: self.post_message(Arrived(failure=failure)),
        )

    def compose(self) -> ComposeResult:
        yield self._canvas

    def on_mount(self) -> None:
        self._events = asyncio.get_running_loop()
        self._terminal = self._terminal or self.size
        self.app_resume_signal.subscribe(self, lambda _: self.repaint())
        self._canvas.focus()
        self.watcher.start()
        self.control.resize(*self._terminal)
        if self._hz:
            self._timer = self.set_interval(1 / self._hz, self._tick)

    def on_unmount(self) -> None:
        self.watcher.stop()

    def leave_for(self, number: int) -> bool:
        """End for a signal, from its handler; False where nothing runs yet."""
        if self._events is None:
            return False
        # A handler interrupts the loop anywhere, asleep as well: it has to be woken.
        self._events.call_soon_threadsafe(self.call_later, self.leave, 128 + number)
        return True

    def _tick(self) -> None:
        self.request()
        if self.watcher.waiting() > STALLED:
            self.paint()

    def on_arrived(self, message: Arrived) -> None:
        if message.failure is not None:
            self.leave(1, message.failure)
        if message.said:
            self.control.message = message.said
        if message.snapshot is not None:
            self.control.snapshot = message.snapshot
            self.shown += 1
            if message.snapshot.body.pending:
                self.request()
        self.paint()

    def on_resize(self, event: events.Resize) -> None:
        # Textual takes the new size over only after this handler: self.size is the one before.
        self._terminal = event.size
        self.control.resize(*self._terminal)
        self.paint()

    def paint(self) -> None:
        """Draw the last snapshot as the keys have it now."""
        if all(self._terminal) and not self.failure:
            try:
                self.cells += self._canvas.show(self.control.lines(self._snapshot()))
            except Exception as e:  # a fault in drawing must not leave a broken terminal
                self.leave(1, e)

    def _snapshot(self) -> Snapshot | None:
        """The last one, which says so when it is old."""
        snapshot = self.control.snapshot
        if snapshot is None or self.watcher.waiting() <= STALLED:
            return snapshot
        length = units.span(int(self.watcher.waiting()) * 1_000_000_000)
        silent = f"stalled for {length}: no answer from {snapshot.source}"
        return replace(snapshot, problems=(silent, *snapshot.problems))

    def on_key(self, event: events.Key) -> None:
        event.stop()
        event.prevent_default()
        try:
            self.control.key(event.key, event.character)
        except Exception as e:  # as in paint
            self.leave(1, e)
        self.paint()

    def on_paste(self, event: events.Paste) -> None:
        self.control.paste(event.text)
        self.paint()

    # -- what the keys ask for --------------------------------------------------------------------

    def request(self) -> None:
        """Ask for a new snapshot; it is shown when it comes."""
        self.watcher.request()

    def leave(self, code: int, failure: Exception | None = None) -> None:
        """End the screen with this exit code."""
        self.failure = self.failure or failure
        self.exit(return_code=code)

    def repaint(self) -> None:
        self._canvas.lines = []
        self.refresh(layout=True)
        self.paint()

    def suspend_to_shell(self) -> bool:
        try:
            self.action_suspend_process()
        except SuspendNotSupported:
            return False
        return True

    def save(self, save: Save, path: str) -> None:
        def work() -> None:
            try:
                said = save(path)
            except Exception as e:  # full disk, no such folder, agent gone: say it and go on
                said = f"not saved: {e}"
            self.post_message(Arrived(said=said))

        threading.Thread(target=work, name="dsprobe-save", daemon=True).start()
