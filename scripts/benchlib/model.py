"""What a benchmark is, and what it yields."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Row:
    """One figure.

    ``budget`` is the most it may be, or the least where ``at_least``; None where nothing is asked
    of it.  Without ``measured``, ``note`` says why (a failure, or a peer that is not installed).
    """

    name: str
    unit: str
    measured: float | None
    budget: float | None = None
    at_least: bool = False
    note: str = ""

    @property
    def ratio(self) -> float | None:
        """measured / budget."""
        return self.measured / self.budget if self.measured is not None and self.budget else None

    @property
    def verdict(self) -> str:
        if self.measured is None or self.ratio is None:
            return ""
        return "OK" if (self.ratio >= 1 if self.at_least else self.ratio <= 1) else "OVER"


def failed(name: str, unit: str, reason: str) -> Row:
    """The row of a figure that could not be measured."""
    return Row(name, unit, None, note=f"FAILED ({reason})")


@dataclass(frozen=True)
class Context:
    """``seconds`` is how long one measurement lasts, ``rounds`` how often it is repeated."""

    root: Path
    folder: Path
    quick: bool
    say: Callable[[str], None]

    @property
    def seconds(self) -> float:
        return 1.0 if self.quick else 3.0

    @property
    def rounds(self) -> int:
        return 3 if self.quick else 7

    @property
    def dsprobe(self) -> str:
        return str(self.root / ".venv" / "bin" / "dsprobe")


@dataclass(frozen=True)
class Bench:
    """``run`` yields rows as they are known; what it raises becomes a FAILED row."""

    name: str
    about: str
    run: Callable[[Context], Iterator[Row]]
