"""A recording file as a session: random access by chunk, tolerant of any damage.

Reading is lazy: opening takes the index only, a read unpacks the chunks that may hold the rows
asked for, and a bounded cache keeps what was unpacked last.  A chunk that is damaged is left out
and named in ``problems``; nothing that a file holds makes reading raise.  A file that a recorder
still writes (it holds a lock on it) is ``live`` and grows with ``refresh()``.
"""

from __future__ import annotations

import fcntl
import os
import stat
from collections.abc import Iterator, Mapping
from typing import NamedTuple

import numpy as np

from dsprobe.recordings import container as c
from dsprobe.recordings import frames, spans
from dsprobe.recordings import streams as st
from dsprobe.recordings.assemble import Sequences, between, join, memory
from dsprobe.recordings.chunks import Chunk, Chunks
from dsprobe.recordings.errors import RecordingError
from dsprobe.recordings.index import File, Layout, load_summary, scan
from dsprobe.recordings.model import Field, Rows, Stream

META_BYTES = 32 << 20
BLOCK_BYTES = 1 << 20  # packed bytes of chunks that one step of blocks() spans
BLOCK_CHUNKS = 64  # the same: packed, rows that are much alike take next to nothing

_UNKNOWN = Stream("", "", "", (Field("t", "<u8", "ns", "CLOCK_MONOTONIC"),))


class Total(NamedTuple):
    """What a recording holds of one stream; ``bytes`` are those of its frames, unpacked."""

    rows: int
    bytes: int


