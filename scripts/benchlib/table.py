"""Rows as text for a terminal and as Markdown for the documentation."""

from __future__ import annotations

from benchlib.model import Bench, Row

_COLUMNS = "{:52} {:>12} {:>12} {:>7}  {}"


def header() -> str:
    return _COLUMNS.format("", "measured", "budget", "ratio", "")


def line(row: Row) -> str:
    """One row, for a terminal."""
    return _COLUMNS.format(_name(row), *_figures(row), _remark(row)).rstrip()


def document(done: list[tuple[Bench, list[Row]]], machine: dict[str, str], quick: bool) -> str:
    """docs/bench.md."""
    out = ["# What dsprobe costs", ""]
    out += [
        "Written by `sudo scripts/bench`; do not edit. Peers and dsprobe ran side by side, in one"
        " run on one machine; compare the ratios, not the absolute figures, with other machines.",
        "",
    ]
    if quick:
        out += ["**From a quick run: rough figures.**", ""]
    out += [f"- {key}: {value}" for key, value in machine.items()]
    for bench, rows in done:
        out += ["", f"## {bench.name}", "", bench.about, ""]
        out += ["| | measured | budget | ratio | |", "| --- | ---: | ---: | ---: | --- |"]
        for row in rows:
            out.append("| " + " | ".join((_name(row), *_figures(row), _remark(row))) + " |")
    return "\n".join(out) + "\n"


def _name(row: Row) -> str:
    return f"{row.name}, {row.unit}" if row.unit else row.name


def _figures(row: Row) -> tuple[str, str, str]:
    sense = "≥" if row.at_least else "≤"
    budget = "" if row.budget is None else f"{sense} {_number(row.budget)}"
    measured = "" if row.measured is None else _number(row.measured)
    return measured, budget, "" if row.ratio is None else f"{row.ratio:.2f}"


def _remark(row: Row) -> str:
    return "; ".join(part for part in (row.verdict, row.note) if part)


def _number(value: float) -> str:
    if value >= 1000:
        return f"{value:,.0f}"
    return f"{value:.3g}" if value < 100 else f"{value:.0f}"
