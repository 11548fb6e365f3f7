"""Places of which there is a bounded number, and that any user may take.

One user gets a quarter of them at most, so that nobody can keep all others out.  Root, as which
most containers run, may have all: it can do worse.
"""

from __future__ import annotations

from collections.abc import Sequence

_SHARE = 4
NOBODY = 65534
"""Stands for a user who is not known."""


def room(holders: Sequence[int], uid: int, most: int) -> bool:
    """Whether a place is free for ``uid``, of ``most``; ``holders`` are the users of those that are
    taken."""
    if len(holders) >= most:
        return False
    return uid == 0 or holders.count(uid) < max(1, most // _SHARE)
