"""One snapshot as plain text, for a pipe: no escapes, no screen."""

from __future__ import annotations

import time

from dsprobe.recordings.gpus import gpus, xids
from dsprobe.recordings.session import Session
from dsprobe.tui import units
from dsprobe.tui.cudatext import cuda_lines
from dsprobe.tui.glyphs import Glyphs, choose
from dsprobe.tui.gputext import gpu_lines
from dsprobe.tui.grid import table
from dsprobe.tui.lanes import TablesBody, ordered
from dsprobe.tui.lines import shorten, text_of
from dsprobe.tui.observer import Observer
from dsprobe.tui.player import Player
from dsprobe.tui.plot import Columns, lane_lines
from dsprobe.tui.snapshot import Snapshot
from dsprobe.tui.tables import TABLES


def once(session: Session, width: int = 100, glyphs: Glyphs | None = None) -> str:
    """The newest moment of ``session``: header, what uses GPUs, every lane, the tables.

    Lines are at most ``width`` characters.  Characters are the locale's: ASCII where it has no
    more.
    """
    glyphs = glyphs or choose()
    session.refresh()
    player = Player(time.monotonic_ns, *session.span(), growing=session.live, live=session.live)
    columns = Columns.plain(max(width, 40))
    player.resize(columns.plot)
    player.live()
    observer = Observer(session, player)
    snap = observer.look()
    cuda = cuda_lines(observer, glyphs, columns.width) if snap.cuda else []
    start, end = snap.window.start, snap.at
    gpu = gpu_lines(gpus(session, start, end), xids(session, start, end))
    shown = [shorten(glyphs.clean(line), columns.width) for line in gpu]
    return render(snap, shown, cuda, glyphs, columns)


def render(
    snap: Snapshot, gpu: list[str], cuda: list[str], glyphs: Glyphs, columns: Columns
) -> str:
    """``snap`` as lines of text, each ended by a newline; ``gpu`` is what is said of GPUs, ``cuda``
    of processes that use them."""
    facts = [
        snap.host,
        snap.date,
        snap.time,
        f"dsprobe {snap.overhead}",
        f"lost {sum(snap.lost.values())}",
        snap.shed,
    ]
    lines = ["  ".join(glyphs.clean(f) for f in facts if f)]
    lines += [f"! {glyphs.clean(problem)}" for problem in snap.problems]
    if snap.empty:
        lines.append("no data yet")
    lines += ["", *gpu] if gpu else []
    lines += ["", *cuda] if cuda else []
    lines.append("")
    last = f"last {units.span(snap.window.count * snap.window.width)}"
    lines.append(f"{' lane':<{columns.title}}{'now':>8}  {'mean':>8} {'max':>8} {last}")
    for lane in ordered(snap):
        lines += [text_of(x) for x in lane_lines(lane, False, snap, glyphs, columns, 1)]
    tables = snap.body.tables if isinstance(snap.body, TablesBody) else {}
    for name in TABLES:
        shown = tables[name]
        rows = len(shown.rows[:10]) + 2 if shown.rows else 2
        lines.append("")
        lines += [text_of(x) for x in table(shown, glyphs, columns.width, rows)]
    return "".join(line.rstrip() + "\n" for line in lines)
