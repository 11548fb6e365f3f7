"""The Textual side: it draws and hears the keys; what it shows is computed elsewhere."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from dataclasses import replace

from textual import events
from textual.app import App, ComposeResult, SuspendNotSupported
from textual.geometry import Size
from textual.message import Message
from textual.timer import Timer

from dsprobe.tui import units
from dsprobe.tui.actions import BY_KEY, Action
from dsprobe.tui.canvas import Canvas
from dsprobe.tui.draw import Layout, Ui, draw, shown_tables
from dsprobe.tui.glyphs import Glyphs
from dsprobe.tui.lines import Line
from dsprobe.tui.pages import help_page, page_lines, problems_page
from dsprobe.tui.player import FAR, SEEK
from dsprobe.tui.prompt import Prompt, prompt_lines
from dsprobe.tui.snapshot import Observer, Snapshot
from dsprobe.tui.watcher import Watcher

HZ = 2.0
STALLED = 3.0  # seconds without a snapshot after which the screen says so

Save = Callable[[str], str]


class Arrived(Message):
    """The watcher's answer: a snapshot, what to say at the bottom, or what went wrong."""

    def __init__(
        self, snapshot: Snapshot | None = None, said: str = "", failure: Exception | None = None
    ) -> None:
        super().__init__()
        self.snapshot, self.said, self.failure = snapshot, said, failure


