"""Screen 3: launches by process, thread and CUDA stream: how often, how regularly, what was waited
for."""

from __future__ import annotations

import math
from collections.abc import Hashable
from dataclasses import dataclass

import numpy as np

from dsprobe.tui import launchrows, units
from dsprobe.tui.glyphs import Glyphs
from dsprobe.tui.launchrows import ORDERS, Asked, LaunchRow
from dsprobe.tui.lines import Line, fit, shorten
from dsprobe.tui.screen import Moment
from dsprobe.tui.treescreen import TreeBody, TreeRow, TreeScreen, head, said

COLUMNS = (("rate", 7), ("P99", 8), ("longest", 8), ("P50", 8), ("shed", 5), ("hist", 12))
"""In the order in which they are left out for want of room, the last first."""
SHOWN = ("rate", "P50", "P99", "longest", "shed", "hist")
NAMED = 20  # cells that a name is to have before another number stands beside it
FIRST, PER = 8, 2
"""The histogram is drawn from slot 8 (256 ns) on, two slots a cell."""


@dataclass
class LaunchesScreen(TreeScreen):
    """Rows are processes, and in them threads and streams."""

    id = "launches"
    hints = ("sort", "toggle", "filter", "open_all")
    orders = ORDERS
    lane = "cuda.launches"

    def asked(self) -> Asked:
        return Asked(self.order, self.filter, self.toggled, self.all_open)

    def look(self, asked: Hashable, moment: Moment) -> TreeBody:
        assert isinstance(asked, Asked)
        return launchrows.look(asked, moment)

    def heads(self, body: TreeBody, glyphs: Glyphs, width: int) -> Line:
        heads = ""
        for name, cells in fits(width):
            title = "256ns 1ms 1s" if name == "hist" else name + "*"[: name == self.order]
            heads += f"{title:>{cells}} "
        more = f", {body.more} more rows" if body.more else ""
        return said(heads + body.over + more, "dim", glyphs, width)

    def row(self, row: TreeRow, selected: bool, glyphs: Glyphs, width: int) -> Line:
        assert isinstance(row, LaunchRow)
        numbers = {
            "rate": units.si(row.rate),
            "P50": units.bound(row.p50),
            "P99": units.bound(row.p99),
            "longest": units.nanoseconds(row.longest) if row.longest else "-",
            "shed": f"{100 * row.shed:.0f}%" if math.isfinite(row.shed) else "-",
            "hist": histogram(row.hist, glyphs),
        }
        left = "".join(f"{glyphs.clean(numbers[name]):>{cells}} " for name, cells in fits(width))
        begin, role = head(row, selected, left, width)
        return fit([(begin, role), (shorten(glyphs.clean(row.text), width), role)], width)

    def below(self, body: TreeBody, row: TreeRow | None, glyphs: Glyphs, width: int) -> list[Line]:
        """The longest gaps of the selected row, and where it spent its time."""
        if not isinstance(row, LaunchRow) or not row.said:
            return []
        lines = [
            said(
                "the selected row: calls, and the longest gaps between launches",
                "bold",
                glyphs,
                width,
            )
        ]
        return lines + [said(f" {text}", "plain", glyphs, width) for text in row.said]


def histogram(hist: tuple[int, ...], glyphs: Glyphs) -> str:
    """A cell for each power of four, as high as the logarithm of how many there were: one in a
    million is seen as well."""
    counts = np.zeros(FIRST + 12 * PER)
    counts[: len(hist)] = hist[: len(counts)]
    if len(hist) > len(counts):
        counts[-1] += sum(hist[len(counts) :])
    cells = counts[FIRST:].reshape(12, PER).sum(axis=1)
    cells[0] += counts[:FIRST].sum()
    heights = np.log2(cells + 1)
    blank = np.where(cells > 0, heights, np.nan)
    return glyphs.bars(blank, float(heights.max()))[0]


def fits(width: int) -> list[tuple[str, int]]:
    """The columns that there is room for with a name beside them, as they are shown."""
    room = (1 + sum(cells + 1 for _, cells in COLUMNS[: i + 1]) for i in range(len(COLUMNS)))
    found = [column for column, used in zip(COLUMNS, room, strict=True) if used + NAMED <= width]
    return sorted(found, key=lambda column: SHOWN.index(column[0]))
