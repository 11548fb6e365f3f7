"""Screen 2: GPU memory by the stack that allocated it, and what leaks."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass, field

from dsprobe.tui import units
from dsprobe.tui.glyphs import Glyphs
from dsprobe.tui.lines import Line, fit, shorten
from dsprobe.tui.memoryrows import KINDS, ORDERS, Asked, MemoryRow, MemoryRows
from dsprobe.tui.screen import Moment
from dsprobe.tui.snapshot import Snapshot
from dsprobe.tui.treescreen import TreeBody, TreeRow, TreeScreen, after, head, said

COLUMNS = (("live", 8), ("growth", 9), ("age", 7), ("blocks", 7))
NAMED = 24  # cells that a name is to have before another number stands beside it


@dataclass
class MemoryScreen(TreeScreen):
    """``kind`` of memory is shown; growth is since marker A where ``marked``: the moment ``since``
    if one was chosen, else that of the last marker."""

    id = "memory"
    hints = ("sort", "toggle", "since", "filter", "kind", "open_all")
    orders = ORDERS
    lane = "gpu.live"

    kind: str = "device"
    marked: bool = False
    since: int | None = None
    _maker: MemoryRows = field(default_factory=MemoryRows)

    def asked(self) -> Asked:
        since = self.since if self.marked else None
        return Asked(self.kind, self.order, self.filter, self.toggled, self.all_open, self.marked,
                     since)  # fmt: skip

    def look(self, asked: Hashable, moment: Moment) -> TreeBody:
        assert isinstance(asked, Asked)
        return self._maker.look(asked, moment)

    def best(self, body: TreeBody) -> int:
        """The fastest leak."""
        rows = [row for row in body.rows if isinstance(row, MemoryRow)]
        leaks = (i for i, row in enumerate(rows) if row.leaks and row.opened is None)
        return next(leaks, 0)

    def heads(self, body: TreeBody, glyphs: Glyphs, width: int) -> Line:
        heads = "".join(
            f"{name + ('*' if name == self.order else ''):>{cells}} " for name, cells in fits(width)
        )
        more = f", {body.more} more rows" if body.more else ""
        return said(heads + body.over + more, "dim", glyphs, width)

    def row(self, row: TreeRow, selected: bool, glyphs: Glyphs, width: int) -> Line:
        assert isinstance(row, MemoryRow)
        numbers = {
            "live": units.size(row.live),
            "growth": units.change(row.grown),
            "age": units.span(row.age) if row.blocks else "-",
            "blocks": units.si(row.blocks),
        }
        left = "".join(f"{numbers[name]:>{cells}} " for name, cells in fits(width))
        spans = [head(row, selected, left, width)]
        if row.leaks:
            word = "" if row.opened else f"{row.leaks} LEAKS " if row.leaks > 1 else "LEAK "
            rate = "" if row.opened else f"{units.size(row.rate)}/s "
            spans.append((f"{glyphs.alert} {word}{rate}", "bad"))
        room = width - sum(len(text) for text, _ in spans)
        spans.append((shorten(glyphs.clean(row.text), max(room, 0)), spans[0][1]))
        return fit(spans, width)

    def below(self, body: TreeBody, row: TreeRow | None, glyphs: Glyphs, width: int) -> list[Line]:
        """The stack, the innermost frame first."""
        if not isinstance(row, MemoryRow) or not row.frames:
            return []
        title = f"stack of the selected row, innermost of {len(row.frames)} first"
        lines = [said(title, "bold", glyphs, width)]
        return lines + [said(f" {frame.text}", "plain", glyphs, width) for frame in row.frames]

    def do(self, action: str, snap: Snapshot | None, rows: int) -> str:
        if action == "kind":
            self.kind = after(self.kind, tuple(KINDS))
        elif action == "since":
            self.marked = not self.marked
        elif action == "set_since":
            if snap is not None:
                self.since, self.marked = snap.at, True
            return "growth is counted from this moment on; a: over the time in view again"
        else:
            return super().do(action, snap, rows)
        return ""


def fits(width: int) -> list[tuple[str, int]]:
    """The numbers that there is room for with a name beside them."""
    room = (1 + sum(cells + 1 for _, cells in COLUMNS[: i + 1]) for i in range(len(COLUMNS)))
    return [column for column, used in zip(COLUMNS, room, strict=True) if used + NAMED <= width]
