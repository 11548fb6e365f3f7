"""A session: what a screen or a report reads, be it a file or an agent that is still writing.

Nothing above this interface can tell the two apart but by ``live``.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from dsprobe.recordings import streams as st
from dsprobe.recordings.model import Rows, Stream


class Session(Protocol):
    """Times are CLOCK_MONOTONIC ns of the recorded host.  No method blocks on a live source."""

    @property
    def live(self) -> bool:
        """Whether more may arrive."""

    @property
    def name(self) -> str:
        """File name, or where the agent is."""

    @property
    def streams(self) -> Mapping[str, Stream]:
        """Declarations of all streams that may hold rows."""

    @property
    def problems(self) -> tuple[str, ...]:
        """Sentences about damage, truncation or a lost connection; empty when all is well."""

    def refresh(self) -> bool:
        """Take what has arrived since the last call; True when anything has."""

    def span(self) -> tuple[int, int]:
        """First and last ``t`` held of all streams but ``meta.*``, and of a part of a recording all
        that was asked for; (0, 0) when there is none."""

    def read(self, stream: str, start: int, end: int) -> Rows:
        """Rows with ``start <= t < end``, ordered by ``t`` (ties as they were written).

        A stream the session does not hold gives no rows (dtype of the declaration, or of a
        single ``t``).  The array belongs to the session: do not write into it.
        """

    def lost(self) -> Mapping[str, int]:
        """Rows known to be lost so far, by stream (meta.loss, and frames missing by ``seq``)."""

    def close(self) -> None:
        """Let go of the file or socket."""


FOREVER = 1 << 63


@dataclass(frozen=True)
class Clock:
    """Wall-clock time of monotonic moments: piecewise, from the pairs in ``meta.clock``."""

    mono: np.ndarray[tuple[int], np.dtype[np.int64]]
    wall: np.ndarray[tuple[int], np.dtype[np.int64]]
    uncertainty: int

    def to_wall(self, t: int) -> int:
        """CLOCK_REALTIME ns at monotonic ``t``, by the last pair before it; 0 without any pair."""
        if not len(self.mono):
            return 0
        i = max(int(np.searchsorted(self.mono, t, "right")) - 1, 0)
        return int(self.wall[i]) + (t - int(self.mono[i]))

    def to_mono(self, wall: int) -> int:
        """The last monotonic moment that read ``wall`` (the wall clock may have stepped back); the
        moment of the step where the clock stepped over ``wall``."""
        if not len(self.mono):
            return 0
        guess = self.mono + (wall - self.wall)
        end = np.append(self.mono[1:], np.iinfo(np.int64).max)
        fits = np.flatnonzero((guess >= self.mono) & (guess < end))
        if len(fits):
            return int(guess[fits[-1]])
        before = np.flatnonzero(self.wall <= wall)
        return int(self.mono[before[-1] + 1] if len(before) else guess[0])


def clock(session: Session) -> Clock:
    """The clock of ``session``, as far as it is known now."""
    rows = session.read(st.META_CLOCK.name, 0, FOREVER)
    if not len(rows):
        none = np.empty(0, np.int64)
        return Clock(none, none, 0)
    return Clock(
        rows["t"].astype(np.int64), rows["wall"].astype(np.int64), int(rows["uncertainty"].max())
    )


def facts(session: Session) -> dict[str, str]:
    """The last value of each key of ``meta.session``."""
    rows = session.read(st.META_SESSION.name, 0, FOREVER)
    return dict(zip(rows["key"], rows["value"], strict=True)) if len(rows) else {}


@dataclass(frozen=True)
class Status:
    """What coverage says of a probe or program: a word of ``streams.STATUSES`` and the reason."""

    status: str
    reason: str


def coverage(session: Session, at: int = FOREVER) -> dict[tuple[str, str], Status]:
    """State at moment ``at`` of every (probe, program); program ``""`` is the whole probe."""
    rows = session.read(st.META_COVERAGE.name, 0, at if at == FOREVER else at + 1)
    state: dict[tuple[str, str], Status] = {}
    for row in rows if "status" in (rows.dtype.names or ()) else ():
        code = int(row["status"])
        word = st.STATUSES[code] if code < len(st.STATUSES) else f"status {code}"
        state[str(row["probe"]), str(row["program"])] = Status(word, str(row["reason"]))
    return state
