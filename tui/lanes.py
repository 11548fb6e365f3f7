"""Screen 1: every lane as a curve, and tables of who is behind them."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass, replace

import numpy as np

from dsprobe.tui import units
from dsprobe.tui.glyphs import Glyphs
from dsprobe.tui.grid import table
from dsprobe.tui.lines import Line, fit
from dsprobe.tui.plot import Columns, axis, lane_lines
from dsprobe.tui.screen import Body, Moment, Screen
from dsprobe.tui.snapshot import LaneView, Snapshot
from dsprobe.tui.tables import TABLES, Table, Tables

BESIDE = 110
"""From this width on the tables stand beside the lanes, else one stands below them."""
TALLEST = 4
OF_CUDA = ("gpu.", "cuda.")
OF_NVML = "nvml."
FIRST = frozenset({
    "net_rx.worst", "softirq.wait", "softirq.slow", "tcp.retransmits", "cpu.busy", "cpu.worst",
    "cpu.runq", "gpu.live", "gpu.allocated", "cuda.launches", "cuda.interval_p99", "cuda.gap",
    "cuda.sync", "cuda.open", "nvml.sm", "nvml.used", "nvml.throttled",
})  # fmt: skip
WAITING = " waiting for the first data ..."


@dataclass(frozen=True)
class Layout:
    """Rows and columns of each part; 0 where there is no room for it."""

    width: int
    lanes: int
    axis: int
    below: int
    beside: int

    @property
    def curves(self) -> Columns:
        return Columns.of(self.width - self.beside)

    @classmethod
    def of(cls, width: int, rows: int, table: str) -> Layout:
        """The layout of ``rows`` lines of ``width`` cells."""
        axis = int(rows >= 3)
        rest = rows - axis
        beside = min(max(width * 7 // 20, 46), 84) if table and width >= BESIDE and rest >= 8 else 0
        below = 0
        if table and not beside and rest >= 14 and width >= 30:
            below = min(max(rest // 3, 6), 16)
        return cls(width, rest - below, axis, below, beside)


def ordered(snapshot: Snapshot) -> list[LaneView]:
    """All lanes; where no process uses CUDA, one row in place of all of that, else those first
    that tell most, so that a short terminal shows something of everything.  Where NVML tells
    nothing of GPUs, one row says so."""
    silent = [lane for lane in snapshot.lanes if lane.key.startswith(OF_NVML) and not lane.working]
    instead = {id(lane): replace(lane, key="nvml", title="GPUs") for lane in silent[:1]}
    lanes = [instead.get(id(lane), lane) for lane in snapshot.lanes if lane not in silent[1:]]
    if snapshot.cuda:
        return sorted(lanes, key=lambda lane: lane.key not in FIRST)
    shown: list[LaneView] = []
    said: set[tuple[str, str]] = set()
    for lane in lanes:
        if not lane.key.startswith(OF_CUDA):
            shown.append(lane)
            continue
        state = ("none", "no process uses CUDA") if lane.working else (lane.status, lane.reason)
        if state not in said:
            said.add(state)
            nothing = np.full(len(lane.values), np.nan)
            row = replace(lane, key="cuda", title="CUDA", status=state[0], reason=state[1])
            shown.append(replace(row, values=nothing, now=np.nan, mean=np.nan, peak=np.nan))
    return shown


@dataclass(frozen=True)
class TablesBody(Body):
    """The tables that were asked for, by name."""

    tables: dict[str, Table]


@dataclass
class LanesScreen(Screen):
    """``table`` is one of ``TABLES``, or empty for none; ``top`` is the first lane in view and
    ``wanted`` the tables there is room for."""

    id = "lanes"

    table: str = TABLES[0]
    filter: str = ""
    selected: int = 0
    top: int = 0
    wanted: tuple[str, ...] = TABLES

    def lanes(self, snapshot: Snapshot) -> list[LaneView]:
        """The lanes that pass the filter: every word in the title or key."""
        words = self.filter.lower().split()
        if not words:
            return ordered(snapshot)
        return [
            lane
            for lane in snapshot.lanes
            if all(w in f"{lane.title} {lane.key} {lane.status}".lower() for w in words)
        ]

    def columns(self, width: int, rows: int) -> int:
        layout = Layout.of(width, rows, self.table)
        self.wanted = self.shown_tables(layout)
        return layout.curves.plot

    def shown_tables(self, layout: Layout) -> tuple[str, ...]:
        """The tables there is room for: the chosen one, and beside the lanes the others below."""
        if not layout.beside:
            return (self.table,) if layout.below else ()
        order = (self.table, *(name for name in TABLES if name != self.table))
        return order[: max((layout.lanes + layout.axis) // 8, 1)]

    def asked(self) -> Hashable:
        return self.wanted

    def look(self, asked: Hashable, moment: Moment) -> TablesBody:
        assert isinstance(asked, tuple)
        tables = Tables(moment.session, moment.timeline, moment.scale.precise)
        first = min(moment.begin, moment.at - 1_000_000_000)
        return TablesBody(tables.make(asked, moment.at, moment.window.width, first))

    def draw(self, snap: Snapshot, glyphs: Glyphs, width: int, rows: int) -> list[Line]:
        """Moves ``top`` so that the selected lane is seen."""
        layout = Layout.of(width, rows, self.table)
        tables = snap.body.tables if isinstance(snap.body, TablesBody) else {}
        left = [axis(snap, glyphs, layout.curves)] if layout.axis else []
        left += self._lanes(snap, glyphs, layout)
        if layout.beside:
            right = self._side(tables, glyphs, layout)
            rule = ((" " + glyphs.rule, "dim"),)
            left = [fit((*a, *rule, *b), width) for a, b in zip(left, right, strict=True)]
        if layout.below:
            left += table(tables.get(self.table), glyphs, width, layout.below)
        return left

    def _lanes(self, snap: Snapshot, glyphs: Glyphs, layout: Layout) -> list[Line]:
        """The lanes in view, as tall as there is room for."""
        shown, room, columns = self.lanes(snap), layout.lanes, layout.curves
        if not shown or not room:
            text = f" no lane matches {self.filter}" if snap.lanes else WAITING
            note = [fit([(glyphs.clean(text), "warn")], columns.width)]
            return (note + [fit([], columns.width)] * room)[:room]
        tall = min(max(room // len(shown), 1), TALLEST)
        fits = max(room // tall, 1)
        self.selected = min(max(self.selected, 0), len(shown) - 1)
        least = max(self.top, self.selected - fits + 1, 0)
        self.top = min(least, self.selected, max(len(shown) - fits, 0))
        lines: list[Line] = []
        for i in range(self.top, min(self.top + fits, len(shown))):
            lines += lane_lines(shown[i], i == self.selected, snap, glyphs, columns, tall)
        return (lines + [fit([], columns.width)] * room)[:room]

    def _side(self, tables: dict[str, Table], glyphs: Glyphs, layout: Layout) -> list[Line]:
        """The tables beside the lanes, one above the other."""
        names = self.shown_tables(layout)
        height = layout.lanes + layout.axis
        lines: list[Line] = []
        for i, name in enumerate(names):
            room = (height - len(lines)) // (len(names) - i)
            lines += table(tables.get(name), glyphs, layout.beside - 2, room)
        return lines

    def do(self, action: str, snap: Snapshot | None, rows: int) -> str:
        if action == "table":
            order = (*TABLES, "")
            self.table = order[(order.index(self.table) + 1) % len(order)]
            return ""
        page = max(rows // 2, 1)
        last = len(self.lanes(snap)) - 1 if snap else 0
        step = {"up": -1, "down": 1, "page_up": -page, "page_down": page}[action]
        self.selected = min(max(self.selected + step, 0), max(last, 0))
        return ""

    def told(self, snap: Snapshot) -> str:
        """What is wrong with the selected lane."""
        shown = self.lanes(snap)
        if self.selected >= len(shown):
            return ""
        lane = shown[self.selected]
        said = [] if lane.working else [f"{lane.title} is {lane.status}: {lane.reason or '?'}"]
        if lane.working and lane.lost:
            rows = "1 row" if lane.lost == 1 else f"{units.whole(lane.lost)} rows"
            said.append(f"{lane.title}: {rows} of its stream lost")
        if lane.status == "attached" and lane.reason:
            said.append(f"{lane.title}: {lane.reason}")
        if lane.status == "shed":
            said.append(f"{lane.title}: less detail, to save cost: {lane.reason}")
        return "; ".join(said)
