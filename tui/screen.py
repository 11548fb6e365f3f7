"""What a screen is: one of those that the number keys choose.

A screen is computed on one thread and drawn on another.  What it is to show is *asked* for by the
keys as a value that does not change; :meth:`Screen.look` makes a frozen *body* of that and of the
session at the playhead's moment, and :meth:`Screen.draw` writes the body down.  The header, the
bottom line, the playhead, prompts and pages are the same on all and not a screen's business.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Hashable
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from dsprobe.recordings.identities import Identities
from dsprobe.recordings.session import Session
from dsprobe.recordings.stacks import Stacks
from dsprobe.recordings.timeline import SECOND, Timeline, Window
from dsprobe.tui.glyphs import Glyphs
from dsprobe.tui.lines import Line
from dsprobe.tui.player import Marker
from dsprobe.tui.times import Scale

if TYPE_CHECKING:
    from dsprobe.tui.snapshot import Snapshot


@dataclass(frozen=True)
class Moment:
    """Where to look: at ``at``, of a session that holds [begin, end], through ``window``.

    ``who`` and ``stacks`` say what numbers in rows stand for; ``stacks`` has to be refreshed before
    use.
    """

    session: Session
    timeline: Timeline
    scale: Scale
    window: Window
    begin: int
    end: int
    at: int
    who: Identities
    stacks: Stacks
    markers: tuple[Marker, ...]

    @property
    def start(self) -> int:
        """Where what is in view begins: on a whole second as ``at`` is, where columns are
        shorter."""
        start = max(self.window.start, self.begin)
        return min(start - (start % SECOND if self.window.width < SECOND else 0), self.at)


class Body:
    """What one screen shows, frozen; each has its own."""

    @property
    def pending(self) -> bool:
        """Whether another look at the same moment will know more."""
        return False


class Screen(ABC):
    """``id`` is the action that chooses it, ``hints`` its own actions that are used most.
    ``filter`` is what rows have to contain."""

    id: ClassVar[str]
    hints: ClassVar[tuple[str, ...]] = ()
    filter: str = ""

    def columns(self, width: int, rows: int) -> int:
        """How many buckets of time it shows, at least one, in ``rows`` lines of ``width`` cells."""
        del rows
        return max(width, 1)

    @abstractmethod
    def asked(self) -> Hashable:
        """What the keys ask :meth:`look` for."""

    @abstractmethod
    def look(self, asked: Hashable, moment: Moment) -> Body:
        """What to show at ``moment``; ``asked`` is of :meth:`asked`.  On the watcher's thread."""

    @abstractmethod
    def draw(self, snap: Snapshot, glyphs: Glyphs, width: int, rows: int) -> list[Line]:
        """``rows`` lines of ``width`` cells, of a snapshot that may be of another screen."""

    def do(self, action: str, snap: Snapshot | None, rows: int) -> str:
        """Carry out an action that is the screen's own, with ``rows`` lines in view; returns what
        is to be said of it at the bottom, if anything."""
        raise NotImplementedError(action)

    def told(self, snap: Snapshot) -> str:
        """What there is to say of the selected row, for the bottom line; or nothing."""
        del snap
        return ""
