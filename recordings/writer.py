"""Writes recordings.  The contract of the file format, version 1:

* A recording is an MCAP file, profile ``dsprobe``.  A metadata record ``dsprobe.format`` right
  behind the header says ``format`` = ``major.minor``.  Readers take any minor version of a major
  one they know and refuse other major versions.
* Each stream is a channel.  Its schema is the stream's declaration (``Stream.to_json``, schema
  encoding ``dsprobe.stream+json``); its messages are frames (message encoding ``msgpack``, see
  :mod:`dsprobe.recordings.frames`) with ``log_time`` = last and ``publish_time`` = first ``t`` of
  the frame, CLOCK_MONOTONIC ns of the recorded host.  Channel metadata ``max_span_ns`` bounds
  ``log_time - publish_time``, so a reader knows which chunks may hold rows of an interval.
* Schemas and channels stand uncompressed in front of the first chunk that needs them, so a file
  without a summary can be indexed without unpacking; they are repeated inside that chunk, under
  its CRC.
* ``sequence`` counts the frames of a channel from 0, modulo 2**32; a number that is left out is a
  frame that was lost before it reached the file.
* Chunks are zstd frames that state their content size, with a CRC, unpacked mostly under 2 MiB and
  never over 20 MiB; mostly with one frame per stream, in order of arrival.  Rows that come as more
  than that at once, as those of a merge do, go into several chunks.
  Rows arrive in about the order of ``t``.  A chunk is complete on disk when its message indexes
  are; the owner calls :meth:`Writer.flush` twice a second, so a crash loses less than a second.
* ``rollup.lane`` comes in frames of up to 60 s: one chunk a minute holds any.
* At the end: an attachment ``dsprobe.meta`` repeats the frames of the ``meta.*`` streams (8 bytes
  length unpacked, then one zstd frame of message records), a metadata record ``dsprobe.totals``
  gives ``streams`` (JSON: rows, bytes, first, last, missing and dropped per stream) and, where the
  recording ended against the recorder's will, ``stopped``; and, for a part of a recording,
  ``covers`` (two moments: the rows are all there is from the one to the other); then MCAP's data
  end, summary, footer.
* The writer holds an exclusive flock(2) on the file until it is done.  A file without an end and
  without a lock was cut off.
"""

from __future__ import annotations

import errno
import json
import os
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from types import TracebackType
from typing import NoReturn

import numpy as np

from dsprobe.recordings import container as c
from dsprobe.recordings import frames
from dsprobe.recordings import streams as st
from dsprobe.recordings.assemble import Sequences, memory
from dsprobe.recordings.errors import RecordingError, StoreFull
from dsprobe.recordings.frames import Frame
from dsprobe.recordings.framing import chunked, framed
from dsprobe.recordings.index import DEFAULT_SPAN
from dsprobe.recordings.mcapout import ChunkBody, McapOut
from dsprobe.recordings.model import Rows, Stream
from dsprobe.recordings.rollups import Rollups

CHUNK_BYTES = 1 << 20  # of rows in memory: then a chunk is finished without being asked to
LARGE_BYTES = 1 << 17  # of rows in memory: from here on meta rows get a chunk of their own
ROLLUP_SPAN = 60 * 10**9
DIGEST_BYTES = 8 << 20  # of rows of one meta stream; one that outgrows it is not repeated
_FULL = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO}


@dataclass
class _Channel:
    """A stream in the file, and what was written of it."""

    id: int
    stream: Stream
    span: int
    seq: int = 0
    rows: int = 0
    bytes: int = 0
    first: int = 1 << 62
    last: int = 0
    missing: int = 0
    dropped: int = 0

    def count(self, frame: Frame) -> None:
        self.seq = frame.seq + 1
        self.rows += frame.n
        self.bytes += len(frame.data)
        self.first = min(self.first, frame.t0)
        self.last = max(self.last, frame.t1)

    def total(self) -> dict[str, int]:
        names = ("rows", "bytes", "missing", "dropped")
        total = {name: getattr(self, name) for name in names}
        return total | ({"first": self.first, "last": self.last} if self.rows else {})


