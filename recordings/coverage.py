"""When each probe could see, so that "nothing happened" is never said of a time nobody watched."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from dsprobe.recordings import streams as st
from dsprobe.recordings.lane import Edges, Lane, Values
from dsprobe.recordings.model import Rows
from dsprobe.recordings.session import FOREVER, Session, Status

_STALLED = st.STATUSES.index("stalled")
PATIENCE = 4_000_000_000
"""A probe is said to be stalled some time (ns) after it last answered: less than this."""
_WORKING = np.array([word in ("attached", "shed") for word in st.STATUSES])


@dataclass(frozen=True, eq=False)
class _History:
    """States of one probe or program, in order of time."""

    t: Edges
    status: npt.NDArray[np.uint8]
    reason: npt.NDArray[np.object_]
    working: npt.NDArray[np.bool_]


class Coverage:
    """The states in ``meta.coverage`` of every probe and program; keep one per viewer."""

    def __init__(self, session: Session) -> None:
        self._session = session
        self._rows = -1
        self._probes: dict[str, _History] = {}
        self._programs: dict[str, dict[str, _History]] = {}

    def refresh(self) -> None:
        """Take in rows that have come since."""
        rows = self._session.read(st.META_COVERAGE.name, 0, FOREVER)
        names = set(rows.dtype.names or ())
        if len(rows) == self._rows or not {"probe", "program", "status", "reason"} <= names:
            return
        self._rows = len(rows)
        of: dict[tuple[str, str], list[int]] = {}
        for i, name in enumerate(zip(rows["probe"], rows["program"], strict=True)):
            of.setdefault(name, []).append(i)
        for (probe, program), at in of.items():
            if program:
                self._programs.setdefault(probe, {})[program] = _history(rows[at])
            else:
                self._probes[probe] = _history(rows[at])

    def at(self, probe: str, t: int) -> Status | None:
        """State of ``probe`` at ``t``; None where nothing is said of it up to then."""
        return _at(self._probes.get(probe), t)

    def of_lane(self, lane: Lane, t: int, claimed: Collection[str]) -> Status | None:
        """State of ``lane`` at ``t``: its probe's, but for programs that others depend on.

        ``claimed`` are the programs that single lanes depend on: one of them that is not attached
        is the matter of its own lanes alone.
        """
        whole = self.at(lane.probe, t)
        if whole is None or whole.status not in ("attached", "shed"):
            return whole
        states = {name: _at(h, t) for name, h in self._programs.get(lane.probe, {}).items()}
        down = {name: s for name, s in states.items() if s is not None and s.status != "attached"}
        if lane.program in down:
            return down[lane.program]
        return Status("attached", "") if down and down.keys() <= set(claimed) else whole

    def throughout(self, probe: str, start: int, end: int) -> bool:
        """Whether ``probe`` was attached all the time from ``start`` to ``end``."""
        history = self._probes.get(probe)
        if history is None:
            return False
        lo, hi = np.searchsorted(history.t, (start, end), "right")
        return lo > 0 and bool(history.working[lo - 1 : hi].all())

    def answered(self, probe: str, t: int) -> int:
        """When ``probe`` answered again if it was waiting for an answer at ``t``, else ``t``."""
        history = self._probes.get(probe)
        last = int(np.searchsorted(history.t, t + PATIENCE, "right")) - 1 if history else -1
        if history is None or last < 0 or history.status[last] != _STALLED:
            return t
        return max(int(history.t[last + 1]), t) if last + 1 < len(history.t) else t

    def mask(self, probe: str, quiet: bool, values: Values, first: int, width: int) -> Values:
        """``values`` of buckets ``first`` on with NaN where ``probe`` was not attached; of a
        ``quiet`` lane with 0 only where it was attached from the bucket's start to its end."""
        history = self._probes.get(probe)
        if history is None:
            return np.where(values == 0, np.nan, values) if quiet else values
        start = (np.arange(len(values)) + first) * width
        # State 0 is "before the first row", not attached; lo to hi are in force in the bucket.
        lo = np.searchsorted(history.t, start, "right")
        hi = np.searchsorted(history.t, start + width, "left")
        ups = np.concatenate([[0, 0], np.cumsum(history.working)])
        up = ups[hi + 1] - ups[lo]
        ever, throughout = up > 0, up == hi - lo + 1
        shown = values.copy()
        shown[~ever] = np.nan
        if quiet:
            shown[~throughout & (shown == 0)] = np.nan
        return shown


def _history(rows: Rows) -> _History:
    status = rows["status"].astype(np.uint8)
    working = _WORKING[np.minimum(status, len(_WORKING) - 1)]
    working &= status < len(_WORKING)
    return _History(rows["t"].astype(np.int64), status, rows["reason"], working)


def _at(history: _History | None, t: int) -> Status | None:
    last = np.searchsorted(history.t, min(t, FOREVER - 1), "right") if history else 0
    if history is None or last == 0:
        return None
    code = int(history.status[last - 1])
    word = st.STATUSES[code] if code < len(st.STATUSES) else f"status {code}"
    return Status(word, str(history.reason[last - 1]))
