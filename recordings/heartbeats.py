"""When the agent is known to have lived: its own silence is not to be taken for a quiet host.

It pairs its clocks and measures itself once a second, whatever the host does.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from dsprobe.recordings import streams as st
from dsprobe.recordings.lane import Edges
from dsprobe.recordings.session import FOREVER, Session

SILENCE = 3_000_000_000
"""Heartbeats further apart than this (ns) are a stall: the agent was late by over two seconds."""
_STREAMS = (st.META_CLOCK.name, st.META_OVERHEAD.name)


class Heartbeats:
    """The heartbeats of ``session``; keep one per viewer."""

    def __init__(self, session: Session) -> None:
        self._session = session
        self._beats: Edges = np.empty(0, np.int64)

    def refresh(self) -> None:
        """Take in those that have come since."""
        # Two streams may come in either order: look a little behind the newest again.
        since = max(self.newest - SILENCE, 0)
        parts = [self._session.read(name, since, FOREVER)["t"] for name in _STREAMS]
        fresh = np.unique(np.concatenate(parts)).astype(np.int64)
        old = self._beats[: np.searchsorted(self._beats, since)]
        self._beats = np.concatenate([old, fresh])

    @property
    def newest(self) -> int:
        """Moment of the last one; 0 before the first."""
        return int(self._beats[-1]) if len(self._beats) else 0

    @property
    def oldest(self) -> int:
        """Moment of the first one; 0 where there is none."""
        return int(self._beats[0]) if len(self._beats) else 0

    def after(self, t: int) -> int:
        """The first at or after ``t``; ``t`` where there is none."""
        i = int(np.searchsorted(self._beats, t))
        return int(self._beats[i]) if i < len(self._beats) else t

    def lived(self, edges: Edges, begin: int, end: int) -> npt.NDArray[np.bool_]:
        """Whether the agent lived all through each bucket between ``edges``.

        [``begin``, ``end``] is what the session holds: a row is a sign of life as well.  True
        where no heartbeats were recorded at all: then nobody knows better.
        """
        if len(self._beats) < 2:
            return np.ones(len(edges) - 1, bool)
        signs = np.unique(np.concatenate([self._beats, [begin, end]]))
        stalls = np.flatnonzero(np.diff(signs) > SILENCE)
        starts, stops = signs[stalls], signs[stalls + 1]
        # Stalls do not overlap: those that start before a bucket's end and stop after its start.
        touching = np.searchsorted(starts, edges[1:]) - np.searchsorted(stops, edges[:-1], "right")
        return np.asarray(touching <= 0)
