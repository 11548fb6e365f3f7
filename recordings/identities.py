"""Who the numbers in rows of processes that use CUDA stand for.

A meta stream may say of one id several times, each time more: the last row of an id holds
(:func:`dsprobe.recordings.references.last_of_ids`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from typing import Any, TypeVar

import numpy as np

from dsprobe.recordings import cudastreams as cuda
from dsprobe.recordings import streams as st
from dsprobe.recordings.assemble import fit, fits
from dsprobe.recordings.model import Rows, Stream
from dsprobe.recordings.references import last_of_ids
from dsprobe.recordings.session import FOREVER, Session

NEWER = ("late", "seen")
"""Fields that sessions of an older version lack."""
SLACK = 10 * 10**9
"""Rows of a meta stream come in about the order of time: none so long (ns) after a later one."""


@dataclass(frozen=True)
class Process:
    """A process that uses CUDA, as in ``meta.process``; ``pid`` is 0 where nothing is said of it.

    ``ended`` is the moment (ns) it ended, 0 while it lives.  ``python`` is the version of its
    Python, or why its Python stacks cannot be read.  ``late`` is when it was first seen where it
    had used CUDA before: what it allocated until then is not known.  0: all of it is.
    """

    id: int
    pid: int = 0
    ns_pid: int = 0
    parent: int = 0
    uid: int = 0
    ended: int = 0
    comm: str = ""
    command: str = ""
    cgroup: str = ""
    container: str = ""
    pod: str = ""
    library: str = ""
    driver: str = ""
    python: str = ""
    late: int = 0

    @property
    def label(self) -> str:
        """``comm:pid``, or its number where nothing is said of it."""
        return f"{self.comm or 'process'}:{self.pid}" if self.pid else f"process {self.id}"


@dataclass(frozen=True)
class Thread:
    """A thread that called CUDA, as in ``meta.thread``; ``tid`` is 0 where nothing is said."""

    id: int
    process: int = 0
    tid: int = 0
    ns_tid: int = 0
    comm: str = ""

    @property
    def label(self) -> str:
        """``comm:tid``, or its number where nothing is said of it."""
        return f"{self.comm or 'thread'}:{self.tid}" if self.tid else f"thread {self.id}"


T = TypeVar("T", Process, Thread)


class Rereader:
    """The rows of one meta stream that are new since the last look."""

    def __init__(self, session: Session, stream: Stream) -> None:
        self._session, self._stream = session, stream
        self._last = -1
        self._held = (0, 0)  # from when on rows were read last, and how many
        self._whole = False

    def rows(self) -> Rows:
        """New rows, and some that were seen already; none where their fields are others.  Those of
        an older version lack the newest fields, which are 0 then."""
        if self._whole:
            return self._stream.empty()
        # A session at rest holds all it will ever hold.
        self._whole = not self._session.live
        start = max(self._last - SLACK, 0)
        rows = self._session.read(self._stream.name, start, FOREVER)
        if self._held == (start, len(rows)):
            return self._stream.empty()  # nothing has come
        if len(rows):
            self._last = max(self._last, int(rows["t"][-1]))
        # Those that will be read again next time: of the slack before the last one.
        start = max(self._last - SLACK, 0)
        self._held = (start, len(rows) - int(np.searchsorted(rows["t"], start)))
        names = rows.dtype.names or ()
        fields = tuple(f for f in self._stream.fields if f.name in names or f.name not in NEWER)
        known = fits(replace(self._stream, fields=fields), rows)
        return fit(self._stream, rows) if known else self._stream.empty()


class Identities:
    """Names of processes, threads, kernels and functions of ``session``; keep one per viewer and
    :meth:`refresh` it before use."""

    def __init__(self, session: Session) -> None:
        self._processes: dict[int, Process] = {}
        self._first: dict[int, int] = {}
        """When something was first said of a process."""
        self._threads: dict[int, Thread] = {}
        self._kernels: dict[int, str] = {}
        self._texts: dict[int, str] = {}
        self._readers = {
            s.name: Rereader(session, s)
            for s in (cuda.META_PROCESS, cuda.META_THREAD, cuda.META_KERNEL, st.META_STRING)
        }

    def refresh(self) -> None:
        """Take in what has been said since."""
        rows = self._readers[cuda.META_PROCESS.name].rows()
        for id, t, seen in zip(*(rows[n].tolist() for n in ("id", "t", "seen")), strict=True):
            self._first.setdefault(id, seen or t)
        self._processes.update(_made(Process, last_of_ids(cuda.META_PROCESS, rows)))
        self._threads.update(_made(Thread, self._rows(cuda.META_THREAD)))
        for row in self._rows(cuda.META_KERNEL):
            name = str(row["name"]) or f"kernel at {int(row['handle']):#x}"
            self._kernels[int(row["id"])] = name
        rows = self._rows(st.META_STRING)
        self._texts.update(zip(rows["id"].tolist(), map(str, rows["text"]), strict=True))

    def _rows(self, stream: Stream) -> Rows:
        return last_of_ids(stream, self._readers[stream.name].rows())

    @property
    def processes(self) -> Mapping[int, Process]:
        """All that were ever seen, by id."""
        return self._processes

    def process(self, id: int) -> Process:
        return self._processes.get(id) or Process(id)

    def seen(self, id: int) -> int:
        """When process ``id`` was first seen (ns); 0 where nothing is said of it."""
        return self._first.get(id, 0)

    def thread(self, id: int) -> Thread:
        return self._threads.get(id) or Thread(id)

    def kernel(self, id: int) -> str:
        """Name of a kernel, as it is in its module; of one without a name, its handle."""
        return self._kernels.get(id) or (f"kernel {id}" if id else "graph")

    def text(self, id: int) -> str:
        """Name of a driver function; empty for 0, none."""
        return self._texts.get(id) or (f"function {id}" if id else "")


def _made(kind: type[T], rows: Rows) -> dict[int, T]:
    names = [f.name for f in fields(kind)]
    columns: list[list[Any]] = [rows[name].tolist() for name in names]
    return {row[0]: kind(*row) for row in zip(*columns, strict=True)}
