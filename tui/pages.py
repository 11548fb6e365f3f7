"""Pages of text over the whole screen: the help, and what is wrong."""

from __future__ import annotations

import textwrap

from dsprobe.tui import units
from dsprobe.tui.actions import ACTIONS, keys_of, where
from dsprobe.tui.glyphs import Glyphs
from dsprobe.tui.lines import Line, fit, text_of
from dsprobe.tui.snapshot import Snapshot
from dsprobe.tui.treescreen import TreeBody


def help_page(glyphs: Glyphs, width: int) -> list[Line]:
    """All of the help, of any length: every action by group, and how to read the screen."""
    wide = max(len(keys_of(a)) for a in ACTIONS)
    lines: list[Line] = [fit([(" dsprobe: keys (q or Escape leaves this page)", "bold")], width)]
    for group in dict.fromkeys(a.group for a in ACTIONS):
        lines += [fit([], width), fit([(f" {group}", "bold")], width)]
        for action in ACTIONS:
            if action.group == group:
                text = f"  {keys_of(action):<{wide}}  {action.title}{where(action)}"
                lines.append(fit([(text, "plain")], width))
    low, high = glyphs.levels[0], glyphs.levels[-1]
    legend = (
        f"{low} to {high}  a value; a full bar is 100 %, or a round number over the highest",
        f"{glyphs.zero}       attached, and nothing happened",
        "blank   not known: not attached, not recorded, or not yet arrived",
        "!       rows of this lane were lost; the header says how many in all",
        "~       sampled, or with less detail than asked for; of a table: some columns left out",
        f"{glyphs.clean('≤')}       the edge of a histogram's slot: the value is over half of that",
        f"{glyphs.marker}       a marker, on the time axis",
    )
    lines += [fit([], width), fit([(" Reading the screen", "bold")], width)]
    lines += [fit([(f"  {row}", "plain")], width) for row in legend]
    return lines


def problems_page(snap: Snapshot, glyphs: Glyphs, width: int) -> list[Line]:
    """Damage, losses by stream, and every lane that does not tell all, each in full."""
    lines: list[Line] = [
        fit([(" dsprobe: problems (q or Escape leaves this page)", "bold")], width)
    ]

    def section(title: str, rows: list[str], none: str) -> None:
        lines.extend([fit([], width), fit([(f" {title}", "bold")], width)])
        for row in rows or [none]:
            parts = textwrap.wrap(glyphs.clean(row), max(width - 4, 8))
            lines.extend(fit([(f"  {part}", "plain")], width) for part in parts)

    section(f"Source: {glyphs.clean(snap.source)}", list(snap.problems), "nothing is wrong with it")
    lost = [f"{units.si(n)} of {stream}" for stream, n in sorted(snap.lost.items()) if n]
    section("Rows lost", lost, "none")
    if isinstance(snap.body, TreeBody):
        section("On this screen", list(snap.body.notes), "nothing is left out")
    lanes: dict[str, list[str]] = {}
    for lane in snap.lanes:
        if not lane.working or lane.reason:
            why = f"{lane.status}: {lane.reason}" if lane.reason else lane.status
            lanes.setdefault(why, []).append(lane.title)
    told = [f"{', '.join(titles)}: {why}" for why, titles in lanes.items()]
    section("Lanes that are missing or do not tell all", told, "none")
    return lines


def page_lines(page: list[Line], scroll: int, width: int, height: int) -> list[Line]:
    """``height`` lines of ``page`` from line ``scroll`` on, as far as it goes."""
    scroll = min(max(scroll, 0), max(len(page) - height, 0))
    shown = page[scroll : scroll + height]
    if len(page) > scroll + height and shown:
        last = text_of(shown[-1]).rstrip()[: max(width - 7, 0)]
        shown[-1] = fit([(last, "plain"), (" (more)", "dim")], width)
    return (shown + [fit([], width)] * height)[:height]
