"""The one widget: shows lines that were drawn elsewhere, and writes only the cells that changed."""

from __future__ import annotations

from rich.segment import Segment
from rich.style import Style
from textual.geometry import Region, Size
from textual.strip import Strip
from textual.widget import Widget

from dsprobe.tui.lines import Line, changed

THEME = {
    "plain": Style(),
    "dim": Style(dim=True),
    "bold": Style(bold=True),
    "bar": Style(reverse=True),
    "mode": Style(reverse=True, bold=True),
    "warn": Style(color="yellow"),
    "bad": Style(color="red", bold=True),
    "cursor": Style(reverse=True),
    "net": Style(color="cyan"),
    "tcp": Style(color="magenta"),
    "cpu": Style(color="green"),
    "gpu": Style(color="blue"),
}
"""The terminal's own sixteen colours, so that it looks right on light and dark."""


class Canvas(Widget, can_focus=True):
    """Fills its parent.  Every line is as wide as the widget and every character one cell."""

    DEFAULT_CSS = "Canvas { width: 100%; height: 100%; background: ansi_default; }"

    def __init__(self) -> None:
        super().__init__()
        self.lines: list[Line] = []

    def show(self, lines: list[Line]) -> int:
        """Put ``lines`` on the screen; returns how many cells had to be written."""
        old, self.lines = self.lines, lines
        if len(old) != len(lines):
            self.refresh()
            return sum(len(text) for line in lines for text, _ in line)
        regions = [
            Region(start, y, stop - start, 1)
            for y, (before, after) in enumerate(zip(old, lines, strict=True))
            if before is not after
            for start, stop in changed(before, after)
        ]
        if regions:
            self.refresh(*regions)
        return sum(region.width for region in regions)

    def render_line(self, y: int) -> Strip:
        """Called by Textual for the lines it is to write."""
        if y >= len(self.lines):
            return Strip.blank(self.size.width)
        segments = [Segment(text, THEME[role]) for text, role in self.lines[y]]
        return Strip(segments, sum(len(text) for text, _ in self.lines[y]))

    def get_content_width(self, container: Size, viewport: Size) -> int:
        return container.width
