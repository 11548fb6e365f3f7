"""The main screen as lines of text: pure, of a snapshot and the state of the keys, at any size."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from dsprobe.tui import units
from dsprobe.tui.actions import ACTIONS, key_name
from dsprobe.tui.glyphs import Glyphs
from dsprobe.tui.lines import Line, Span, fit, shorten
from dsprobe.tui.snapshot import LaneView, Snapshot
from dsprobe.tui.tables import TABLES, Table

BESIDE = 110
"""From this width on the tables stand beside the lanes, else one stands below them."""
VALUE = 9
TALLEST = 4
READABLE = 14  # cells of a table's column, an address with its port, that are of use


@dataclass
class Ui:
    """What the keys have chosen, apart from the moment: ``table`` is one of ``TABLES``, or empty
    for none; ``top`` is the first lane in view."""

    table: str = TABLES[0]
    filter: str = ""
    selected: int = 0
    top: int = 0
    message: str = ""

    def lanes(self, snapshot: Snapshot) -> list[LaneView]:
        """The lanes that pass the filter: every word in the title or key."""
        words = self.filter.lower().split()
        return [
            lane
            for lane in snapshot.lanes
            if all(w in f"{lane.title} {lane.key} {lane.status}".lower() for w in words)
        ]

    def next_table(self) -> str:
        order = (*TABLES, "")
        self.table = order[(order.index(self.table) + 1) % len(order)]
        return self.table


@dataclass(frozen=True)
class Layout:
    """Rows and columns of each part; 0 where there is no room for it."""

    width: int
    height: int
    lanes: int
    axis: int
    status: int
    below: int
    beside: int
    title: int
    value: int
    extra: int

    @property
    def left(self) -> int:
        """Width of the lanes with their titles."""
        return self.width - self.beside

    @property
    def plot(self) -> int:
        """Columns of the curves, at least one."""
        used = self.title + self.value + self.extra
        return max(self.left - used, 1)

    @classmethod
    def plain(cls, width: int) -> Layout:
        """Lanes with all their numbers, for text that is as long as it likes."""
        return cls(width, 0, 0, 0, 0, 0, 0, 21, VALUE + 1, 2 * VALUE)

    @classmethod
    def of(cls, width: int, height: int, table: str) -> Layout:
        """The layout of a terminal of ``width`` by ``height`` cells."""
        status = int(height >= 4)
        axis = int(height >= 5)
        rest = max(height - 1 - status - axis, 0)
        beside = min(max(width * 7 // 20, 46), 84) if table and width >= BESIDE and rest >= 8 else 0
        below = 0
        if table and not beside and rest >= 14 and width >= 30:
            below = min(max(rest // 3, 6), 16)
        left = width - beside
        title = 21 if left >= 60 else 15 if left >= 40 else 9 if left >= 20 else 0
        value = VALUE + 1 if left >= 34 else 0
        extra = 2 * VALUE if left >= 90 else 0
        return cls(width, height, rest - below, axis, status, below, beside, title, value, extra)


def draw(snap: Snapshot, ui: Ui, glyphs: Glyphs, width: int, height: int) -> list[Line]:
    """``height`` lines of ``width`` cells.  Moves ``ui.top`` so that the selected lane is seen."""
    layout = Layout.of(width, height, ui.table)
    lines = [header(snap, glyphs, width)]
    left = [axis(snap, glyphs, layout)] if layout.axis else []
    left += lanes(snap, ui, glyphs, layout)
    if layout.beside:
        right = side(snap, ui, glyphs, layout)
        rule = ((" " + glyphs.rule, "dim"),)
        left = [fit((*a, *rule, *b), width) for a, b in zip(left, right, strict=True)]
    lines += left
    if layout.below:
        lines += table(snap.tables.get(ui.table), glyphs, width, layout.below)
    if layout.status:
        lines.append(status(snap, ui, glyphs, width))
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


def axis(snap: Snapshot, glyphs: Glyphs, layout: Layout) -> Line:
    """Column names, then the time axis with the cursor and the markers on it."""
    names = f"{' lane':<{layout.title}}"[: layout.title]
    if layout.value:
        names += f"{'now':>{VALUE - 1}}  "
    if layout.extra:
        names += f"{'mean':>{VALUE - 1}} {'max':>{VALUE - 1}} "
    cells = [" "] * layout.plot
    free = 0
    marked = [column for column, _ in snap.markers if column < layout.plot]
    for column, text in snap.ticks:
        end = column + len(text) + 1
        if column < free or end > layout.plot:
            continue
        if any(column < at < end for at in marked):  # a marker in a time would make another time
            text, end = "", column + 1
        cells[column:end] = glyphs.rule + text
        free = end + 1
    for column in marked:
        cells[column] = glyphs.marker
    spans = [(names, "dim"), ("".join(cells), "dim")]
    if snap.show_cursor and snap.cursor < layout.plot:
        at = snap.cursor
        spans[1:] = [("".join(cells[:at]), "dim"), (cells[at], "cursor"),
                     ("".join(cells[at + 1 :]), "dim")]  # fmt: skip
    return fit(spans, layout.left)


def lanes(snap: Snapshot, ui: Ui, glyphs: Glyphs, layout: Layout) -> list[Line]:
    """The lanes in view, as tall as there is room for."""
    shown = ui.lanes(snap)
    room = layout.lanes
    if not shown or not room:
        text = f" no lane matches {ui.filter}" if snap.lanes else " waiting for the first data ..."
        note = [fit([(glyphs.clean(text), "warn")], layout.left)]
        return (note + [fit([], layout.left)] * room)[:room]
    tall = min(max(room // len(shown), 1), TALLEST)
    fits = max(room // tall, 1)
    ui.selected = min(max(ui.selected, 0), len(shown) - 1)
    ui.top = min(max(ui.top, ui.selected - fits + 1, 0), ui.selected, max(len(shown) - fits, 0))
    lines: list[Line] = []
    for i in range(ui.top, min(ui.top + fits, len(shown))):
        lines += lane_lines(shown[i], i == ui.selected, snap, glyphs, layout, tall)
    return (lines + [fit([], layout.left)] * room)[:room]


def lane_lines(
    lane: LaneView, selected: bool, snap: Snapshot, glyphs: Glyphs, layout: Layout, tall: int
) -> list[Line]:
    """One lane: title, value under the cursor, curve; or why there is none."""
    role = lane_role(lane.key)
    title = shorten(glyphs.clean(lane.title), max(layout.title - 2, 0))
    mark = ">" if selected else " "
    spans: list[Span] = [
        (
            f"{mark}{title:<{max(layout.title - 1, 0)}}"[: layout.title],
            "bold" if selected else "plain",
        )
    ]
    if layout.value:
        text = units.quantity(lane.now, lane.unit) if lane.working else lane.status
        text = glyphs.clean(text)
        look = "plain" if lane.working else "bad" if lane.status == "stalled" else "warn"
        flag = "!" if "lossy" in lane.flags else "~" if lane.flags else " "
        spans += [
            (f"{text[: VALUE - 1]:>{VALUE - 1}}", look),
            (flag + " ", "bad" if flag != " " else "plain"),
        ]
    if layout.extra:
        mean = units.quantity(lane.mean, lane.unit) if lane.fold != "max" else ""
        numbers = (glyphs.clean(n) for n in (mean, units.quantity(lane.peak, lane.unit)))
        spans += [("".join(f"{n:>{VALUE - 1}} " for n in numbers), "dim")]
    rows = curve(lane, snap, glyphs, layout, role, tall)
    blank: list[Span] = [(" " * (layout.title + layout.value + layout.extra), "plain")]
    return [
        fit([*(spans if i == tall - 1 else blank), *row], layout.left) for i, row in enumerate(rows)
    ]


def curve(
    lane: LaneView, snap: Snapshot, glyphs: Glyphs, layout: Layout, role: str, tall: int
) -> list[list[Span]]:
    """The bars, with the reason written where there is nothing to draw to the right of them."""
    width = layout.plot
    values = np.full(width, np.nan)
    values[: min(width, len(lane.values))] = lane.values[:width]
    known = np.flatnonzero(np.isfinite(values))
    bars = glyphs.bars(values, lane.scale, tall)
    why = "" if lane.working else f"{lane.status}: {lane.reason}" if lane.reason else lane.status
    if lane.status == "shed":
        why = f"sampled: {lane.reason}"
    if not why and not len(known):
        why = "no data here"
    begin = int(known[-1]) + 2 if len(known) else 0
    note = shorten(glyphs.clean(why), width - begin) if width - begin >= 8 else ""
    out: list[list[Span]] = []
    for i, bar in enumerate(bars):
        spans: list[Span] = [(bar, role)]
        if note and i == tall - 1:
            spans = [(bar[:begin], role), (f"{note:<{width - begin}}", "dim")]
        if snap.show_cursor and snap.cursor < width:
            spans = with_cursor(spans, snap.cursor)
        out.append(spans)
    return out


def with_cursor(spans: Sequence[Span], column: int) -> list[Span]:
    """``spans`` with the one cell at ``column`` in the role "cursor"."""
    out: list[Span] = []
    at = 0
    for text, role in spans:
        here = column - at
        if 0 <= here < len(text):
            out += [(text[:here], role), (text[here], "cursor"), (text[here + 1 :], role)]
        else:
            out.append((text, role))
        at += len(text)
    return out


def lane_role(key: str) -> str:
    """Softirq and packet lanes, TCP lanes and CPU lanes each have a colour."""
    family = key.partition(".")[0]
    return {"tcp": "tcp", "cpu": "cpu"}.get(family, "net")


def shown_tables(ui: Ui, layout: Layout) -> tuple[str, ...]:
    """The tables there is room for: the chosen one, and beside the lanes the others below it."""
    if not layout.beside:
        return (ui.table,) if layout.below else ()
    order = (ui.table, *(name for name in TABLES if name != ui.table))
    return order[: max((layout.lanes + layout.axis) // 8, 1)]


def side(snap: Snapshot, ui: Ui, glyphs: Glyphs, layout: Layout) -> list[Line]:
    """The tables beside the lanes, one above the other."""
    names = shown_tables(ui, layout)
    height = layout.lanes + layout.axis
    lines: list[Line] = []
    for i, name in enumerate(names):
        room = (height - len(lines)) // (len(names) - i)
        lines += table(snap.tables.get(name), glyphs, layout.beside - 2, room)
    return lines


def table(shown: Table | None, glyphs: Glyphs, width: int, height: int) -> list[Line]:
    """Title, column names and as many rows as there is room for."""
    if shown is None:
        return [fit([], width)] * height
    title = " " + glyphs.clean(shown.title)
    lines: list[Line] = []
    if not shown.rows:
        lines.append(fit([(f" {shorten(glyphs.clean(shown.empty), width - 1)}", "dim")], width))
    else:
        body = [[glyphs.clean(cell) for cell in row] for row in shown.rows[: max(height - 2, 0)]]
        grid = [list(shown.columns), *body]
        chosen, widths = choose_columns(shown, grid, width)
        if len(chosen) < len(shown.choices[0] if shown.choices else shown.columns):
            title = shorten(title, width - 2) + " ~"
        for n, row in enumerate(grid):
            cells = [
                f"{shorten(row[i], w):>{w}}" if shown.right[i] else f"{shorten(row[i], w):<{w}}"
                for i, w in zip(chosen, widths, strict=True)
                if w > 0
            ]
            lines.append(fit([(" " + " ".join(cells), "plain" if n else "dim")], width))
    lines.insert(0, fit([(title, "bold")], width))
    return (lines + [fit([], width)] * height)[:height]


def choose_columns(
    shown: Table, grid: list[list[str]], width: int
) -> tuple[tuple[int, ...], list[int]]:
    """The columns that are readable within ``width``, and how wide each is to be."""
    wide = [max(len(cell) for cell in column) for column in zip(*grid, strict=True)]
    every = tuple(range(len(wide)))
    choices = shown.choices or tuple(every[:n] for n in range(len(wide), 1, -1))
    fitting = (c for c in choices if sum(min(wide[i], READABLE) + 1 for i in c) <= width)
    chosen = next(fitting, choices[-1])
    return chosen, squeeze([wide[i] for i in chosen], width - len(chosen))


def squeeze(widths: list[int], room: int) -> list[int]:
    """``widths`` made to add up to at most ``room``, the widest giving way first."""
    widths = list(widths)
    for _ in range(max(sum(widths) - room, 0)):
        widest = widths.index(max(widths))
        widths[widest] = max(widths[widest] - 1, 0)
    return widths


_HINTS = ("quit", "help", "pause", "back", "step", "zoom_in", "jump", "table", "problems", "save")
_HINT_WORDS = {"back": "seek", "zoom_in": "zoom", "step": "step"}
_HINT_KEYS = {"back": "[ ]", "step": "t T", "zoom_in": "+ -"}


def status(snap: Snapshot, ui: Ui, glyphs: Glyphs, width: int) -> Line:
    """A message, or what is wrong with the selected lane, or the most used keys."""
    shown = ui.lanes(snap)
    if ui.message:
        return fit([(" " + glyphs.clean(ui.message), "bold")], width)
    if ui.selected < len(shown):
        lane = shown[ui.selected]
        said = [] if lane.working else [f"{lane.title} is {lane.status}: {lane.reason or '?'}"]
        if lane.working and lane.lost:
            said.append(f"{lane.title}: {units.si(lane.lost)} rows of its stream were lost")
        if lane.status == "attached" and lane.reason:
            said.append(f"{lane.title}: {lane.reason}")
        if lane.status == "shed":
            said.append(f"{lane.title}: less detail, to save cost: {lane.reason}")
        if said:
            return fit([(" " + glyphs.clean("; ".join(said)), "warn")], width)
    by_id = {a.id: a for a in ACTIONS}
    hints = [
        f"{_HINT_KEYS.get(i, key_name(by_id[i].keys[0]))} {_HINT_WORDS.get(i, i)}" for i in _HINTS
    ]
    line = " " + (glyphs.clean(f"filter: {ui.filter}  ") if ui.filter else "")
    for hint in hints:
        if len(line) + len(hint) < width:
            line += hint + "  "
    return fit([(line, "dim")], width)
