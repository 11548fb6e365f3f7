"""What screens of rows that open have in common: the time axis above, sums, notes, the rows, and
something about the selected row below."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Hashable
from dataclasses import dataclass, field
from typing import ClassVar

from dsprobe.tui.glyphs import Glyphs
from dsprobe.tui.lines import Line, fit, shorten
from dsprobe.tui.plot import Columns, strip
from dsprobe.tui.screen import Body, Moment, Screen
from dsprobe.tui.selection import Selection
from dsprobe.tui.snapshot import Snapshot

WIDE = 100
"""From this width on a row stands two cells further in than the one it is under, else one."""


@dataclass(frozen=True)
class TreeRow:
    """``key`` names the row from one refresh to the next; ``opened`` is None where there is nothing
    to open."""

    key: Hashable
    depth: int
    opened: bool | None
    text: str


@dataclass(frozen=True)
class TreeBody(Body):
    """``total`` sums up everything; ``over`` says of what and of which time the rows are; ``notes``
    say what has to be known besides, worst first; ``more`` rows were left out; ``empty`` says why
    there are none."""

    total: str
    over: str
    rows: tuple[TreeRow, ...]
    notes: tuple[str, ...]
    more: int
    empty: str
    pending: bool = False


@dataclass(frozen=True)
class Parts:
    """Lines of each part of the screen, from the top down; 0 where there is no room for it."""

    strip: int
    total: int
    notes: int
    heads: int
    rows: int
    below: int

    @classmethod
    def of(cls, rows: int, notes: int, below: int) -> Parts:
        """The parts of ``rows`` lines, with so many notes and lines below to show."""
        strip = 2 if rows >= 10 else 0
        total, heads = int(rows >= 5), int(rows >= 3)
        said = min(notes, 1 if rows < 16 else 2 if rows < 30 else 6) if rows >= 8 else 0
        under = min(below, rows // 3) if rows >= 14 else 0
        return cls(strip, total, said, heads, rows - strip - total - said - heads - under, under)


@dataclass
class TreeScreen(Screen):
    """``order`` is one of ``orders``; ``toggled`` are the rows that were opened or closed by hand;
    ``lane`` is the one under the time axis."""

    orders: ClassVar[tuple[str, ...]]
    lane: ClassVar[str]

    order: str = ""
    filter: str = ""
    toggled: frozenset[Hashable] = frozenset()
    all_open: bool = False
    selection: Selection = field(default_factory=Selection)

    def __post_init__(self) -> None:
        self.order = self.order or self.orders[0]

    def columns(self, width: int, rows: int) -> int:
        return Columns.of(width).plot

    @abstractmethod
    def heads(self, body: TreeBody, glyphs: Glyphs, width: int) -> Line:
        """What the columns are, and what is said of all rows."""

    @abstractmethod
    def row(self, row: TreeRow, selected: bool, glyphs: Glyphs, width: int) -> Line:
        """One row."""

    @abstractmethod
    def below(self, body: TreeBody, row: TreeRow | None, glyphs: Glyphs, width: int) -> list[Line]:
        """What there is to say of the selected row, as far as there is room."""

    def best(self, body: TreeBody) -> int:
        """The row to begin with."""
        del body
        return 0

    def draw(self, snap: Snapshot, glyphs: Glyphs, width: int, rows: int) -> list[Line]:
        body = self._body(snap)
        if body is None:
            return [fit([], width)] * rows
        keys = [row.key for row in body.rows]
        at = self.selection.settle(keys, self.best(body))
        below = self.below(body, body.rows[at] if keys else None, glyphs, width)
        parts = Parts.of(rows, len(body.notes), len(below))
        lines = strip(snap, self.lane, glyphs, Columns.of(width)) if parts.strip else []
        if parts.total:
            lines.append(said(body.total, "bold", glyphs, width))
        notes = list(body.notes[: parts.notes])
        if notes and len(body.notes) > len(notes):
            notes[-1] = f"(+{len(body.notes) - len(notes)} more) {notes[-1]}"
        lines += [said(f"! {note}", "warn", glyphs, width) for note in notes]
        if parts.heads:
            lines.append(self.heads(body, glyphs, width))
        shown = [
            self.row(body.rows[i], i == at, glyphs, width)
            for i in self.selection.view(len(keys), parts.rows)
        ]
        if not keys:
            shown = [said(body.empty, "dim", glyphs, width)]
        lines += (shown + [fit([], width)] * parts.rows)[: parts.rows]
        return (lines + below[: parts.below])[:rows]

    def _body(self, snap: Snapshot | None) -> TreeBody | None:
        body = snap.body if snap is not None and snap.screen == self.id else None
        return body if isinstance(body, TreeBody) else None

    def do(self, action: str, snap: Snapshot | None, rows: int) -> str:
        body = self._body(snap)
        shown = body.rows if body is not None else ()
        page = max(rows // 2, 1)
        steps = {"up": -1, "down": 1, "page_up": -page, "page_down": page}
        if action in steps:
            keys = [row.key for row in shown]
            self.selection.choose(keys, self.selection.at + steps[action])
        elif action == "sort":
            self.order = after(self.order, self.orders)
        elif action == "open_all":
            self.all_open, self.toggled = not self.all_open, frozenset()
        elif shown:
            self._open_or_close(action, shown)
        return ""

    def _open_or_close(self, action: str, shown: tuple[TreeRow, ...]) -> None:
        keys = [row.key for row in shown]
        self.selection.choose(keys, self.selection.at)
        at = self.selection.at
        row = shown[at]
        if row.opened is not None and (action == "toggle" or row.opened is (action == "close")):
            self.toggled ^= {row.key}
        elif action == "close":
            above = [i for i, r in enumerate(shown[:at]) if r.depth < row.depth]
            self.selection.choose(keys, above[-1] if above else at)


def said(text: str, role: str, glyphs: Glyphs, width: int) -> Line:
    """A sentence on a line of its own."""
    return fit([(shorten(" " + glyphs.clean(text), width), role)], width)


def head(row: TreeRow, selected: bool, numbers: str, width: int) -> tuple[str, str]:
    """How a row begins: whether it is selected, its numbers, its depth, whether it is open."""
    indent = " " * min((1 if width < WIDE else 2) * row.depth, width // 4)
    mark = " " if row.opened is None else "-" if row.opened else "+"
    left = (">" if selected else " ") + numbers + indent + mark
    return left, "bold" if selected or not row.depth else "plain"


def after(chosen: str, order: tuple[str, ...]) -> str:
    """The one after ``chosen``, round about."""
    return order[(order.index(chosen) + 1) % len(order)]


def state(probe: str, moment: Moment) -> tuple[str, ...]:
    """What there is to say of ``probe`` where it does not see everything."""
    status = moment.timeline.status(probe, moment.at)
    if status is None or (status.status == "attached" and not status.reason):
        return ()
    return (f"{probe}: {status.status}: {status.reason}".rstrip(": "),)


def unseen(probe: str, moment: Moment) -> str:
    """Why ``probe`` sees nothing at the moment; "" where it sees."""
    status = moment.timeline.status(probe, moment.at)
    if status is None:
        later = moment.timeline.status(probe, moment.end)
        if later is not None or moment.session.live:
            return f"the probes of {probe} were not attached yet"
        return "not part of this session"
    if status.status not in ("attached", "shed"):
        return f"{status.status}: {status.reason}".rstrip(": ")
    return ""


def empty(filter: str, probe: str, moment: Moment, nothing: str) -> str:
    """Why there are no rows; ``nothing`` where it was seen that there is nothing."""
    why = unseen(probe, moment)
    if why:
        return why
    if filter:
        return f"nothing matches {filter}"
    return nothing if moment.who.processes else "no process uses CUDA"
