"""What the keys do, whatever screen is shown: the playhead, screens, prompts and pages of text."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from dsprobe.tui.actions import Action, by_key
from dsprobe.tui.draw import body_rows, columns, draw
from dsprobe.tui.glyphs import Glyphs
from dsprobe.tui.lanes import LanesScreen
from dsprobe.tui.launches import LaunchesScreen
from dsprobe.tui.lines import Line
from dsprobe.tui.memory import MemoryScreen
from dsprobe.tui.observer import Observer
from dsprobe.tui.pages import help_page, page_lines, problems_page
from dsprobe.tui.player import FAR, SEEK
from dsprobe.tui.prompt import Prompt, prompt_lines
from dsprobe.tui.screen import Screen
from dsprobe.tui.snapshot import Snapshot


def every_screen() -> tuple[Screen, ...]:
    """All screens, as they are at the start."""
    return LanesScreen(), MemoryScreen(), LaunchesScreen()


Save = Callable[[str], str]


class Terminal(Protocol):
    """What the keys can ask of whatever shows the lines."""

    def request(self) -> None:
        """Look at the session again, soon."""

    def leave(self, code: int) -> None:
        """End with that exit code."""

    def repaint(self) -> None:
        """Write every cell anew: another program may have written over them."""

    def suspend_to_shell(self) -> bool:
        """To the shell; False where that cannot be."""

    def save(self, save: Save, path: str) -> None:
        """Save without holding up the keys, and put what is said of it into ``message``."""


class Control:
    """``save`` gets a file name and returns a sentence; None where there is nothing to save."""

    def __init__(
        self, observer: Observer, terminal: Terminal, save: Save | None, glyphs: Glyphs
    ) -> None:
        self.observer, self.player = observer, observer.player
        self.glyphs = glyphs
        self.screens: dict[str, Screen] = {s.id: s for s in every_screen()}
        self.screen = self.screens["lanes"]
        self.observer.screen = self.screen
        self.snapshot: Snapshot | None = None
        self.message = ""
        self.prompt: Prompt | None = None
        self.page = ""  # "help" or "problems" while that page is shown, from line ``scroll`` on
        self.scroll = 0
        self._size = (0, 0)
        self._marked = 0
        self._terminal, self._save = terminal, save

    def resize(self, width: int, height: int) -> None:
        """The terminal has this size from now on."""
        self._size = (width, height)
        self._fit()

    def _fit(self) -> None:
        """Tell the playhead how many columns there are."""
        count = columns(self.screen, *self._size)
        with self.observer.lock:
            self.player.resize(count)
        self._terminal.request()

    def lines(self, snapshot: Snapshot | None) -> list[Line]:
        """All of the terminal, as the keys have it now."""
        width, height = self._size
        if self.page:
            return page_lines(self._page(), self.scroll, width, height)
        if snapshot is None:
            return [((" " * width, "plain"),)] * height
        lines = draw(snapshot, self.screen, self.glyphs, width, height, self.message)
        if self.prompt is not None:
            over = prompt_lines(self.prompt, self.glyphs, width, height)
            lines[-len(over) :] = over
        return lines

    # -- keys -------------------------------------------------------------------------------------

    def key(self, key: str, character: str | None) -> None:
        """Take one key, by Textual's name, and the character that it types."""
        if self.prompt is not None:
            self._prompt_key(self.prompt, key, character)
            return
        keys = by_key(self.screen.id)
        action = keys.get(key) or keys.get(character or "")
        if self.page:
            self._page_key(key, action)
        elif action is not None:
            self.do(action)
        elif key == "escape":
            self._filter("")

    def paste(self, text: str) -> None:
        if self.prompt is not None:
            self.prompt.insert(text)
            self._filter_as_typed(self.prompt)

    def _page(self) -> list[Line]:
        if self.page == "problems" and self.snapshot is not None:
            return problems_page(self.snapshot, self.glyphs, self._size[0])
        return help_page(self.glyphs, self._size[0])

    def _page_key(self, key: str, action: Action | None) -> None:
        name = action.id if action else key
        height = self._size[1]
        screenful = max(height - 1, 1)
        moves = {"up": -1, "down": 1, "page_up": -screenful, "page_down": screenful,
                 "pause": screenful}  # fmt: skip
        last = max(len(self._page()) - height, 0)
        if name in moves:
            self.scroll = min(max(self.scroll + moves[name], 0), last)
        elif name in ("quit", "escape", self.page):
            self.page = ""
        elif name in ("help", "problems"):
            self.page, self.scroll = name, 0
        elif name == "repaint":
            self._terminal.repaint()

    def _prompt_key(self, prompt: Prompt, key: str, character: str | None) -> None:
        state = prompt.key(key, character)
        if state == "cancel" and prompt.kind == "filter":
            self._filter("")
        else:
            self._filter_as_typed(prompt)
        if state == "open":
            return
        self.prompt = None
        if state == "done":
            self._answered(prompt)

    def _filter_as_typed(self, prompt: Prompt) -> None:
        if prompt.kind == "filter":
            self._filter(prompt.text.strip())

    def _filter(self, text: str) -> None:
        if self.screen.filter != text:
            self.screen.filter = text
            self._terminal.request()

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
        elif prompt.kind == "save" and self._save is not None:
            self.message = "saving ..."
            self._terminal.save(self._save, text)

    def do(self, action: Action) -> None:
        """Carry out one action of the table."""
        self.message = ""
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
            self._terminal.request()
        elif action.id in self.screens:
            self._show(self.screens[action.id])
        elif action.group == "Rows" and action.id != "filter":
            rows = body_rows(self._size[1])
            self.message = self.screen.do(action.id, self.snapshot, rows)
            self._fit()
        else:
            getattr(self, f"_do_{action.id}")()

    def _show(self, screen: Screen) -> None:
        self.screen = self.observer.screen = screen
        self._fit()

    def _do_filter(self) -> None:
        self._ask("filter", self.screen.filter)

    def _do_clock(self) -> None:
        self.observer.relative = not self.observer.relative
        self._terminal.request()

    def _do_jump(self) -> None:
        self._ask("jump")

    def _do_mark(self) -> None:
        with self.observer.lock:
            self.player.tick()
            self._marked = self.player.position
        self._ask("mark")

    def _do_palette(self) -> None:
        self._ask("palette")

    def _ask(self, kind: str, text: str = "") -> None:
        self.prompt = Prompt(kind, self.screen.id, text)

    def _do_help(self) -> None:
        self.page, self.scroll = "help", 0

    def _do_problems(self) -> None:
        self.page, self.scroll = "problems", 0

    def _do_repaint(self) -> None:
        self._terminal.repaint()

    def _do_suspend(self) -> None:
        if not self._terminal.suspend_to_shell():
            self.message = "this terminal cannot suspend"

    def _do_quit(self) -> None:
        self._terminal.leave(0)

    def _do_save(self) -> None:
        if self._save is None:
            self.message = f"this is a file already: {self.observer.session.name}"
        else:
            self._ask("save")

    # -- what takes an answer ---------------------------------------------------------------------

    def _jump(self, text: str) -> None:
        with self.observer.lock:
            t = self.observer.scale.parse(text, self.player.position, self.player.end)
            held = t is not None and self.player.jump(t)
        if t is None:
            self.message = f"not a time: {text}"
        elif not held:
            self.message = f"{text} is not held: went to the nearest moment that is"
        self._terminal.request()

    def _mark(self, label: str) -> None:
        mark = getattr(self.observer.session, "mark", None)
        with self.observer.lock:
            if mark is None:
                self.player.mark(label, self._marked)
        if mark is not None:
            mark(label)  # it comes back as a row of the session
        self.message = f"marked {self.observer.scale.text(self._marked)}"
        self._terminal.request()

    def _to_marker(self, n: int) -> None:
        if not self.player.to_marker(n):
            self.message = f"no marker {'after' if n > 0 else 'before'} this moment"
            return
        here = [m.label for m in self.player.markers if m.t == self.player.position and m.label]
        self.message = f"marker: {here[0]}" if here else ""
