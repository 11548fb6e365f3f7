"""A whole screen as lines of text: the header, the chosen screen, the line at the bottom; pure, of
a snapshot and the state of the keys, at any size."""

from __future__ import annotations

from dsprobe.tui import units
from dsprobe.tui.actions import key_name, on_screen
from dsprobe.tui.glyphs import Glyphs
from dsprobe.tui.lines import Line, Span, fit, shorten
from dsprobe.tui.screen import Screen
from dsprobe.tui.snapshot import Snapshot


def body_rows(height: int) -> int:
    """Lines of a terminal that are the chosen screen's: all but the header and the bottom line."""
    return max(height - 1 - int(height >= 4), 0)


def columns(screen: Screen, width: int, height: int) -> int:
    """How many buckets of time ``screen`` shows in a terminal of that size."""
    return screen.columns(width, body_rows(height))


def draw(
    snap: Snapshot, screen: Screen, glyphs: Glyphs, width: int, height: int, message: str = ""
) -> list[Line]:
    """``height`` lines of ``width`` cells; ``message`` is said at the bottom."""
    lines = [header(snap, glyphs, width)]
    lines += screen.draw(snap, glyphs, width, body_rows(height))
    if height >= 4:
        lines.append(bottom(snap, screen, glyphs, width, message))
    return lines[:height]


def header(snap: Snapshot, glyphs: Glyphs, width: int) -> Line:
    """Host, time, mode, own cost, losses, problems; the least important is dropped first."""
    lost = f"LOST {units.si(sum(snap.lost.values()))}" if snap.lost else "lost 0"
    first_problem = f"! {snap.problems[0]}" if snap.problems else ""
    more = f" (+{len(snap.problems) - 1})" if len(snap.problems) > 1 else ""
    # (text, role, how early it is dropped)
    parts = [
        (snap.host, "bar", 3),
        (snap.date, "bar", 8),
        (snap.time, "bar", 2),
        (f"{snap.mode} {snap.detail}".strip(), "mode", 0),
        (f"dsprobe {snap.overhead}", "bar", 7),
        (snap.shed, "warn", 2),
        (lost, "bad" if snap.lost else "bar", 1 if snap.lost else 5),
        (f"{units.span(snap.window.width)}/col", "bar", 6),
        (first_problem + more, "bad", 4),
    ]
    parts = [(glyphs.clean(text), role, drop) for text, role, drop in parts if text]
    while sum(len(text) + 2 for text, _, _ in parts) - 1 > width and len(parts) > 1:
        worst = max(parts, key=lambda part: part[2])
        room = width - sum(len(t) + 2 for t, _, _ in parts if t is not worst[0]) + 1 - 2
        if worst[1] == "bad" and room >= 12:
            parts = [(shorten(t, room) if t is worst[0] else t, r, d) for t, r, d in parts]
            break
        parts.remove(worst)
    spans: list[Span] = []
    for text, role, _ in parts:
        spans += [("  " if spans else " ", "bar"), (text, role)]
    return fit(
        [*spans, (" " * width, "bar")] if width > 1 else [("!"[: len(snap.problems)], "bar")], width
    )


_HINTS = ("quit", "help", "pause", "back", "step", "zoom_in", "jump", "table", "problems", "save")
_OWN = ("quit", "help")  # before the screen's own
_HINT_WORDS = {"back": "seek", "zoom_in": "zoom", "toggle": "open", "since": "since A",
               "open_all": "open all"}  # fmt: skip
_HINT_KEYS = {"back": "[ ]", "step": "t T", "zoom_in": "+ -"}


def bottom(snap: Snapshot, screen: Screen, glyphs: Glyphs, width: int, message: str) -> Line:
    """A message, or what there is to say of the selected row, or the most used keys."""
    if message:
        return fit([(" " + glyphs.clean(message), "bold")], width)
    told = screen.told(snap)
    if told:
        return fit([(" " + glyphs.clean(told), "warn")], width)
    here = {a.id: a for a in on_screen(screen.id)}
    hints = [
        f"{_HINT_KEYS.get(i, key_name(here[i].keys[0]))} {_HINT_WORDS.get(i, i)}"
        for i in (*_OWN, *screen.hints, *_HINTS[len(_OWN) :])
        if i in here
    ]
    line = " " + (glyphs.clean(f"filter: {screen.filter}  ") if screen.filter else "")
    for hint in hints:
        if len(line) + len(hint) < width:
            line += hint + "  "
    return fit([(line, "dim")], width)
