"""Stacks of processes that use CUDA: their numbers, and the frames behind them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass
from itertools import islice

from dsprobe.recordings import cudastreams as cuda
from dsprobe.recordings.identities import Rereader
from dsprobe.recordings.model import Rows
from dsprobe.recordings.references import last_of_ids
from dsprobe.recordings.session import Session

MAX_DEPTH = 512
"""Frames of one stack that are looked at, from the innermost on."""
MAX_FRAMES = 2_000_000
"""Of all stacks: more are not looked at."""
MAX_WRAPPERS = 8
"""Frames that :func:`wrappers` looks at, from the innermost one of Python on."""
MAX_COMPARED = 2000
"""Stacks that it compares."""
NEARLY_ALL = 0.8


@dataclass(frozen=True)
class Frame:
    """``kind`` is a word of ``cudastreams.FRAME_KINDS``.

    Of a Python frame ``function`` is its qualified name, with ``file`` and ``line``; of a native
    one the demangled symbol or nothing, with ``module``, ``offset`` in it and its ``build_id``; of
    a status a sentence on what is missing there; ``id`` is not above 0 where the session does not
    say even that.
    """

    id: int
    kind: str = "native"
    function: str = ""
    file: str = ""
    line: int = 0
    module: str = ""
    offset: int = 0
    build_id: str = ""

    @property
    def text(self) -> str:
        """The frame in one line: ``function (file:line)``, ``symbol (module)``,
        ``module+0x1234`` or ``[what is missing]``."""
        if self.kind == "status":
            return f"[{self.function or 'unknown'}]"
        if self.kind == "python":
            where = f"{self.file}:{self.line}" if self.line else self.file
            return f"{self.function or '?'} ({where})" if where else self.function or "?"
        module = self.module.rsplit("/", 1)[-1]
        if self.function:
            return f"{self.function} ({module})" if module else self.function
        return f"{module or '?'}+{self.offset:#x}"


class Stacks:
    """The stacks of ``session``; keep one per viewer and :meth:`refresh` it before use."""

    def __init__(self, session: Session) -> None:
        self._rows = Rereader(session, cuda.META_STACK)
        self._frame_rows = Rereader(session, cuda.META_FRAME)
        self._stacks: dict[int, dict[int, int]] = {}
        self._frames: dict[int, Frame] = {}
        self._first: dict[tuple[int, ...], int] = {}
        self._held = 0

    def refresh(self) -> None:
        """Take in what has been said since."""
        for row in last_of_ids(cuda.META_FRAME, self._frame_rows.rows()):
            frame = _frame(row)
            self._frames[frame.id] = frame
        rows = last_of_ids(cuda.META_STACK, self._rows.rows())
        columns = (rows[name].tolist() for name in ("id", "depth", "frame"))
        for id, depth, frame_id in zip(*columns, strict=True):
            if depth < MAX_DEPTH and self._held < MAX_FRAMES:
                stack = self._stacks.setdefault(id, {})
                self._held += depth not in stack
                stack[depth] = frame_id

    def frames(self, id: int) -> tuple[Frame, ...]:
        """Frames of stack ``id``, the innermost first; of one that nobody explains, a status."""
        if not id:
            return (Frame(0, "status", "no stack was taken"),)
        held = self._stacks.get(id)
        if not held:
            return (Frame(-id, "status", f"stack {id} is not explained in this session"),)
        return tuple(self.frame(f) for _, f in sorted(held.items()))

    def every(self) -> Iterator[tuple[Frame, ...]]:
        """The frames of all that are explained."""
        return map(self.frames, list(self._stacks))

    def frame(self, id: int) -> Frame:
        """One frame; a status where nobody explains it."""
        return self._frames.get(id) or Frame(-id, "status", f"frame {id} is not explained here")

    def same(self, id: int) -> int:
        """One number for all stacks that read alike, frame by frame."""
        key = tuple(f for _, f in sorted(self._stacks.get(id, {}).items()))
        return self._first.setdefault(key, id) if key else id


def _frame(row: Rows) -> Frame:
    kind = int(row["kind"])
    return Frame(
        int(row["id"]),
        cuda.FRAME_KINDS[kind] if kind < len(cuda.FRAME_KINDS) else "native",
        str(row["function"]),
        str(row["file"]),
        int(row["line"]),
        str(row["module"]),
        int(row["offset"]),
        str(row["build_id"]),
    )


def wrappers(stacks: Iterable[tuple[Frame, ...]]) -> frozenset[tuple[str, str]]:
    """Functions (name, file) of Python through which nearly all of ``stacks`` reach the driver: a
    binding and what is built around it.  They tell nothing of what was done.

    They are the innermost ones that nearly all share, and, in the same file, those that several
    do.  Stacks without Python have no say.
    """
    paths = {
        tuple((f.function, f.file) for f in frames if f.kind == "python")
        for frames in islice(stacks, MAX_COMPARED)
    } - {()}
    sharing = Counter(path[:n] for path in paths for n in range(1, MAX_WRAPPERS + 1)
                      if n < len(path))  # fmt: skip
    found: set[tuple[str, str]] = set()
    for shared, count in sorted(sharing.items(), key=lambda item: len(item[0])):
        inner = shared[:-1]
        if count < 2 or not found.issuperset(inner):
            continue
        if count >= NEARLY_ALL * len(paths) or (inner and inner[-1][1] == shared[-1][1]):
            found.add(shared[-1])
    return frozenset(found)


def where(
    frames: tuple[Frame, ...], common: Collection[int] = (),
    wrappers: Collection[tuple[str, str]] = (),
) -> Frame:  # fmt: skip
    """The frame to name a stack by: the innermost one of Python, else the innermost with a
    symbol, else the innermost.

    One that is neither in ``wrappers``, as of :func:`wrappers`, nor in ``common`` (ids of frames)
    goes first: what other stacks go through, too, tells nothing of this one.
    """
    telling = tuple(f for f in frames if f.kind != "python" or (f.function, f.file) not in wrappers)
    if wrappers and any(f.kind == "python" for f in telling):
        frames = telling
    for apart in (True, False) if common else (False,):
        for kind in ("python", "native"):
            for frame in frames:
                if frame.kind == kind and frame.function and not (apart and frame.id in common):
                    return frame
    return frames[0]
