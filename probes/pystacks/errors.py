"""Why a process's Python cannot be read."""

from __future__ import annotations

ENDED = "its process had ended before it was looked at"


class Unreadable(Exception):
    """The reason, as it is shown: a clause about the process ("its ...", "Python 3.9 is ...").

    ``passing``: it may well be readable a moment later.
    """

    def __init__(self, reason: str, passing: bool = False) -> None:
        super().__init__(reason)
        self.passing = passing
