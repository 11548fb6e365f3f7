"""Which stacks leak GPU memory.

A stack leaks whose *floor* rises: the least that it held must have been more in each of several
windows than in the one before.  What breathes comes back to its floor, and what grew once has one
that stays.  To tell a leak from the rising half of something slow, the floor must also have risen
by more than the stack ever fell meanwhile, and above all that it held before; and what is live must
be as old as the growth is.  Where a process was not seen for long enough, nothing is said of it.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from dsprobe.recordings import cudastreams as cuda
from dsprobe.recordings.levels import Levels, read_levels
from dsprobe.recordings.session import FOREVER, Session
from dsprobe.recordings.stacks import Frame, Stacks, where, wrappers
from dsprobe.recordings.tables import word

SECOND = 10**9
ENDING = 2 * SECOND
"""What a process holds so long (ns) before its end is looked at: as it ends it gives it back."""


@dataclass(frozen=True)
class Thresholds:
    """When a stack is said to leak.  Times in ns."""

    warmup: int = 10 * SECOND
    """After a process was first seen: what it sets up then is no leak."""
    window: int = 10 * SECOND
    """Shortest window."""
    windows: int = 8
    """In each of so many the least that was live must be more than in the one before."""
    min_bytes: int = 1 << 20
    """Growth over all windows below this is not named."""
    steady: float = 0.35
    """From each window to the next it must grow by so much of what it grew on average."""
    old: float = 0.2
    """Mean age of what is live, as a part of the windows' time and of the part of it that is
    growth: a half where all of that stays."""

    @property
    def needed(self) -> int:
        """How long a process must have been seen."""
        return self.warmup + self.window * self.windows


@dataclass(frozen=True)
class Leak:
    """A stack of a process whose live memory of ``kind`` rose in each of ``windows`` windows of
    ``window`` ns, the last of which ended at ``end``.

    ``rate`` and ``block_rate`` are bytes and blocks per second over these, ``grown`` the bytes,
    ``live`` and ``blocks`` what was there at the end.  ``place`` is the frame to name it by: the
    innermost one that no stack has which does not leak.
    """

    process: int
    stack: int
    kind: str
    live: int
    blocks: int
    grown: int
    rate: float
    block_rate: float
    window: int
    windows: int
    end: int
    place: Frame


@dataclass(frozen=True)
class Unjudged:
    """A process that was seen for ``seen`` ns only: fewer than :attr:`Thresholds.needed`."""

    process: int
    seen: int


@dataclass(frozen=True)
class Findings:
    """``leaks``, the fastest first; of ``unjudged`` processes nothing is known yet.  ``left_out``
    is the number of stacks that were too many to look at."""

    leaks: tuple[Leak, ...]
    unjudged: tuple[Unjudged, ...]
    judged: tuple[int, ...]
    left_out: int


def find_leaks(
    session: Session, start: int, end: int, stacks: Stacks, thresholds: Thresholds = Thresholds()
) -> Findings:
    """What leaked within [start, end], by the session's rows of gpu.stack."""
    ended = _ended(session)
    held, left_out = read_levels(session, start, end, min(thresholds.window, SECOND))
    leaks: list[Leak] = []
    unjudged: list[Unjudged] = []
    judged: list[int] = []
    for levels in held:
        stop = min(end, ended.get(levels.process, FOREVER) - ENDING)
        begin = levels.first + thresholds.warmup
        first = -(-(begin - levels.start) // levels.width)
        last = (stop - levels.start) // levels.width  # cells first to last - 1
        if last - first < thresholds.windows * _shortest(levels, thresholds):
            unjudged.append(Unjudged(levels.process, max(stop - levels.first, 0)))
        else:
            judged.append(levels.process)
            leaks += _of_process(levels.merged(stacks), first, last, thresholds)
    leaks = _named(leaks, held, stacks)
    leaks.sort(key=lambda leak: (-leak.rate, leak.process, leak.stack))
    return Findings(tuple(leaks), tuple(unjudged), tuple(judged), left_out)


def _ended(session: Session) -> dict[int, int]:
    rows = session.read(cuda.META_PROCESS.name, 0, FOREVER)
    if not {"id", "ended"} <= set(rows.dtype.names or ()):
        return {}
    pairs = zip(rows["id"].tolist(), rows["ended"].tolist(), strict=True)
    return {id: ended for id, ended in pairs if ended}


def _shortest(levels: Levels, th: Thresholds) -> int:
    """Cells of the shortest window."""
    return -(-th.window // levels.width)


def _of_process(levels: Levels, first: int, last: int, th: Thresholds) -> list[Leak]:
    """The newest windows are as long as the time allows; where the floor did not rise in these,
    they are tried at half the length, and so on: a leak may have begun late."""
    found: dict[int, Leak] = {}
    per, least = (last - first) // th.windows, _shortest(levels, th)
    while per >= least:
        leaking, grown = _rising(levels, last, per, th)
        for i in np.flatnonzero(leaking).tolist():
            if i not in found:
                found[i] = _leak(levels, i, last, per, float(grown[i]), th)
        per = max(per // 2, least) if per > least else 0
    return list(found.values())


def _named(leaks: list[Leak], held: list[Levels], stacks: Stacks) -> list[Leak]:
    """``leaks`` with their places."""
    if not leaks:
        return []
    leaking = {stacks.same(leak.stack) for leak in leaks}
    others = {stack for levels in held for _, stack, _ in levels.keys}
    others = {stack for stack in others if stacks.same(stack) not in leaking}
    common = {frame.id for stack in others for frame in stacks.frames(stack)}
    inside = wrappers(stacks.every())
    return [replace(leak, place=where(stacks.frames(leak.stack), common, inside)) for leak in leaks]


def _rising(
    levels: Levels, last: int, per: int, th: Thresholds
) -> tuple[npt.NDArray[np.bool_], npt.NDArray[np.float64]]:
    """Which stacks leaked in the windows of ``per`` cells that end before cell ``last``, and by how
    many bytes their floor rose."""
    first = last - per * th.windows
    low, high = levels.low[:, first:last], levels.high[:, first:last]
    floors = low.reshape(len(low), th.windows, per).min(axis=2)
    steps = np.diff(floors, axis=1)
    grown = floors[:, -1] - floors[:, 0]
    leaking = (steps > 0).all(axis=1) & (grown >= th.min_bytes)
    leaking &= (steps >= th.steady * grown[:, None] / (th.windows - 1)).all(axis=1)
    # It rose by more than it fell at any time ...
    peak = np.maximum.accumulate(high, axis=1)
    leaking &= grown > (peak[:, :-1] - low[:, 1:]).max(axis=1, initial=0)
    # ... and over all that it had held before.
    leaking &= floors[:, -1] > levels.high[:, :first].max(axis=1, initial=0)
    live, born = levels.last[:, last - 1], levels.born[:, last - 1]
    end = levels.start + last * levels.width
    share = np.minimum(grown / np.maximum(live, 1), 1)
    young = end - born < th.old * share * per * th.windows * levels.width
    return leaking & ~(young & (born > 0)), grown


def _leak(levels: Levels, i: int, last: int, per: int, grown: float, th: Thresholds) -> Leak:
    _, stack, kind = levels.keys[i]
    first = last - per * th.windows
    width = levels.width / SECOND
    blocks = levels.blocks[i]
    return Leak(
        levels.process, stack, word(cuda.MEMORY_KINDS, kind), int(levels.last[i, last - 1]),
        int(blocks[last - 1]), int(grown), grown / (per * width * (th.windows - 1)),
        max(float(blocks[last - 1] - blocks[first]), 0.0) / max(last - 1 - first, 1) / width,
        per * levels.width, th.windows, levels.start + last * levels.width, Frame(0),
    )  # fmt: skip
