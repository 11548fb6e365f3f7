"""The playhead: where in a session the screen looks, and how it moves.  Pure, with a clock given.

The same motions work on a live session and on a file.  *Live* means following the end of a session
that grows; anything else leaves it, and collection goes on behind the screen's back.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from dsprobe.recordings.timeline import LADDER, MS, SECOND, Window

SPEEDS = (0.125, 0.25, 0.5, 1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 64.0)
SEEK = 5 * SECOND
FAR = 60 * SECOND
SILENT = 2 * SECOND
"""A live session from which nothing has come for longer is behind."""
DEFAULT_WIDTH = LADDER.index(500 * MS)


@dataclass(frozen=True)
class Marker:
    """A moment marked in this viewer or found in the session."""

    t: int
    label: str


class Player:
    """``clock`` gives ns that only ever grow; ``start`` and ``end`` bound what can be looked at.

    ``position`` is always within those bounds.  ``columns`` is the number of buckets in view.
    """

    def __init__(
        self,
        clock: Callable[[], int],
        start: int,
        end: int,
        *,
        growing: bool,
        live: bool,
        speed: float = 1.0,
    ) -> None:
        self._clock = clock
        self._ticked = self._grown = clock()
        self.start, self.end = start, max(start, end)
        self.growing = growing
        self.ended = False  # it was growing, and is not any more
        self.following = growing and live
        self.playing = True
        self.reversed = False
        self.speed = min(max(speed, SPEEDS[0]), SPEEDS[-1])
        self.position = self.end if self.following else self.start
        self.zoom = DEFAULT_WIDTH
        self.columns = 1
        self._first = self.position // self.width
        self._fraction = 0.0  # part of a ns not yet played
        self.own: tuple[Marker, ...] = ()
        self.found: tuple[Marker, ...] = ()

    # -- what it shows ----------------------------------------------------------------------------

    @property
    def width(self) -> int:
        """Bucket width in ns."""
        return LADDER[self.zoom]

    @property
    def behind(self) -> int:
        """How far the position is behind the end of what is held, in ns."""
        return self.end - self.position

    @property
    def silence(self) -> int:
        """For how long nothing has come, where that is longer than it should be; else 0; in ns."""
        passed = self._clock() - self._grown
        return passed if self.growing and passed > SILENT else 0

    @property
    def bucket(self) -> int:
        """Number of the bucket under the cursor: the last whole one, or, where buckets are longer
        than a second, the one the position is in."""
        if self.width > SECOND:
            return max(self.position - 1, self.start) // self.width
        return max(self.position // self.width - 1, self.start // self.width)

    @property
    def markers(self) -> tuple[Marker, ...]:
        """Marked here or found in the session, in order of time."""
        return tuple(sorted(self.own + self.found, key=lambda m: m.t))

    @property
    def cursor(self) -> int:
        """Column of the cursor in the window."""
        return min(max(self.bucket - self.window().first, 0), self.columns - 1)

    def window(self) -> Window:
        """The buckets in view: the cursor is always among them."""
        first = self.bucket - self.columns + 1 if self.following else self._first
        first = min(max(first, self.bucket - self.columns + 1), self.bucket)
        return Window(first, self.columns, self.width)

    # -- what happens to it -----------------------------------------------------------------------

    def extend(self, start: int, end: int, growing: bool | None = None) -> None:
        """The session now holds [start, end]; a position that was dropped moves to the start.

        One that grows no more is not live any more: the playhead stops at its end.
        """
        if self.growing and growing is False:
            self.growing, self.ended = False, True
            if self.following:
                self._hold()
                self.playing = False
        empty = self.end == self.start == 0
        if end > self.end:
            self._grown = self._clock()
        self.start, self.end = start, max(start, end)
        if self.following:
            self.position = self.end
        elif empty:
            self._go(self.start)
        self.position = min(max(self.position, self.start), self.end)

    def resize(self, columns: int) -> None:
        """``columns`` buckets fit on the screen from now on; the right edge stays."""
        columns = max(columns, 1)
        if columns != self.columns:
            last = self._first + self.columns
            self.columns = columns
            self._first = last - columns
            self._settle()

    def tick(self) -> None:
        """Let the time pass that has passed since the last call."""
        now = self._clock()
        passed, self._ticked = max(now - self._ticked, 0), now
        if self.following or not self.playing:
            return
        exact = passed * self.speed + self._fraction
        step = int(exact)
        self._fraction = exact - step
        self._go(self.position + (-step if self.reversed else step))
        at_end = self.position >= self.end and not self.reversed
        if at_end and self.growing:
            self.live()
        elif at_end or (self.reversed and self.position <= self.start):
            self.playing = False

    # -- keys -------------------------------------------------------------------------------------

    def pause(self) -> None:
        """Stop, or go on.  At the end of a file going on starts again."""
        if self.following or self.playing:
            self._hold()
            self.playing = False
            return
        self.playing = True
        if not self.growing:
            if self.position >= self.end and not self.reversed:
                self._go(self.start)
            elif self.position <= self.start and self.reversed:
                self._go(self.end)

    def live(self) -> None:
        """To the end; a growing session is followed from there on."""
        self._go(self.end)
        self.reversed = False
        self.following = self.growing
        self.playing = self.growing

    def to_start(self) -> None:
        """To the oldest moment held."""
        self._hold()
        self._go(self.start)

    def seek(self, step: int) -> None:
        """Move by ``step`` ns, but by no less than one column."""
        self._hold()
        least = self.width if step > 0 else -self.width
        self._go(self.position + (step if abs(step) > self.width else least))

    def step(self, n: int) -> None:
        """Pause, and move by ``n`` whole buckets."""
        self._hold()
        self.playing = False
        w = self.width
        here = self.position // w if n > 0 else -(-self.position // w)
        self._go((here + n) * w)

    def jump(self, t: int) -> bool:
        """Pause at ``t``; False where that is out of what is held (the nearest end is shown)."""
        self._hold()
        self.playing = False
        self._go(t)
        return self.position == t

    def faster(self, n: int) -> None:
        """``n`` notches along :data:`SPEEDS`; leaves live, where there is no speed to choose."""
        nearest = min(range(len(SPEEDS)), key=lambda i: abs(SPEEDS[i] - self.speed))
        self.speed = SPEEDS[min(max(nearest + n, 0), len(SPEEDS) - 1)]
        self._hold()

    def reverse(self) -> None:
        """Play the other way, from here."""
        self._hold()
        self.reversed = not self.reversed
        self.playing = True

    def zoom_by(self, n: int) -> None:
        """``n`` notches along the bucket widths, in where positive; the cursor's column stays."""
        self._rescale(self.zoom - n)

    def fit(self) -> None:
        """The narrowest buckets that show all there is."""
        span = self.end - self.start
        fits = (i for i, w in enumerate(LADDER) if span // w + 2 <= self.columns)
        self._rescale(next(fits, len(LADDER) - 1))
        self._first = self.start // self.width
        self._settle()

    def mark(self, label: str, t: int | None = None) -> Marker:
        """Remember ``t``, or this moment."""
        marker = Marker(self.position if t is None else t, label)
        self.own += (marker,)
        return marker

    def to_marker(self, n: int) -> bool:
        """To the next marker (``n`` = 1) or the one before (-1); False where there is none."""
        if n > 0:
            found = [m.t for m in self.markers if m.t > self.position][:1]
        else:
            found = [m.t for m in self.markers if m.t < self.position][-1:]
        return bool(found) and self.jump(found[0])

    # -- inside -----------------------------------------------------------------------------------

    def _rescale(self, zoom: int) -> None:
        column = self.cursor
        self.zoom = min(max(zoom, 0), len(LADDER) - 1)
        self._first = self.bucket - column
        self._settle()

    def _hold(self) -> None:
        """Leave live with the window where it is."""
        if self.following:
            self._first = self.window().first
            self.following = False
            self.playing = True

    def _go(self, t: int) -> None:
        self.position = min(max(t, self.start), self.end)
        self._settle()

    def _settle(self) -> None:
        """Keep the cursor in view, and no more emptiness than there must be."""
        low = self.start // self.width
        high = max(-(-self.end // self.width) - self.columns, low)
        self._first = min(max(self._first, low), high)
        self._first = min(max(self._first, self.bucket - self.columns + 1), self.bucket)
