"""Everything a key can do: the one table that keys, palette, help screen and docs come from."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Action:
    """``keys`` are the characters they type, or Textual's names (``space``, ``shift+left``).

    ``screens`` are the screens that have the action; empty: all of them.  A key that one screen
    has an action of its own for means that there.
    """

    id: str
    keys: tuple[str, ...]
    title: str
    group: str
    screens: tuple[str, ...] = ()


_TREES = ("memory", "launches")

ACTIONS: tuple[Action, ...] = (
    Action("lanes", ("1",), "Lanes: everything on one clock", "Screens"),
    Action("memory", ("2",), "Memory: GPU memory by the stack that allocated it", "Screens"),
    Action("launches", ("3",), "Launches: by process, thread and stream", "Screens"),
    Action("pause", ("space",), "Pause, or go on (a live session is still collected)", "Play"),
    Action("reverse", ("r",), "Play backwards, or forwards again", "Play"),
    Action("slower", ("<", ","), "Half the speed", "Play"),
    Action("faster", (">", "."), "Twice the speed", "Play"),
    Action("back", ("left", "h", "["), "Back 5 seconds", "Move"),
    Action("forward", ("right", "l", "]"), "Forward 5 seconds", "Move"),
    Action("far_back", ("shift+left", "H", "{"), "Back a minute", "Move"),
    Action("far_forward", ("shift+right", "L", "}"), "Forward a minute", "Move"),
    Action("step", ("t",), "One column on, and pause", "Move"),
    Action("step_back", ("T",), "One column back, and pause", "Move"),
    Action("start", ("g", "home"), "To the oldest moment held", "Move"),
    Action("end", ("G", "end"), "To the newest moment; follow it when live", "Move"),
    Action("jump", ("b",), "Jump to a time", "Move"),
    Action("mark", ("m",), "Mark this moment", "Move"),
    Action("next_mark", ("n",), "To the next marker", "Move"),
    Action("previous_mark", ("N",), "To the marker before", "Move"),
    Action("zoom_in", ("+", "="), "Shorter columns", "View"),
    Action("zoom_out", ("-", "_"), "Longer columns", "View"),
    Action("fit", ("0",), "All of the session in view", "View"),
    Action("clock", ("w",), "Wall-clock time, or time since the start", "View"),
    Action("up", ("up", "k"), "Row above", "Rows"),
    Action("down", ("down", "j"), "Row below", "Rows"),
    Action("page_up", ("pageup",), "A page of rows up", "Rows"),
    Action("page_down", ("pagedown",), "A page of rows down", "Rows"),
    Action("filter", ("/",), "Show only rows that contain ...", "Rows"),
    Action(
        "table", ("tab",), "Next table: CPUs, flows, vectors, slowest, none", "Rows", ("lanes",)
    ),
    Action("sort", ("o", "tab"), "Next order of rows", "Rows", _TREES),
    Action("toggle", ("enter",), "Open or close the row", "Rows", _TREES),
    Action("open", ("right",), "Open the row", "Rows", _TREES),
    Action("close", ("left",), "Close the row, or go to the one above it", "Rows", _TREES),
    Action("open_all", ("*", "e"), "Open all rows, or close them", "Rows", _TREES),
    Action("kind", ("d",), "Memory of device or host, or address space", "Rows", ("memory",)),
    Action(
        "since", ("a",), "What grew since marker A, or over the time in view", "Rows", ("memory",)
    ),
    Action("set_since", ("A",), "Make this moment marker A", "Rows", ("memory",)),
    Action("problems", ("p",), "Losses, damage, and what is missing and why", "Session"),
    Action("save", ("s",), "Save what is held to a file", "Session"),
    Action("palette", (":", "ctrl+p"), "Find an action by name", "Session"),
    Action("help", ("?", "f1"), "This help", "Session"),
    Action("repaint", ("ctrl+l",), "Draw the whole screen again", "Session"),
    Action("suspend", ("ctrl+z",), "Suspend to the shell", "Session"),
    Action("quit", ("q", "ctrl+c", "ctrl+q"), "Quit", "Session"),
)


def on_screen(screen: str) -> list[Action]:
    """The actions that ``screen`` has, those of its own among them, in table order."""
    return [a for a in ACTIONS if not a.screens or screen in a.screens]


def by_key(screen: str) -> dict[str, Action]:
    """What each key means on ``screen``."""
    here = sorted(on_screen(screen), key=lambda a: bool(a.screens))
    return {key: action for action in here for key in action.keys}


def where(action: Action) -> str:
    """`` (2, 3)`` for an action of some screens alone: the keys that choose those."""
    chosen = [a.keys[0] for a in ACTIONS if a.id in action.screens]
    return f" ({', '.join(chosen)})" if chosen else ""


_SHOWN = {
    "space": "Space", "left": "Left", "right": "Right", "up": "Up", "down": "Down", "tab": "Tab",
    "shift+left": "Shift-Left", "shift+right": "Shift-Right", "home": "Home", "end": "End",
    "pageup": "PgUp", "pagedown": "PgDn", "f1": "F1", "enter": "Enter",
}  # fmt: skip


def key_name(key: str) -> str:
    """What a person calls a key: ``Ctrl-L`` for ``ctrl+l``."""
    if key.startswith("ctrl+"):
        return f"Ctrl-{key[5:].upper()}"
    return _SHOWN.get(key, key)


def keys_of(action: Action) -> str:
    """The action's keys as a person reads them."""
    return " ".join(key_name(key) for key in action.keys)


def matching(text: str, screen: str) -> list[Action]:
    """Actions of ``screen`` with every word of ``text`` in their title, id or group, in table
    order."""
    words = text.lower().split()
    return [
        a
        for a in on_screen(screen)
        if all(w in f"{a.title} {a.id} {a.group}".lower() for w in words)
    ]


def as_markdown() -> str:
    """The table of keys for the documentation."""
    lines = []
    for group in dict.fromkeys(a.group for a in ACTIONS):
        lines += [f"| {group} | |", "| --- | --- |"]
        lines += [
            f"| {' '.join(f'`{key_name(k)}`' for k in a.keys)} | {a.title}{where(a)} |"
            for a in ACTIONS
            if a.group == group
        ]
        lines.append("")
    return "\n".join(lines)
