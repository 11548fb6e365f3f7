"""Looks at a session where the playhead stands, and makes what the screen is to show."""

from __future__ import annotations

import threading
from typing import Any

import numpy as np

from dsprobe.recordings import cudastreams as cuda
from dsprobe.recordings import streams as st
from dsprobe.recordings.gpus import simulated
from dsprobe.recordings.identities import Identities
from dsprobe.recordings.samples import ending
from dsprobe.recordings.session import FOREVER, Clock, Session, clock, facts
from dsprobe.recordings.stacks import Stacks
from dsprobe.recordings.timeline import SECOND, Curve, Timeline, Window
from dsprobe.tui import units
from dsprobe.tui.gputext import SIMULATED
from dsprobe.tui.lanes import LanesScreen
from dsprobe.tui.player import Marker, Player
from dsprobe.tui.screen import Body, Moment, Screen
from dsprobe.tui.snapshot import LaneView, Snapshot
from dsprobe.tui.times import Scale, zone_of

CLOCK_AGE = 10 * SECOND  # a pair of clocks is good for this long
MAX_MARKERS = 1000
SHED_EVERY = 12 * SECOND
"""A lane that is shed is still seen for a second in ten."""
SHED_SEEN = 3 * SECOND
_SHED = ((cuda.CUDA_THREAD, "launch events"), (cuda.GPU_MEMORY, "allocations"))
SAMPLED = frozenset({"cpu.runq"})  # lanes that see a sample, not everything