class Screen(App[None], inherit_bindings=False):
    """``hz`` 0 leaves refreshes to whoever calls :meth:`request` (tests do)."""

    ENABLE_COMMAND_PALETTE = False
    CSS = "Screen { background: ansi_default; }"

    def __init__(
        self, observer: Observer, save: Save | None, glyphs: Glyphs, hz: float = HZ
    ) -> None:
        super().__init__(ansi_color=True)
        self.observer, self.player = observer, observer.player
        self.glyphs = glyphs
        self.ui = Ui()
        self.prompt: Prompt | None = None
        self.page = ""  # "help" or "problems" while that page is shown, from line ``scroll`` on
        self.scroll = 0
        self.snapshot: Snapshot | None = None
        self.failure: Exception | None = None
        self.shown = 0  # snapshots shown so far
        self.cells = 0  # cells written so far
        self._save, self._hz = save, hz
        self._canvas = Canvas()
        self._terminal = Size(0, 0)
        self._timer: Timer | None = None
        self._marked = 0
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
        self.app_resume_signal.subscribe(self, lambda _: self._repaint())
        self._canvas.focus()
        self.watcher.start()
        self.request()
        if self._hz:
            self._timer = self.set_interval(1 / self._hz, self._tick)

    def on_unmount(self) -> None:
        self.watcher.stop()

    def request(self) -> None:
        """Ask for a new snapshot; it is shown when it comes."""
        self.watcher.request()

    def leave(self, code: int, failure: Exception | None = None) -> None:
        """End the screen with this exit code."""
        self.failure = self.failure or failure
        self.exit(return_code=code)

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
            self.ui.message = message.said
        if message.snapshot is not None:
            self.snapshot = message.snapshot
            self.shown += 1
        self.paint()

    def on_resize(self, event: events.Resize) -> None:
        # Textual takes the new size over only after this handler: self.size is the one before.
        self._terminal = event.size
        self._fit()
        self.paint()

    def _fit(self) -> None:
        """Tell the playhead how many columns there are."""
        layout = Layout.of(*self._terminal, self.ui.table)
        self.observer.tables = shown_tables(self.ui, layout)
        with self.observer.lock:
            self.player.resize(layout.plot)
        self.request()

    # -- drawing ----------------------------------------------------------------------------------

    def paint(self) -> None:
        """Draw the last snapshot as the keys have it now."""
        width, height = self._terminal
        if width and height and not self.failure:
            try:
                self.cells += self._canvas.show(self._lines(width, height))
            except Exception as e:  # a fault in drawing must not leave a broken terminal
                self.leave(1, e)

    def _lines(self, width: int, height: int) -> list[Line]:
        if self.page:
            return page_lines(self._page(width), self.scroll, width, height)
        snapshot = self.snapshot
        if snapshot is None:
            return [((" " * width, "plain"),)] * height
        if self.watcher.waiting() > STALLED:
            length = units.span(int(self.watcher.waiting()) * 1_000_000_000)
            silent = f"stalled for {length}: no answer from {snapshot.source}"
            snapshot = replace(snapshot, problems=(silent, *snapshot.problems))
        lines = draw(snapshot, self.ui, self.glyphs, width, height)
        if self.prompt is not None:
            over = prompt_lines(self.prompt, self.glyphs, width, height)
            lines[-len(over) :] = over
        return lines

    # -- keys -------------------------------------------------------------------------------------

    def on_key(self, event: events.Key) -> None:
        event.stop()
        event.prevent_default()
        try:
            self._key(event.key, event.character)
        except Exception as e:  # as in paint
            self.leave(1, e)
        self.paint()

    def on_paste(self, event: events.Paste) -> None:
        if self.prompt is not None:
            self.prompt.insert(event.text)
            self.paint()

    def _key(self, key: str, character: str | None) -> None:
        if self.prompt is not None:
            self._prompt_key(self.prompt, key, character)
            return
        action = BY_KEY.get(key) or BY_KEY.get(character or "")
        if self.page:
            self._page_key(key, action)
        elif action is not None:
            self.do(action)
        elif key == "escape":
            self.ui.filter = ""

    def _page(self, width: int) -> list[Line]:
        if self.page == "problems" and self.snapshot is not None:
            return problems_page(self.snapshot, self.glyphs, width)
        return help_page(self.glyphs, width)

    def _page_key(self, key: str, action: Action | None) -> None:
        name = action.id if action else key
        screenful = max(self._terminal.height - 1, 1)
        moves = {"up": -1, "down": 1, "page_up": -screenful, "page_down": screenful,
                 "pause": screenful}  # fmt: skip
        last = max(len(self._page(self._terminal.width)) - self._terminal.height, 0)
        if name in moves:
            self.scroll = min(max(self.scroll + moves[name], 0), last)
        elif name in ("quit", "escape", self.page):
            self.page = ""
        elif name in ("help", "problems"):
            self.page, self.scroll = name, 0
        elif name == "repaint":
            self._repaint()

    def _prompt_key(self, prompt: Prompt, key: str, character: str | None) -> None:
        state = prompt.key(key, character)
        if state == "cancel" and prompt.kind == "filter":
            self.ui.filter = ""
        if prompt.kind == "filter" and state != "cancel":
            self.ui.filter = prompt.text.strip()
        if state == "open":
            return
        self.prompt = None
        if state == "done":
            self._answered(prompt)

    def _answered(self, prompt: Prompt) -> None:
        text = prompt.text.strip()
        if prompt.kind == "palette":
            picked = prompt.picked()
            if picked:
                self.do(picked)
        elif prompt.kind == "jump" and text:
            self._jump(text)
        elif prompt.kind == "mark":
            self._mark(text)
        elif prompt.kind == "save":
            self._start_saving(text)

    def do(self, action: Action) -> None:
        """Carry out one action of the table."""
        self.ui.message = ""
        moves = {
            "pause": self.player.pause,
            "reverse": self.player.reverse,
            "slower": lambda: self.player.faster(-1),
            "faster": lambda: self.player.faster(1),
            "back": lambda: self.player.seek(-SEEK),
            "forward": lambda: self.player.seek(SEEK),
            "far_back": lambda: self.player.seek(-FAR),
            "far_forward": lambda: self.player.seek(FAR),
            "step": lambda: self.player.step(1),
            "step_back": lambda: self.player.step(-1),
            "start": self.player.to_start,
            "end": self.player.live,
            "next_mark": lambda: self._to_marker(1),
            "previous_mark": lambda: self._to_marker(-1),
            "zoom_in": lambda: self.player.zoom_by(1),
            "zoom_out": lambda: self.player.zoom_by(-1),
            "fit": self.player.fit,
        }
        if action.id in moves:
            with self.observer.lock:
                self.player.tick()
                moves[action.id]()
            self.request()
        else:
            getattr(self, f"_do_{action.id}")()

    def _do_up(self) -> None:
        self._select(-1)

    def _do_down(self) -> None:
        self._select(1)

    def _do_page_up(self) -> None:
        self._select(-max(self._terminal.height // 2, 1))

    def _do_page_down(self) -> None:
        self._select(max(self._terminal.height // 2, 1))

    def _select(self, n: int) -> None:
        last = len(self.ui.lanes(self.snapshot)) - 1 if self.snapshot else 0
        self.ui.selected = min(max(self.ui.selected + n, 0), max(last, 0))

    def _do_filter(self) -> None:
        self.prompt = Prompt("filter", self.ui.filter)

    def _do_table(self) -> None:
        self.ui.next_table()
        self._fit()

    def _do_clock(self) -> None:
        self.observer.relative = not self.observer.relative
        self.request()

    def _do_jump(self) -> None:
        self.prompt = Prompt("jump")

    def _do_mark(self) -> None:
        with self.observer.lock:
            self.player.tick()
            self._marked = self.player.position
        self.prompt = Prompt("mark")

    def _do_palette(self) -> None:
        self.prompt = Prompt("palette")

    def _do_help(self) -> None:
        self.page, self.scroll = "help", 0

    def _do_problems(self) -> None:
        self.page, self.scroll = "problems", 0

    def _do_repaint(self) -> None:
        self._repaint()

    def _repaint(self) -> None:
        """Write every cell anew: another program may have written over them."""
        self._canvas.lines = []
        self.refresh(layout=True)
        self.paint()

    def _do_suspend(self) -> None:
        try:
            self.action_suspend_process()
        except SuspendNotSupported:
            self.ui.message = "this terminal cannot suspend"

    def _do_quit(self) -> None:
        self.leave(0)

    def _do_save(self) -> None:
        if self._save is None:
            self.ui.message = f"this is a file already: {self.observer.session.name}"
        else:
            self.prompt = Prompt("save")

    # -- what takes an answer ---------------------------------------------------------------------

    def _jump(self, text: str) -> None:
        with self.observer.lock:
            t = self.observer.scale.parse(text, self.player.position, self.player.end)
            held = t is not None and self.player.jump(t)
        if t is None:
            self.ui.message = f"not a time: {text}"
        elif not held:
            self.ui.message = f"{text} is not held: went to the nearest moment that is"
        self.request()

    def _mark(self, label: str) -> None:
        mark = getattr(self.observer.session, "mark", None)
        with self.observer.lock:
            if mark is None:
                self.player.mark(label, self._marked)
        if mark is not None:
            mark(label)  # it comes back as a row of the session
        self.ui.message = f"marked {self.observer.scale.text(self._marked)}"
        self.request()

    def _to_marker(self, n: int) -> None:
        if not self.player.to_marker(n):
            self.ui.message = f"no marker {'after' if n > 0 else 'before'} this moment"
            return
        here = [m.label for m in self.player.markers if m.t == self.player.position and m.label]
        self.ui.message = f"marker: {here[0]}" if here else ""

    def _start_saving(self, path: str) -> None:
        save = self._save
        assert save is not None  # the prompt opens only where there is one
        self.ui.message = "saving ..."

        def work() -> None:
            try:
                said = save(path)
            except Exception as e:  # full disk, no such folder, agent gone: say it and go on
                said = f"not saved: {e}"
            self.post_message(Arrived(said=said))

        threading.Thread(target=work, name="dsprobe-save", daemon=True).start()
