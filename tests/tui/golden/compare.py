"""Comparison with pictures kept beside this file.

``DSPROBE_GOLDEN=write`` writes them anew; look at the difference before committing it.
"""

from __future__ import annotations

import os
import re
from pathlib import Path

HERE = Path(__file__).parent


def text(name: str, got: str) -> None:
    """Fail unless ``got`` is the text kept under ``name``."""
    path = HERE / name
    if os.environ.get("DSPROBE_GOLDEN") == "write":
        path.write_text(got, encoding="utf-8")
    assert got.splitlines() == path.read_text(encoding="utf-8").splitlines()


def svg(name: str, got: str) -> None:
    """The same for an SVG screenshot: its texts with their places and colours, no more.

    Fonts, frame and the names of classes differ between versions of Rich and say nothing.
    """
    styles = dict(re.findall(r"\.[\w-]+-(r\d+) \{ ([^}]*) \}", got))
    lines = []
    for classes, x, y, content in re.findall(
        r'<text class="[\w-]+-(r\d+)" x="([\d.]+)" y="([\d.]+)"[^>]*>(.*?)</text>', got
    ):
        lines.append(f"{round(float(y) / 24.4)}\t{round(float(x) / 12.2)}\t{content}\t"
                     f"{styles.get(classes, '?').strip()}")  # fmt: skip
    for x, y, width, fill in re.findall(
        r'<rect fill="(#\w+)" x="([\d.]+)" y="([\d.]+)" width="([\d.]+)"', got
    ):
        lines.append(f"rect\t{x}\t{y}\t{width}\t{fill}")
    assert len(lines) > 20, "not a screenshot"
    text(name, "\n".join(lines) + "\n")
