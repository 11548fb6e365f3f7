"""A table as lines of text, with as many of its columns and rows as there is room for."""

from __future__ import annotations

from dsprobe.tui.glyphs import Glyphs
from dsprobe.tui.lines import Line, fit, shorten
from dsprobe.tui.tables import Table

READABLE = 14  # cells of a column, an address with its port, that are of use


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
