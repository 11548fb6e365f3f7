"""What one screen shows, as plain values, computed off the render path."""

from __future__ import annotations

from dataclasses import dataclass, field

from dsprobe.recordings.lane import Values
from dsprobe.recordings.timeline import Window
from dsprobe.tui.screen import Body


@dataclass(frozen=True, eq=False)
class LaneView:
    """One row.  ``fold`` is the lane's; ``now`` is the value under the cursor; ``scale`` is what a
    full bar means; ``flags`` holds "lossy", "sampled", "partial", "shed"."""

    key: str
    title: str
    unit: str
    fold: str
    values: Values
    now: float
    mean: float
    peak: float
    scale: float
    status: str
    reason: str
    flags: frozenset[str]
    lost: int

    @property
    def working(self) -> bool:
        return self.status in ("attached", "shed")


@dataclass(frozen=True, eq=False)
class Snapshot:
    """``mode`` is LIVE, PAUSED or PLAY, ``detail`` how far behind or how fast.  ``at`` is the
    playhead's moment; columns of ``ticks`` and ``markers`` are those of the window; ``lost`` counts
    rows by stream; ``shed`` says what is left out now to save cost; ``cuda`` is whether any process
    was seen to use CUDA; ``body`` is of the ``screen`` that was chosen."""

    host: str
    source: str
    mode: str
    detail: str
    time: str
    date: str
    overhead: str
    lost: dict[str, int]
    problems: tuple[str, ...]
    shed: str
    at: int
    window: Window
    cursor: int
    show_cursor: bool
    ticks: tuple[tuple[int, str], ...]
    markers: tuple[tuple[int, str], ...]
    lanes: tuple[LaneView, ...]
    cuda: bool = False
    screen: str = ""
    body: Body = field(default_factory=Body)
    empty: bool = False
