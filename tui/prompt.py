"""The line at the bottom one types into, and the list of actions above it."""

from __future__ import annotations

from dataclasses import dataclass

from dsprobe.tui.actions import Action, keys_of, matching
from dsprobe.tui.glyphs import Glyphs
from dsprobe.tui.lines import Line, Span, fit, shorten

MAX_TEXT = 1024
LABELS = {
    "jump": "jump to (14:03:20, -30s, +5m, 1m30s from the start, 40%): ",
    "filter": "show rows with: ",
    "palette": ": ",
    "mark": "name this moment (Enter for none): ",
    "save": "save to file (Enter for a name by date): ",
}


@dataclass
class Prompt:
    """``kind`` is a key of ``LABELS``, ``screen`` the one that is shown; ``choice`` is the line
    picked in the list of actions."""

    kind: str
    screen: str
    text: str = ""
    choice: int = 0

    def key(self, key: str, character: str | None) -> str:
        """Take one key: "open" while typing goes on, "done" or "cancel" when it is over."""
        if key == "enter":
            return "done"
        if key in ("escape", "ctrl+c", "ctrl+g"):
            return "cancel"
        if key in ("backspace", "ctrl+h"):
            if not self.text:
                return "cancel"
            self.text = self.text[:-1]
        elif key == "ctrl+u":
            self.text = ""
        elif key == "ctrl+w":
            self.text = self.text.rstrip().rpartition(" ")[0]
        elif key in ("up", "down"):
            self.choice += 1 if key == "down" else -1
        elif character and character.isprintable():
            self.insert(character)
        self.choice = min(max(self.choice, 0), max(len(self.actions()) - 1, 0))
        return "open"

    def insert(self, text: str) -> None:
        """Typed or pasted text; a line's end in it is a blank."""
        self.text = (self.text + " ".join(text.split("\n")))[:MAX_TEXT]

    def actions(self) -> list[Action]:
        """What the palette offers for the text so far."""
        return matching(self.text, self.screen) if self.kind == "palette" else []

    def picked(self) -> Action | None:
        offered = self.actions()
        return offered[min(self.choice, len(offered) - 1)] if offered else None


def prompt_lines(prompt: Prompt, glyphs: Glyphs, width: int, height: int) -> list[Line]:
    """The prompt, bottom line last, with the palette's list above it; at most ``height`` lines."""
    offered = prompt.actions()
    room = min(max(height - 2, 0), 12)
    first = min(max(prompt.choice - room + 1, 0), max(len(offered) - room, 0))
    lines: list[Line] = []
    for i, action in enumerate(offered[first : first + room], first):
        row = f" {'>' if i == prompt.choice else ' '} {keys_of(action):<20} {action.title}"
        lines.append(fit([(row, "bold" if i == prompt.choice else "plain")], width))
    if prompt.kind == "palette" and not offered:
        lines.append(fit([("   no such action", "warn")], width))
    label = shorten(LABELS[prompt.kind], max(width - 8, 0))
    room = max(width - len(label) - 1, 0)
    typed = glyphs.clean(prompt.text)
    spans: list[Span] = [(label, "bold"), (typed[-room:] if room else "", "plain"), (" ", "cursor")]
    return [*lines, fit(spans, width)][-max(height, 1) :]
