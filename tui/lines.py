"""A line of the screen: spans of text, each with the name of a role that a theme gives a style."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
import numpy.typing as npt

Span = tuple[str, str]
Line = tuple[Span, ...]

ROLES = ("plain", "dim", "bold", "bar", "mode", "warn", "bad", "cursor", "net", "tcp", "cpu", "gpu")
"""Every role; none of them says anything that the text does not say as well."""

_CODES = {role: i for i, role in enumerate(ROLES)}


def fit(spans: Iterable[Span], width: int) -> Line:
    """Exactly ``width`` cells: cut, or filled up with blanks."""
    out: list[Span] = []
    left = width
    for text, role in spans:
        if left <= 0:
            break
        text = text[:left]
        if text:
            left -= len(text)
            if out and out[-1][1] == role:
                out[-1] = (out[-1][0] + text, role)
            else:
                out.append((text, role))
    if left > 0:
        out.append((" " * left, out[-1][1] if out and out[-1][1] == "bar" else "plain"))
    return tuple(out)


def text_of(line: Line) -> str:
    """The characters alone."""
    return "".join(text for text, _ in line)


def shorten(text: str, width: int) -> str:
    """``text`` in at most ``width`` cells, with ``~`` where something was cut off."""
    return text if len(text) <= width else text[: max(width - 1, 0)] + "~"[:width]


def cells(line: Line) -> npt.NDArray[np.uint64]:
    """One number per cell, equal where character and role are equal."""
    chars = np.frombuffer(text_of(line).encode("utf-32-le"), np.uint32).astype(np.uint64)
    roles = np.repeat(
        np.array([_CODES[role] for _, role in line], np.uint64), [len(text) for text, _ in line]
    )
    return chars << np.uint64(8) | roles


def changed(old: Line, new: Line, gap: int = 12) -> list[tuple[int, int]]:
    """[start, stop) of the cells to write again; stretches less than ``gap`` apart are joined,
    since moving the terminal's cursor costs about as many bytes."""
    if old == new:
        return []
    a, b = cells(old), cells(new)
    if len(a) != len(b):
        return [(0, len(b))]
    differ = np.flatnonzero(a != b)
    if not len(differ):
        return []
    breaks = np.flatnonzero(np.diff(differ) > gap)
    starts = differ[np.concatenate([[0], breaks + 1])]
    stops = differ[np.concatenate([breaks, [len(differ) - 1]])] + 1
    return [(int(x), int(y)) for x, y in zip(starts, stops, strict=True)]
