"""Curves on the time axis that they share: pure, of a snapshot, in any width."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from dsprobe.tui import units
from dsprobe.tui.glyphs import Glyphs
from dsprobe.tui.lines import Line, Span, fit, shorten
from dsprobe.tui.snapshot import LaneView, Snapshot

VALUE = 9


@dataclass(frozen=True)
class Columns:
    """Cells of a curve's row of ``width`` cells: its title, its value, its mean and highest; 0
    where there is no room."""

    width: int
    title: int
    value: int
    extra: int

    @property
    def plot(self) -> int:
        """Columns of the curve, at least one."""
        return max(self.width - self.title - self.value - self.extra, 1)

    @classmethod
    def plain(cls, width: int) -> Columns:
        """All the numbers, for text that is as long as it likes."""
        return cls(width, 21, VALUE + 1, 2 * VALUE)

    @classmethod
    def of(cls, width: int) -> Columns:
        """What there is room for in ``width`` cells."""
        title = 21 if width >= 60 else 15 if width >= 40 else 9 if width >= 20 else 0
        value = VALUE + 1 if width >= 34 else 0
        return cls(width, title, value, 2 * VALUE if width >= 90 else 0)


def axis(snap: Snapshot, glyphs: Glyphs, columns: Columns) -> Line:
    """Column names, then the time axis with the cursor and the markers on it."""
    names = f"{' lane':<{columns.title}}"[: columns.title]
    if columns.value:
        names += f"{'now':>{VALUE - 1}}  "
    if columns.extra:
        names += f"{'mean':>{VALUE - 1}} {'max':>{VALUE - 1}} "
    cells = [" "] * columns.plot
    free = 0
    marked = [column for column, _ in snap.markers if column < columns.plot]
    for column, text in snap.ticks:
        end = column + len(text) + 1
        if column < free or end > columns.plot:
            continue
        if any(column < at < end for at in marked):  # a marker in a time would make another time
            text, end = "", column + 1
        cells[column:end] = glyphs.rule + text
        free = end + 1
    for column in marked:
        cells[column] = glyphs.marker
    spans = [(names, "dim"), ("".join(cells), "dim")]
    if snap.show_cursor and snap.cursor < columns.plot:
        at = snap.cursor
        spans[1:] = [("".join(cells[:at]), "dim"), (cells[at], "cursor"),
                     ("".join(cells[at + 1 :]), "dim")]  # fmt: skip
    return fit(spans, columns.width)


def strip(snap: Snapshot, key: str, glyphs: Glyphs, columns: Columns) -> list[Line]:
    """The time axis and one lane under it, for a screen that shows something else."""
    lines = [axis(snap, glyphs, columns)]
    for lane in snap.lanes:
        if lane.key == key:
            lines += lane_lines(lane, False, snap, glyphs, columns, 1)
    return [*lines, fit([], columns.width)][:2]


def lane_lines(
    lane: LaneView, selected: bool, snap: Snapshot, glyphs: Glyphs, columns: Columns, tall: int
) -> list[Line]:
    """One lane: title, value under the cursor, curve; or why there is none."""
    role = lane_role(lane.key)
    title = shorten(glyphs.clean(lane.title), max(columns.title - 2, 0))
    mark = ">" if selected else " "
    spans: list[Span] = [
        (
            f"{mark}{title:<{max(columns.title - 1, 0)}}"[: columns.title],
            "bold" if selected else "plain",
        )
    ]
    if columns.value:
        text = units.quantity(lane.now, lane.unit) if lane.working else lane.status
        text = glyphs.clean(text)
        look = {"stalled": "bad", "none": "dim"}.get(lane.status, "warn")
        look = "plain" if lane.working else look
        flag = "!" if "lossy" in lane.flags else "~" if lane.flags else " "
        spans += [
            (f"{text[: VALUE - 1]:>{VALUE - 1}}", look),
            (flag + " ", "bad" if flag != " " else "plain"),
        ]
    if columns.extra:
        mean = units.quantity(lane.mean, lane.unit) if lane.fold != "max" else ""
        numbers = (glyphs.clean(n) for n in (mean, units.quantity(lane.peak, lane.unit)))
        spans += [("".join(f"{n:>{VALUE - 1}} " for n in numbers), "dim")]
    rows = curve(lane, snap, glyphs, columns, role, tall)
    blank: list[Span] = [(" " * (columns.title + columns.value + columns.extra), "plain")]
    return [
        fit([*(spans if i == tall - 1 else blank), *row], columns.width)
        for i, row in enumerate(rows)
    ]


def curve(
    lane: LaneView, snap: Snapshot, glyphs: Glyphs, columns: Columns, role: str, tall: int
) -> list[list[Span]]:
    """The bars, with the reason written where there is nothing to draw to the right of them."""
    width = columns.plot
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
    """Softirq and packet lanes, TCP, CPU and CUDA lanes each have a colour."""
    family = key.partition(".")[0]
    return {"tcp": "tcp", "cpu": "cpu", "gpu": "gpu", "cuda": "gpu"}.get(family, "net")