class Observer:
    """Looks at ``session`` where ``player`` stands.  ``player`` may be moved by another thread
    that holds ``lock``; the session is touched by the caller of :meth:`look` alone."""

    def __init__(self, session: Session, player: Player, screen: Screen | None = None) -> None:
        self.session, self.player = session, player
        self.screen: Screen = screen or LanesScreen()
        self.lock = threading.Lock()
        self.relative = False
        self.scale = Scale(Clock(np.empty(0, np.int64), np.empty(0, np.int64), 0), 0)
        self._timeline = Timeline(session)
        self._who, self._stacks = Identities(session), Stacks(session)
        self._facts: dict[str, str] = {}
        self._paired = -CLOCK_AGE
        self._body: tuple[Any, Body] = (None, Body())

    def look(self) -> Snapshot:
        """Take in what is new, let the player's time pass, and compute what to show."""
        session = self.session
        session.refresh()
        self._timeline.refresh()
        self._who.refresh()
        begin, end = self._timeline.span()
        found = self._session_markers()
        with self.lock:
            p = self.player
            p.found = found
            p.extend(begin, end, session.live)
            p.tick()
            window, cursor, bucket, position = p.window(), p.cursor, p.bucket, p.position
            mode, detail, markers, following = *_mode(p), p.markers, p.following
            problems = _problems(session, p)
        scale = self._scale(begin, end)
        curves = self._timeline.curves(window, position if not following else FOREVER)
        at = min((bucket + 1) * window.width, max(position, 1))
        lost = session.lost()
        screen = self.screen
        return Snapshot(
            host=self._facts.get("host", "?"),
            source=session.name,
            mode=mode,
            detail=detail,
            time=scale.text(position) if end else "",
            date=scale.date(position) if end else "",
            overhead=self._overhead(position),
            lost=dict(lost),
            problems=problems,
            shed=self._shed(at),
            window=window,
            cursor=cursor,
            show_cursor=not following,
            ticks=_columns(scale.ticks(window.start, window.end, 14 * window.width), window),
            markers=_columns([(m.t, m.label) for m in markers], window),
            lanes=tuple(_lane_view(curve, cursor, window) for curve in curves),
            at=position,
            cuda=len(self._who.processes) > 0,
            screen=screen.id,
            body=self._look_up(screen, at, window, markers),
            empty=end == 0,
        )

    def _scale(self, begin: int, end: int) -> Scale:
        if not self._facts or end - self._paired >= CLOCK_AGE:
            self._facts = facts(self.session)
            pairs = clock(self.session)
            if len(pairs.mono):
                self._paired = end
            zone = zone_of(self._facts.get("zone", ""))
            self.scale = Scale(pairs, begin, zone)
        self.scale = Scale(self.scale.clock, begin, self.scale.zone, self.relative)
        return self.scale

    def _session_markers(self) -> tuple[Marker, ...]:
        if st.MARKER.name not in self.session.streams:
            return ()
        rows = self.session.read(st.MARKER.name, 0, FOREVER)[-MAX_MARKERS:]
        if "label" not in (rows.dtype.names or ()):
            return ()
        return tuple(Marker(int(r["t"]), str(r["label"])) for r in rows)

    def _overhead(self, position: int) -> str:
        since = max(position - 30 * SECOND, 0)
        rows = self.session.read(st.META_OVERHEAD.name, since, position + SECOND)
        needed = {"dt", "agent_cpu", "bpf_cpu", "rss"}
        if not len(rows) or not needed <= set(rows.dtype.names or ()):
            return "?"
        row = rows[-1]
        cpu = 100.0 * (float(row["agent_cpu"]) + float(row["bpf_cpu"])) / max(int(row["dt"]), 1)
        return f"{units.digits(cpu)}% of a core {units.size(int(row['rss']))}"

    def _shed(self, at: int) -> str:
        """Whose single events are left out at ``at``, to save cost."""
        found = []
        for stream, what in _SHED:
            rows = ending(self.session, stream, at - SHED_SEEN, at)
            ids = np.unique(rows["process"][rows["shed"] > 0]).tolist()
            if ids:
                pids = [str(self._who.process(id).pid or "?") for id in ids]
                more = f" and {len(pids) - 2} more" if len(pids) > 2 else ""
                found.append(f"{what} of PID {', '.join(pids[:2])}{more}")
        return f"SHED {'; '.join(found)}" if found else ""

    def _look_up(
        self, screen: Screen, at: int, window: Window, markers: tuple[Marker, ...]
    ) -> Body:
        """What the chosen screen shows at ``at``, anew when a second has passed."""
        asked = screen.asked()
        at -= at % SECOND if window.width < SECOND else 0
        # Rows of the last moments are still coming in: look again after a second, and another.
        end = self.player.end
        arrived = min((end - at) // SECOND, 2)
        scale = self.scale
        silent = self.player.silence > 0
        key = (screen.id, asked, at, window.width, window.count, arrived, markers, silent,
               scale.relative)  # fmt: skip
        if key != self._body[0]:
            begin = self.player.start
            moment = Moment(self.session, self._timeline, scale, window, begin, end, at, self._who,
                            self._stacks, markers)  # fmt: skip
            body = screen.look(asked, moment)
            self._body = (key if not body.pending else None, body)
        return self._body[1]


def _mode(p: Player) -> tuple[str, str]:
    behind = f"{units.span(p.behind + p.silence)} behind" if p.growing else ""
    if p.following:
        return "LIVE", behind if p.silence else ""
    if not p.playing:
        if not p.growing and p.position >= p.end:
            return "PAUSED", "end"
        speed = units.speed(p.speed) if p.speed != 1 else ""
        return "PAUSED", f"{speed} {behind}".strip()
    direction = "backwards " if p.reversed else ""
    return "PLAY", f"{direction}{units.speed(p.speed)} {behind}".strip()


def _problems(session: Session, p: Player) -> tuple[str, ...]:
    """What the source says is wrong, with what to do, and that it says nothing."""
    problems = tuple(session.problems)
    if p.ended:
        first, *rest = problems or ("the agent has ended",)
        problems = (f"{first}: quit and run dsprobe top again", *rest)
    if p.silence:
        said = f"nothing has come from the agent for {units.span(p.silence)}"
        problems = (f"{said}: it is stopped, or the machine is too busy for it", *problems)
    if simulated(session):
        problems = (SIMULATED, *problems)
    return problems


def _columns(moments: list[tuple[int, str]], window: Window) -> tuple[tuple[int, str], ...]:
    return tuple(
        (t // window.width - window.first, text)
        for t, text in moments
        if window.start <= t < window.end
    )


def _lane_view(curve: Curve, cursor: int, window: Window) -> LaneView:
    lane, values = curve.lane, curve.values
    known = values[np.isfinite(values)]
    peak = float(known.max()) if len(known) else np.nan
    # The newest value that is known: samples of one moment do not all arrive at once.
    memory = SHED_EVERY if curve.status == "shed" else 3 * SECOND
    back = max(memory // window.width, 1)
    recent = values[max(cursor - back, 0) : cursor + 1]
    recent = recent[np.isfinite(recent)]
    flags = {"lossy"} if curve.lost else set()
    if curve.status == "shed":
        flags.add("shed")
    if curve.status == "attached" and curve.reason:
        flags.add("partial")
    if lane.key in SAMPLED:
        flags.add("sampled")
    return LaneView(
        lane.key,
        lane.title,
        lane.unit,
        lane.fold,
        values,
        float(recent[-1]) if len(recent) else np.nan,
        # The mean of worst cases would change with the width of the columns.
        float(known.mean()) if len(known) and lane.fold != "max" else np.nan,
        peak,
        100.0 if lane.unit == "%" else _ceiling(peak),
        curve.status,
        curve.reason,
        frozenset(flags),
        curve.lost,
    )


def _ceiling(peak: float) -> float:
    """The round number over ``peak`` that a full bar stands for; it changes rarely."""
    if not np.isfinite(peak) or peak <= 0:
        return 1.0
    power = 10.0 ** np.floor(np.log10(peak))
    return float(next((m * power for m in (1, 2, 5) if peak <= m * power * 1.000001), 10 * power))
