"""A part of a recording as a recording of its own."""

from __future__ import annotations

import os
from collections.abc import Collection

import numpy as np

from dsprobe.recordings import streams as st
from dsprobe.recordings.assemble import fit
from dsprobe.recordings.errors import EXIT_USAGE, RecordingError, StoreFull
from dsprobe.recordings.filesession import FileSession
from dsprobe.recordings.model import Rows, Stream
from dsprobe.recordings.references import STATE_KEYS, Needed, is_interned, last_states
from dsprobe.recordings.rollups import LATE_NS
from dsprobe.recordings.writer import Writer


def cut(
    source: FileSession,
    out: str | os.PathLike[str],
    start: int,
    end: int,
    streams: Collection[str] | None = None,
    force: bool = False,
) -> dict[str, int]:
    """Write the rows with ``start <= t < end`` to ``out``; rows written, by stream.

    ``streams`` limits the streams other than ``meta.*``.  Of interned meta rows those are kept
    that a kept row refers to, whenever they were written, and no others; of the rest of
    ``meta.*`` the interval, and the state at its beginning.  Roll-ups are made anew.
    """
    same_file(source.path, out)
    if start >= end:
        raise RecordingError("the part to cut is empty: --from must be before --to", EXIT_USAGE)
    wanted = _wanted(source, streams)
    with WholeWriter(out, force=force) as writer:
        for name in sorted(source.streams):
            if name in wanted or source.streams[name].is_meta:
                writer.declare(source.streams[name])
        copier = _Copier(source, writer, start, end)
        copier.events(wanted)
        copier.meta()
        covers = copier.covers(wanted)
        if covers:
            writer.cover(*covers)
        return copier.written


class WholeWriter(Writer):
    """A writer whose file is removed again where making it fails halfway, as part of a copy is
    worth nothing; raises :class:`RecordingError` where the disk is full."""

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, _: object
    ) -> None:
        try:
            if error is None:
                self.close()
                return
            raise error
        except BaseException as e:
            self.abandon()
            os.unlink(self.path)
            if isinstance(e, StoreFull):
                raise RecordingError(
                    f"{self.path}: {e.why}, so nothing was kept: make room, or name a file on "
                    "another disk"
                ) from None
            if error is None:
                raise


def same_file(source: str, out: str | os.PathLike[str]) -> None:
    """Refuse to write a recording over itself."""
    if os.path.exists(out) and os.path.samefile(source, out):
        raise RecordingError(
            f"{source} cannot be read and replaced at once: name another output", EXIT_USAGE
        )


def is_event(name: str) -> bool:
    """Whether a stream is neither a description nor made from other streams."""
    return not name.startswith(("meta.", "rollup."))


def _wanted(source: FileSession, streams: Collection[str] | None) -> list[str]:
    unknown = set(streams or ()) - set(source.streams)
    if unknown:
        raise RecordingError(
            f"{source.path} has no stream {', '.join(sorted(unknown))}; it has "
            f"{', '.join(sorted(source.streams))}",
            EXIT_USAGE,
        )
    return [name for name in source.streams if is_event(name) and (not streams or name in streams)]


class _Copier:
    def __init__(self, source: FileSession, writer: Writer, start: int, end: int) -> None:
        self.source, self.writer = source, writer
        self.start, self.end = start, end
        self.needed = Needed()
        self.written: dict[str, int] = {}
        self.last = 0
        """``t`` of the last row kept of the wanted streams."""

    def put(self, stream: Stream, rows: Rows) -> None:
        if not len(rows):
            return
        stream = self.source.streams.get(stream.name, stream)
        self.writer.append(stream, fit(stream, rows))
        self.written[stream.name] = self.written.get(stream.name, 0) + len(rows)

    def events(self, names: list[str]) -> None:
        for begin, until in self.source.windows(self.start, self.end):
            for name in names:
                stream = self.source.streams[name]
                rows = self.source.read(name, begin, until)
                self.needed.add(stream, rows)
                self.put(stream, rows)
                if len(rows):
                    self.last = max(self.last, int(rows["t"][-1]))
            self.writer.flush()

    def covers(self, names: list[str]) -> tuple[int, int] | None:
        """The interval that was asked for, as far as the source goes, less an end that rows speak
        for which come after it and so were left out; None where it is all outside."""
        first, last = self.source.span()
        first, last = max(first, self.start), min(last, self.end - 1)
        if not last or first > last:
            return None
        for name in names:
            if "dt" in self.source.streams[name].by_name:
                later = self.source.read(name, self.end, self.end + LATE_NS)
                pairs = zip(later["t"].tolist(), later["dt"].tolist(), strict=True)
                last = min([last, *(t - dt for t, dt in pairs if isinstance(dt, int))])
        return first, max(first, last, self.last)

    def meta(self) -> None:
        interned: dict[str, tuple[Stream, Rows]] = {}
        for name, stream in self.source.streams.items():
            if is_interned(stream):
                interned[name] = (stream, self.source.read(name, 0, 1 << 63))
            elif stream.is_meta:
                rows = self.described(stream)
                self.needed.add(stream, rows)
                self.put(stream, rows)
        for name, rows in self.needed.close(interned).items():
            self.put(interned[name][0], rows)
        self.put(st.META_LOSS, unreported(self.source, self.start, self.end))

    def described(self, stream: Stream) -> Rows:
        rows = self.source.read(stream.name, self.start, self.end)
        if stream.name not in STATE_KEYS:
            return rows
        before = self.source.read(stream.name, 0, self.start)
        states = last_states(before, STATE_KEYS[stream.name])
        rows = np.concatenate([states, rows])
        if not len(rows) and stream.name != st.META_COVERAGE.name:
            # What the host is and how its clocks stand is true of the time before it was said.
            rows = self.source.read(stream.name, 0, 1 << 63)
            rows = rows[rows["t"] == rows["t"][:1]]
        return rows


def unreported(source: FileSession, start: int, end: int) -> Rows:
    """Rows of meta.loss for what damage to ``source`` took from ``[start, end)``."""
    lost = source.unreported(start, end)
    first, last = source.span()
    t = min(max(start, last), end - 1)
    return st.META_LOSS.rows(
        t=np.full(len(lost), max(t, first), np.uint64),
        stream=list(lost),
        reason=[f"missing or damaged in {os.path.basename(source.path)}"] * len(lost),
        lost=list(lost.values()),
    )
