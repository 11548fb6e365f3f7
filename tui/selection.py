"""Which row of a list is selected: it stays the same row while rows move."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass


@dataclass
class Selection:
    """``key`` names the row; ``at`` is where it was last, for when it is gone; ``top`` is the first
    row in view; ``moved`` is whether anybody has chosen a row yet."""

    key: Hashable = None
    at: int = 0
    top: int = 0
    moved: bool = False

    def settle(self, keys: Sequence[Hashable], best: int = 0) -> int:
        """Index of the selected row among ``keys``; of its neighbour where it is gone, and ``best``
        as long as nobody has chosen one."""
        if not self.moved:
            self.at = best
        elif self.key in keys:
            self.at = keys.index(self.key)
        self.at = min(max(self.at, 0), max(len(keys) - 1, 0))
        if keys:
            self.key = keys[self.at]
        return self.at

    def choose(self, keys: Sequence[Hashable], at: int) -> None:
        """Select the row at ``at``, or the nearest one."""
        self.at = min(max(at, 0), max(len(keys) - 1, 0))
        self.key, self.moved = (keys[self.at] if keys else None), True

    def view(self, count: int, room: int) -> range:
        """Indices of the rows to show of ``count`` in ``room`` lines; the selected one, which has
        been settled, is among them."""
        last = max(count - room, 0)
        self.top = min(max(self.top, self.at - room + 1, 0), self.at, last)
        return range(self.top, min(self.top + max(room, 0), count))
