"""Which row of a list is selected: it stays the same row while rows move."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass


@dataclass
class Selection:
    """``key`` names the row; ``at`` is where it was last, for when it is gone; ``top`` is the first
    row in view."""

    key: Hashable = None
    at: int = 0
    top: int = 0

    def settle(self, keys: Sequence[Hashable]) -> int:
        """Index of the selected row among ``keys``; of its neighbour where it is gone."""
        if self.key in keys:
            self.at = keys.index(self.key)
        self.at = min(max(self.at, 0), max(len(keys) - 1, 0))
        if keys:
            self.key = keys[self.at]
        return self.at

    def move(self, keys: Sequence[Hashable], n: int) -> None:
        """Select the row ``n`` rows on, as far as there are any."""
        at = min(max(self.settle(keys) + n, 0), max(len(keys) - 1, 0))
        self.key, self.at = (keys[at] if keys else None), at

    def view(self, keys: Sequence[Hashable], room: int) -> range:
        """Indices of the rows to show in ``room`` lines; the selected one is among them."""
        at = self.settle(keys)
        last = max(len(keys) - room, 0)
        self.top = min(max(self.top, at - room + 1, 0), at, last)
        return range(self.top, min(self.top + max(room, 0), len(keys)))
