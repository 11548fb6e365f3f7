"""Frames of stacks, each once: rows of meta.frame and meta.stack."""

from __future__ import annotations

from collections.abc import Sequence

from dsprobe.recordings.cudastreams import FRAME_KINDS, META_FRAME, META_STACK
from dsprobe.recordings.model import Rows

LIMIT = 200_000
"""Different frames of one session."""
MAX_TEXT = 64 << 20
"""Characters of all of them."""
MAX_SENTENCES = 2_000
"""Different status frames: these fit when the others do not any more."""
PYTHON, NATIVE, STATUS = (FRAME_KINDS.index(k) for k in ("python", "native", "status"))

Frame = tuple[int, str, str, int, str, int, str]
"""kind, function, file, line, module, offset, build id: as meta.frame has them."""


def status(sentence: str) -> Frame:
    """A frame that says what is missing."""
    return (STATUS, sentence, "", 0, "", 0, "")


class FrameTable:
    """Numbers of frames, which are never used again, and the rows that tell of new ones."""

    def __init__(self, limit: int = LIMIT) -> None:
        self.refused = 0
        """Frames that found no room, and are said to be so."""
        self._limit = limit
        self._text = self._sentences = 0
        self._ids: dict[Frame, int] = {}
        self._frames: list[tuple[int, int, Frame]] = []
        self._stacks: list[tuple[int, int, int, int]] = []

    def frame(self, t: int, frame: Frame) -> int:
        """Number of ``frame``."""
        found = self._ids.get(frame)
        if found is None:
            last = status(f"not kept: more than {self._limit:,} frames")
            if frame != last and not self._has_room(frame):
                self.refused += 1
                return self.frame(t, last)
            found = self._ids[frame] = len(self._ids) + 1
            self._frames.append((t, found, frame))
        return found

    def _has_room(self, frame: Frame) -> bool:
        """Takes it, too."""
        if frame[0] == STATUS:
            self._sentences += 1
            return self._sentences <= MAX_SENTENCES
        self._text += sum(len(x) for x in frame if isinstance(x, str))
        return len(self._ids) < self._limit and self._text <= MAX_TEXT

    def stack(self, t: int, id: int, frames: Sequence[int]) -> None:
        """Stack ``id`` has these frames, innermost first."""
        self._stacks.extend((t, id, depth, frame) for depth, frame in enumerate(frames))

    def rows(self) -> tuple[Rows, Rows]:
        """Of meta.frame and meta.stack, since the last call."""
        frames = META_FRAME.empty(len(self._frames))
        for i, (t, number, frame) in enumerate(self._frames):
            frames[i] = (t, number, *frame)
        stacks = META_STACK.empty(len(self._stacks))
        if self._stacks:
            for name, column in zip(META_STACK.dtype.names or (), zip(*self._stacks, strict=True),
                                    strict=True):  # fmt: skip
                stacks[name] = column
        self._frames, self._stacks = [], []
        return frames, stacks