class FileSession:
    """A recording file; see :class:`dsprobe.recordings.session.Session`."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = os.fspath(path)
        self._fd = _open(self.path)
        try:
            self._file = File(self._fd)
            self._missing: dict[str, int] | None = None
            self._declared: set[int] = set()
            self._meta: dict[int, list[Rows]] = {}
            self._meta_done, self._meta_bytes = 0, 0
            self._chunks = Chunks(self._file, Layout(self.path))
            self._load()
            self._check_profile()
        except BaseException:
            os.close(self._fd)
            raise

    def _load(self) -> None:
        if not load_summary(self._file, self._layout):
            self._chunks.layout = Layout(self.path)
            scan(self._file, self._layout)
            self._find_declarations()
            if self._layout.ended:
                self._layout.problem("the index is damaged; the file was read by walking through")
        else:
            self._load_digest()

    @property
    def _layout(self) -> Layout:
        return self._chunks.layout

    def _check_profile(self) -> None:
        lay = self._layout
        if self._file.error and not lay.channels:
            raise RecordingError(f"{self.path} cannot be read: {self._file.error}")
        if lay.profile == c.PROFILE or lay.channels:
            if lay.profile != c.PROFILE:
                lay.problem("the head of the file is damaged")
        elif lay.profile is not None:
            raise RecordingError(
                f"{self.path} is an MCAP file, but not one that dsprobe wrote "
                f"(profile {lay.profile[:40]!r}): give a file made by dsprobe record or save"
            )
        elif not c.MAGIC.startswith(self._file.read(0, len(c.MAGIC))):
            raise RecordingError(
                f"{self.path} is not a recording: give a file made by dsprobe record or save"
            )
        elif self._file.size() > self._layout.resume:
            lay.problem("the head of the file is damaged and nothing readable follows it")

    def _find_declarations(self) -> None:
        """Declarations stand at the head of the file, and again under the checksum of the chunk
        that first needs one: without a summary, look there."""
        table = self._layout.table
        new = set(table.channel_ids()) - self._declared
        for n in {int(table.holding(channel)[0]) for channel in new}:
            self._chunks.get(n)
        for n in sorted(table.unlisted)[:64]:
            self._chunks.get(n)
        self._declared |= new

    # -- what a session offers ---------------------------------------------------------------

    @property
    def live(self) -> bool:
        """Whether a recorder has the file open; it is then not truncated, only unfinished."""
        return not self._layout.ended and self._locked()

    def _locked(self) -> bool:
        if self._fd < 0:
            return False
        try:
            fcntl.flock(self._fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
            fcntl.flock(self._fd, fcntl.LOCK_UN)
        except OSError:
            return True
        return False

    @property
    def name(self) -> str:
        return self.path

    @property
    def streams(self) -> Mapping[str, Stream]:
        return {s.name: s for s in self._layout.channels.values()}

    @property
    def truncated(self) -> bool:
        """Whether the file has no end and nobody is writing it any more."""
        return not self._layout.ended and not self.live

    @property
    def format(self) -> tuple[int, int] | None:
        return self._layout.format

    @property
    def library(self) -> str:
        """Which program wrote it, as that said itself."""
        return self._layout.library[:64]

    @property
    def problems(self) -> tuple[str, ...]:
        said = list(self._layout.problems)
        if self._layout.more_problems:
            said.append(f"{self._layout.more_problems} more problems of these kinds")
        if self.truncated:
            said.insert(0, "the file has no end: its recorder was stopped before it could finish")
        if self._file.error:
            said.append(f"a part of the file cannot be read: {self._file.error}")
        if self._layout.stopped:
            said.append(f"the recording ended early: {self._layout.stopped}")
        return tuple(said)

    def refresh(self) -> bool:
        layout = self._layout
        if layout.ended or self._file.size() <= layout.resume:
            return False
        before = len(layout.table), layout.resume
        if load_summary(self._file, fresh := Layout(self.path)):
            layout = self._chunks.layout = fresh
            self._meta, self._meta_done, self._meta_bytes = {}, 0, 0
            self._load_digest()
        else:
            scan(self._file, layout)
            self._find_declarations()
            # Its last records may be being written at this moment: then look again next time.
            layout.ended = layout.ended and not self._locked()
        return before != (len(layout.table), layout.resume)

    def span(self) -> tuple[int, int]:
        said = [s for s in (spans.of_rows(self._chunks), self._layout.covers) if s[1]]
        if said:
            return min(first for first, _ in said), max(last for _, last in said)
        # Nothing has happened at all: from the first sign of life of the agent to the last.
        lived = self.read(st.META_CLOCK.name, 0, 1 << 63)["t"]
        return (int(lived[0]), int(lived[-1])) if len(lived) else (0, 0)

    def read(self, stream: str, start: int, end: int) -> Rows:
        channel, declared = self._channel(stream)
        if declared is None:
            return st.STREAMS.get(stream, _UNKNOWN).empty()
        if declared.is_meta and self._take_meta():
            parts = self._meta.get(channel, [])
            if len(parts) > 1:
                parts[:] = [join(declared, parts)]
            return between(parts[0], start, end) if parts else declared.empty()
        span = self._layout.spans[channel]
        found = self._layout.table.find(channel, start, end, span).tolist()
        return join(declared, [between(self._chunks.rows(n, channel), start, end) for n in found])

    def lost(self) -> Mapping[str, int]:
        """See the protocol.  A lost frame whose rows nobody counted counts as one row, so the
        numbers say "at least"."""
        counted = self._reported()
        names = {*counted, *self._layout.totals, *(self._missing or ())}
        lost = {}
        for name in sorted(names):
            total = self._layout.totals.get(name, {})
            missing = (self._missing or {}).get(name, total.get("missing", 0))
            # Whoever dropped frames in front of the file has normally said so in meta.loss.
            lost[name] = max(counted.get(name, 0), missing) + total.get("dropped", 0)
        for (_, channel), frames_lost in self._chunks.lost.items() if self._missing is None else ():
            if channel in self._layout.channels:
                name = self._layout.channels[channel].name
                lost[name] = lost.get(name, 0) + frames_lost
        return {name: n for name, n in lost.items() if n}

    def _reported(self) -> dict[str, int]:
        rows = self.read(st.META_LOSS.name, 0, 1 << 63)
        if not {"stream", "lost"} <= set(rows.dtype.names or ()):
            return {}
        return {
            name: int(rows["lost"][rows["stream"] == name].sum(dtype=np.uint64))
            for name in dict.fromkeys(rows["stream"].tolist())
        }

    def close(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = self._file.fd = -1

    def __enter__(self) -> FileSession:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # -- for whoever reads all of it -----------------------------------------------------------

    def windows(self, start: int, end: int) -> Iterator[tuple[int, int]]:
        """Cut ``[start, end)`` into intervals of some tens of megabytes of rows at most."""
        table = self._layout.table.chunks
        table = table[np.argsort(table[:, 3], kind="stable")]
        at, packed, chunks = start, 0, 0
        for length, last in table[:, [1, 3]].tolist():
            packed, chunks = packed + length, chunks + 1
            if (packed >= BLOCK_BYTES or chunks >= BLOCK_CHUNKS) and at < last < end:
                yield at, last
                at, packed, chunks = last, 0, 0
        if at < end:
            yield at, end

    def blocks(self, stream: str, start: int, end: int) -> Iterator[Rows]:
        """All that :meth:`read` would give, in order, in pieces of a few megabytes."""
        for begin, until in self.windows(start, end):
            yield self.read(stream, begin, until)

    def unreported(self, start: int, end: int) -> dict[str, int]:
        """Rows lost in ``[start, end)``, by stream, that no row of meta.loss tells of: at least."""
        first, last = self.span()
        if start <= first and end > last:
            told = self._reported()
            missing = {name: n - told.get(name, 0) for name, n in self.lost().items()}
            return {name: n for name, n in missing.items() if n > 0}
        times = {offset: (a, b) for offset, _, a, b in self._layout.table.chunks.tolist()}
        found: dict[str, int] = {}
        for (offset, channel), n in self._chunks.lost.items():
            stream = self._layout.channels.get(channel)
            if stream and times[offset][1] >= start and times[offset][0] < end:
                found[stream.name] = found.get(stream.name, 0) + n
        return found

    def totals(self) -> dict[str, Total]:
        """Rows and bytes by stream; reads the whole file where its recorder left no sums."""
        if self._layout.totals:
            return {
                name: Total(t.get("rows", 0), t.get("bytes", 0))
                for name, t in self._layout.totals.items()
            }
        found = {s.name: Total(0, 0) for s in self._layout.channels.values()}
        sequences = Sequences()
        for n in range(len(self._layout.table)):
            payload, by_channel = self._chunks.get(n) or Chunk(b"", {})
            for channel, messages in by_channel.items():
                if channel in self._layout.channels:
                    name = self._layout.channels[channel].name
                    for m in messages:
                        found[name] = _plus(found.get(name, Total(0, 0)), payload[m.start : m.end])
                        sequences.see(name, m.sequence, 32)
        self._missing = sequences.missing
        return found

    def verify(self) -> bool:
        """Unpack every chunk and frame; whether all are sound (``problems`` says what is not)."""
        for n in range(len(self._layout.table)):
            chunk = self._chunks.get(n)
            for channel in chunk.messages if chunk else ():
                if channel in self._layout.channels:
                    self._chunks.rows(n, channel)
        return not self.problems

    def _channel(self, name: str) -> tuple[int, Stream | None]:
        for id, stream in self._layout.channels.items():
            if stream.name == name:
                return id, stream
        return -1, None

    # -- meta streams --------------------------------------------------------------------------

    def _load_digest(self) -> None:
        """The recorder repeats all meta rows in one place, so that no chunk need be unpacked."""
        if self._layout.digest is None:
            return
        offset, length = self._layout.digest
        try:
            if length > c.MAX_CHUNK_BYTES:
                raise c.Damaged("too long")
            record = self._file.read(offset, length)
            _, data = c.attachment(record[c.HEAD.size :])
            size = int.from_bytes(data[:8], "little")
            payload = c.unpack(data[8:], size)
            self._add_meta(payload, c.messages(payload))
        except (c.Damaged, frames.FrameError):
            self._meta.clear()
            self._layout.problem("the copy of the meta streams is damaged; the chunks were used")
            return
        self._meta_done = len(self._layout.table)

    def _add_meta(self, payload: bytes, messages: dict[int, list[c.Message]]) -> None:
        for channel, found in messages.items():
            stream = self._layout.channels.get(channel)
            if stream is None or not stream.is_meta:
                continue
            for m in found:
                rows = frames.decode(stream, payload[m.start : m.end])
                self._meta_bytes += memory(stream, rows)
                self._meta.setdefault(channel, []).append(rows)

    def _take_meta(self) -> bool:
        """Collect the meta rows of chunks not seen yet; False where they are too many to hold."""
        table = self._layout.table
        if self._meta_done < len(table) and self._meta_bytes <= META_BYTES:
            meta = {ch for ch, s in self._layout.channels.items() if s.is_meta}
            chunks = {n for ch in meta for n in table.holding(ch).tolist()}
            for n in sorted(n for n in chunks if n >= self._meta_done):
                self._collect(n, meta)
                if self._meta_bytes > META_BYTES:
                    break
            self._meta_done = len(table)
        if self._meta_bytes > META_BYTES:
            self._meta.clear()
            return False
        return True

    def _collect(self, n: int, meta: set[int]) -> None:
        chunk = self._chunks.get(n)
        for channel in meta.intersection(chunk.messages) if chunk else ():
            rows = self._chunks.rows(n, channel)
            self._meta_bytes += memory(self._layout.channels[channel], rows)
            self._meta.setdefault(channel, []).append(rows)


def open_file(path: str | os.PathLike[str]) -> FileSession:
    """Open a recording, whole or damaged; raises :class:`RecordingError` where it is none."""
    return FileSession(path)


def _open(path: str) -> int:
    try:
        # O_NONBLOCK so that opening a named pipe does not wait for its other end.
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    except OSError as e:
        raise RecordingError(f"{path}: {os.strerror(e.errno or 0)}") from None
    if not stat.S_ISREG(os.fstat(fd).st_mode):
        os.close(fd)
        raise RecordingError(f"{path} is not a file: give a file made by dsprobe record or save")
    return fd


def _plus(total: Total, data: bytes) -> Total:
    try:
        return Total(total.rows + frames.count(data), total.bytes + len(data))
    except frames.FrameError:
        return total