class Writer:
    """Appends rows to a new recording.

    Refuses to touch an existing path unless ``force``, which replaces a regular file, never a link
    or device; the file belongs to the caller alone (mode 0600), under sudo to who called it.
    Raises :class:`RecordingError` where the file cannot be made, and :class:`StoreFull` from any
    method once the disk takes no more: the file is then readable, finished as far as possible, and
    the writer is closed.
    """

    def __init__(
        self, path: str | os.PathLike[str], *, force: bool = False, rollups: bool = True
    ) -> None:
        self.path = os.fspath(path)
        self._channels: dict[str, _Channel] = {}
        self._pending: dict[str, list[Rows]] = {}
        self._pending_bytes = 0
        self._gaps: dict[str, int] = {}
        self._sequences = Sequences()
        self._digest = _Digest()
        self._rollups = Rollups() if rollups else None
        self._sums: list[Rows] = []
        self._covers = ""
        self._full: StoreFull | None = None
        self._in_file: Counter[str] = Counter()
        """Of the rows that are pending, those that are in the file: by stream."""
        self._out = McapOut(self.path, force)
        version = f"{c.FORMAT_MAJOR}.{c.FORMAT_MINOR}"
        try:
            self._out.begin(_library(), c.FORMAT_RECORD, {"format": version})
        except OSError as e:
            self._out.close()
            os.unlink(self.path)  # nothing is in it yet, not even what it is
            raise RecordingError(f"{self.path}: {os.strerror(e.errno or 0)}") from None

    # -- what the owner calls ------------------------------------------------------------------

    def declare(self, stream: Stream) -> None:
        """Make ``stream`` part of the file even where no row of it comes.

        Another declaration under a name that has one is ignored: rows then go by the first.
        """
        self._check()
        if stream.name in self._channels:
            return
        span = 2 * ROLLUP_SPAN if stream.name == st.ROLLUP_LANE.name else DEFAULT_SPAN
        id = self._out.declare(stream.name, stream.to_json(), {"max_span_ns": str(span)})
        self._channels[stream.name] = _Channel(id, stream, span)

    def write(self, frame: Frame) -> None:
        """Take a frame of a declared stream, or of one this version knows.

        Raises :class:`frames.FrameError` where its bytes are not what it says.
        """
        self._check()
        stream = self._declared(frame.stream)
        rows = frames.decode(stream, frame.data)
        self.append(stream, rows, self._sequences.see(frame.stream, frame.seq))

    def append(self, stream: Stream, rows: Rows, missing: int = 0) -> None:
        """Take rows; ``missing`` frames of the stream were lost just before them."""
        self.declare(stream)
        if missing:
            self._gaps[stream.name] = self._gaps.get(stream.name, 0) + missing
        if not len(rows):
            return
        channel = self._channels[stream.name]
        if rows.dtype != channel.stream.dtype:
            raise frames.FrameError(f"rows of {stream.name} that do not fit its declaration")
        self._pending.setdefault(stream.name, []).append(rows)
        self._pending_bytes += memory(stream, rows)
        if self._rollups and stream.name != st.ROLLUP_LANE.name:
            self._rollups.feed(stream.name, rows)
        if self._pending_bytes > CHUNK_BYTES:
            self._commit()

    def cover(self, first: int, last: int) -> None:
        """Say that the recording speaks for all of ``[first, last]``, quiet times at its ends
        included."""
        self._covers = f"{first} {last}"

    def flush(self) -> None:
        """Finish the chunk: what was taken so far survives a crash of this process.

        Call it where all streams have been fed up to about the same moment: roll-ups of the
        seconds that ended 2 s before it are made here.
        """
        self._check()
        self._take_sums(ROLLUP_SPAN)
        self._commit()

    def close(self, stopped: str = "") -> None:
        """Write the end of the file.  ``stopped`` says why, where the recording should have gone
        on."""
        if self._out.closed:
            return
        if self._rollups:
            self._sums.append(self._rollups.take(all=True))
            self._take_sums(0)
        self._commit()
        try:
            self._finish(stopped)
        except OSError as e:
            self._stop(e)
        self._out.close()

    def abandon(self) -> None:
        """Close without writing anything more; the file reads as cut off."""
        self._out.close()

    @property
    def size(self) -> int:
        """Bytes in the file so far."""
        return self._out.offset

    def __enter__(self) -> Writer:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None
    ) -> None:
        if self._full is None:
            self.close("" if error is None else _reason(error))

    # -- chunks --------------------------------------------------------------------------------

    def _check(self) -> None:
        if self._full is not None:
            raise self._full
        if self._out.closed:
            raise RecordingError(f"{self.path} is closed")

    def _declared(self, name: str) -> Stream:
        if name not in self._channels:
            if name not in st.STREAMS:
                raise frames.FrameError(f"a frame of stream {name[:64]!r}, which nobody declared")
            self.declare(st.STREAMS[name])
        return self._channels[name].stream

    def _take_sums(self, span: int) -> None:
        """Move the roll-ups to the chunk once they cover ``span`` ns."""
        if self._rollups is None:
            return
        self._sums = [s for s in (*self._sums, self._rollups.take()) if len(s)]
        if self._sums and int(self._sums[-1]["t"][-1]) - int(self._sums[0]["t"][0]) >= span:
            self.declare(st.ROLLUP_LANE)
            self._pending.setdefault(st.ROLLUP_LANE.name, []).extend(self._sums)
            self._sums = []

    def _commit(self) -> None:
        """Write what is pending; it counts only once it is in the file."""
        names = list(self._pending)
        if self._pending_bytes > LARGE_BYTES:
            # So that a reader without the copy at the end finds the meta rows without unpacking
            # all the others.
            meta = [name for name in names if self._channels[name].stream.is_meta]
            self._commit_chunk(meta)
            names = [name for name in names if name not in meta]
        self._commit_chunk(names)
        self._pending_bytes = 0

    def _commit_chunk(self, names: Sequence[str]) -> None:
        """Write what is pending of these streams: as a chunk, or as many as it takes."""
        if not names:
            return
        made: list[tuple[Stream, Frame]] = []
        for name in names:
            channel = self._channels[name]
            seq = channel.seq + self._gaps.get(name, 0)
            found = framed(channel.stream, channel.span, seq, self._pending[name])
            made += ((channel.stream, frame) for frame in found)
        for group in chunked(made):
            try:
                body = ChunkBody(self._out.declarations())
                for f in group:
                    body.add(self._channels[f.stream].id, f.seq, f.t0, f.t1, f.data)
                self._out.chunk(body)
            except OSError as e:
                self._stop(e)
            for f in group:
                self._channels[f.stream].count(f)
                self._in_file[f.stream] += f.n
        self._in_file.clear()
        for name in names:
            parts = self._pending.pop(name)
            self._channels[name].missing += self._gaps.pop(name, 0)
            if self._channels[name].stream.is_meta:
                self._digest.add(self._channels[name].stream, parts)

    def _finish(self, stopped: str) -> None:
        body = ChunkBody()
        for name, rows in self._digest.rows().items():
            channel = self._channels[name]
            for frame in framed(channel.stream, 1 << 62, 0, rows):
                body.add(channel.id, frame.seq, frame.t0, frame.t1, frame.data)
        data = body.take()
        digest = b""
        if 0 < len(data) <= c.MAX_CHUNK_BYTES:
            digest = len(data).to_bytes(8, "little") + self._out.compress(data)
        totals = {name: channel.total() for name, channel in self._channels.items()}
        said = {"streams": json.dumps(totals, separators=(",", ":"))}
        if self._rollups and self._rollups.late:
            said["rollup_late_rows"] = str(self._rollups.late)
        if self._covers:
            said["covers"] = self._covers
        if stopped:
            said["stopped"] = stopped
        self._out.finish(digest, c.TOTALS_RECORD, said)

    def _stop(self, error: OSError) -> NoReturn:
        """The disk took no more: count what is lost, try to end the file, and raise."""
        why = os.strerror(error.errno or 0)
        if error.errno not in _FULL:
            self._out.close()
            raise RecordingError(f"{self.path}: {why}") from None
        lost: dict[str, int] = {}
        for name, parts in self._pending.items():
            written = self._in_file[name]
            if name != st.ROLLUP_LANE.name and sum(map(len, parts)) > written:
                lost[name] = self._channels[name].dropped = sum(map(len, parts)) - written
        self._pending = {}
        self._full = StoreFull(
            f"{self.path}: {why}: the recording ends here and can be read; make room and begin a "
            "new file",
            lost,
            why,
        )
        try:
            self._finish(why)
        except OSError:
            pass  # it stays without an end, which readers cope with
        self._out.close()
        raise self._full


class _Digest:
    """The rows of the meta streams, for the copy at the end of the file."""

    def __init__(self) -> None:
        self._held: dict[str, list[Rows]] = {}
        self._bytes: dict[str, int] = {}

    def add(self, stream: Stream, parts: Sequence[Rows]) -> None:
        size = self._bytes.get(stream.name, 0) + sum(memory(stream, p) for p in parts)
        self._bytes[stream.name] = size
        held = self._held.setdefault(stream.name, [])
        if size > DIGEST_BYTES:
            held.clear()
            return
        held.extend(parts)
        if len(held) > 256:
            held[:] = [np.concatenate(held)]

    def rows(self) -> dict[str, list[Rows]]:
        """By stream; nothing at all where one has too many rows, so that a copy is a whole one."""
        whole = max(self._bytes.values(), default=0) <= DIGEST_BYTES
        return self._held if whole else {}


def _reason(error: BaseException) -> str:
    """Why a recording ends that should have gone on; errors with an exit code speak to people."""
    text = str(error)
    return text if hasattr(error, "exit_code") and text else f"{type(error).__name__}: {text}"


def _library() -> str:
    try:
        return f"dsprobe {version('dsprobe')}"
    except PackageNotFoundError:
        return "dsprobe"
