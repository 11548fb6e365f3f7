"""What processes do with GPUs as a few lines of plain text: what leaks first."""

from __future__ import annotations

from dsprobe.tui import units
from dsprobe.tui.glyphs import Glyphs
from dsprobe.tui.launches import LaunchesScreen
from dsprobe.tui.lines import shorten
from dsprobe.tui.memory import MemoryScreen
from dsprobe.tui.memoryrows import MemoryRow
from dsprobe.tui.observer import Observer
from dsprobe.tui.treescreen import TreeBody

STACKS = 5
PROCESSES = 8
WAITING = 5


def cuda_lines(observer: Observer, glyphs: Glyphs, width: int) -> list[str]:
    """Memory by process, the stacks that leak or grow most, launches, who waits."""
    memory = _body(observer, MemoryScreen(all_open=True))
    launches = _body(observer, LaunchesScreen())
    rows = [row for row in memory.rows if isinstance(row, MemoryRow)]
    lines = [f"GPU memory: {memory.total}"]
    label = ""
    grown: list[tuple[MemoryRow, str]] = []
    for row in rows:
        if not row.depth:
            label = row.text.partition(": ")[0]
        elif row.opened is None and (row.leaks or row.grown > 0):
            grown.append((row, label))
    grown.sort(key=lambda pair: (-pair[0].rate, -pair[0].grown))
    for row, process in grown[:STACKS]:
        leak = f"LEAK {units.size(row.rate)}/s, " if row.leaks else ""
        amounts = f"{units.size(row.live)} live, {units.change(row.grown)}"
        mark = glyphs.alert if row.leaks else " "
        lines.append(f"{mark} {leak}{amounts}, {process}: {row.text}")
    whole = sorted((row for row in rows if not row.depth and row.live), key=lambda r: -r.live)
    for row in whole[:PROCESSES]:
        name, _, rest = row.text.partition(": ")
        lines.append(f"  {name}: {units.size(row.live)} on device, {rest}")
    lines.append(f"launches: {launches.total}")
    lines += [f"! {note}" for note in (*launches.notes[:WAITING], *memory.notes)]
    return [shorten(glyphs.clean(line), width) for line in lines]


def _body(observer: Observer, screen: MemoryScreen | LaunchesScreen) -> TreeBody:
    observer.screen = screen
    while (body := observer.look().body).pending:
        pass
    assert isinstance(body, TreeBody)
    return body
