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
  never over 20 MiB; each holds at most one frame per stream for most streams, in order of arrival.
  Rows arrive in about the order of ``t``.  A chunk is complete on disk when its message indexes
  are; the owner calls :meth:`Writer.flush` twice a second, so a crash loses less than a second.
* ``rollup.lane`` comes in frames of up to 60 s: one chunk a minute holds any.
* At the end: an attachment ``dsprobe.meta`` repeats the frames of the ``meta.*`` streams (8 bytes
  length unpacked, then one zstd frame of message records), a metadata record ``dsprobe.totals``
  gives ``streams`` (JSON: rows, bytes, first, last, missing and dropped per stream) and, where the
  recording ended against the recorder's will, ``stopped``; then MCAP's data end, summary, footer.
* The writer holds an exclusive flock(2) on the file until it is done.  A file without an end and
  without a lock was cut off.
"""

from __future__ import annotations

import errno
import fcntl
import json
import os
import stat
import zlib
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from types import TracebackType

import numpy as np
import zstandard
from mcap import records as mr
from mcap.data_stream import RecordBuilder
from mcap.opcode import Opcode

from dsprobe.recordings import container as c
from dsprobe.recordings import frames
from dsprobe.recordings import streams as st
from dsprobe.recordings.assemble import Sequences, join, memory
from dsprobe.recordings.errors import RecordingError, StoreFull
from dsprobe.recordings.frames import Frame
from dsprobe.recordings.index import DEFAULT_SPAN
from dsprobe.recordings.model import Rows, Stream
from dsprobe.recordings.rollups import Rollups

CHUNK_BYTES = 1 << 20  # of rows in memory: then a chunk is finished without being asked to
FRAME_BYTES = 4 << 20  # of rows in memory: a frame is split there
ROLLUP_SPAN = 60 * 10**9
DIGEST_BYTES = 8 << 20  # of rows of one meta stream; one that outgrows it is not repeated
LEVEL = 3
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

    def total(self) -> dict[str, int]:
        names = ("rows", "bytes", "missing", "dropped")
        total = {name: getattr(self, name) for name in names}
        return total | ({"first": self.first, "last": self.last} if self.rows else {})


class Writer:
    """Appends rows to a new recording.

    Refuses to touch an existing path unless ``force``, which replaces a regular file, never a link
    or device; the file belongs to the caller alone (mode 0600).  Raises :class:`RecordingError`
    where the file cannot be made, and :class:`StoreFull` from any method once the disk takes no
    more: the file is then readable, finished as far as possible, and the writer is closed.
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
        self._undeclared: list[mr.McapRecord] = []
        self._schemas: list[mr.McapRecord] = []
        self._chunks: list[mr.ChunkIndex] = []
        self._digest: dict[str, list[Rows] | None] = {}
        self._digest_bytes: dict[str, int] = {}
        self._rollups = Rollups() if rollups else None
        self._sums: list[Rows] = []
        self._packer = zstandard.ZstdCompressor(level=LEVEL)
        self._full: StoreFull | None = None
        self._offset = 0
        self._fd = _create(self.path, force)
        try:
            self._put(c.MAGIC + _bytes(mr.Header(c.PROFILE, _library()), _format()))
        except StoreFull:
            os.unlink(self.path)  # nothing is in it yet, not even what it is
            raise

    # -- what the owner calls ------------------------------------------------------------------

    def declare(self, stream: Stream) -> None:
        """Make ``stream`` part of the file even where no row of it comes.

        Another declaration under a name that has one is ignored: rows then go by the first.
        """
        self._check()
        if stream.name in self._channels:
            return
        id = len(self._channels) + 1
        span = 2 * ROLLUP_SPAN if stream.name == st.ROLLUP_LANE.name else DEFAULT_SPAN
        schema = mr.Schema(
            id=id, data=stream.to_json().encode(), encoding=c.SCHEMA_ENCODING, name=stream.name
        )
        channel = mr.Channel(
            id=id,
            topic=stream.name,
            message_encoding=c.MESSAGE_ENCODING,
            metadata={"max_span_ns": str(span)},
            schema_id=id,
        )
        self._channels[stream.name] = _Channel(id, stream, span)
        self._schemas += (schema, channel)
        self._undeclared += (schema, channel)

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
        if self._fd < 0:
            return
        if self._rollups:
            self._sums.append(self._rollups.take(all=True))
            self._take_sums(0)
        self._commit()
        self._put(self._ending(stopped))
        self._release()

    def abandon(self) -> None:
        """Close without writing anything more; the file reads as cut off."""
        self._release()

    @property
    def size(self) -> int:
        """Bytes in the file so far."""
        return self._offset

    def __enter__(self) -> Writer:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None
    ) -> None:
        if self._full is None:
            self.close("" if kind is None else f"{kind.__name__}: {error}")

    # -- chunks --------------------------------------------------------------------------------

    def _check(self) -> None:
        if self._full is not None:
            raise self._full
        if self._fd < 0:
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
        """Write what is pending as one chunk; it counts only once it is in the file."""
        if not self._pending:
            return
        declared = b""
        if self._undeclared:
            declared = _bytes(*self._undeclared)
            self._put(declared)
            self._undeclared = []
        body = RecordBuilder()
        body.write(declared)
        index: dict[int, mr.MessageIndex] = {}
        taken: list[tuple[_Channel, Frame]] = []
        for name, parts in self._pending.items():
            channel = self._channels[name]
            channel_index = mr.MessageIndex(channel_id=channel.id, records=[])
            index[channel.id] = channel_index
            seq = channel.seq + self._gaps.get(name, 0)
            for frame in _frames(channel, seq, parts):
                channel_index.records.append((frame.t1, body.count))
                mr.Message(
                    channel_id=channel.id,
                    log_time=frame.t1,
                    data=frame.data,
                    publish_time=frame.t0,
                    sequence=frame.seq & 0xFFFFFFFF,
                ).write(body)
                taken.append((channel, frame))
        self._put_chunk(_end(body), index, taken)
        for channel, frame in taken:
            channel.seq = frame.seq + 1
            channel.rows += frame.n
            channel.bytes += len(frame.data)
            channel.first = min(channel.first, frame.t0)
            channel.last = max(channel.last, frame.t1)
        for name, parts in self._pending.items():
            self._channels[name].missing += self._gaps.pop(name, 0)
            if self._channels[name].stream.is_meta:
                self._remember(name, parts)
        self._pending, self._pending_bytes = {}, 0

    def _put_chunk(
        self, data: bytes, index: dict[int, mr.MessageIndex], taken: list[tuple[_Channel, Frame]]
    ) -> None:
        ends = [frame.t1 for _, frame in taken]
        chunk = mr.Chunk(
            compression="zstd",
            data=self._packer.compress(data),
            message_start_time=min(ends),
            message_end_time=max(ends),
            uncompressed_crc=zlib.crc32(data),
            uncompressed_size=len(data),
        )
        out = RecordBuilder()
        chunk.write(out)
        length = out.count
        offsets = {}
        for id, entry in index.items():
            offsets[id] = self._offset + out.count
            entry.write(out)
        where = mr.ChunkIndex(
            message_start_time=chunk.message_start_time,
            message_end_time=chunk.message_end_time,
            chunk_start_offset=self._offset,
            chunk_length=length,
            message_index_offsets=offsets,
            message_index_length=out.count - length,
            compression=chunk.compression,
            compressed_size=len(chunk.data),
            uncompressed_size=chunk.uncompressed_size,
        )
        self._put(_end(out))
        self._chunks.append(where)

    def _remember(self, name: str, parts: list[Rows]) -> None:
        """Keep rows of a meta stream for the digest."""
        held = self._digest.setdefault(name, [])
        if held is None:
            return
        held.extend(parts)
        stream = self._channels[name].stream
        size = self._digest_bytes.get(name, 0) + sum(memory(stream, p) for p in parts)
        self._digest_bytes[name] = size
        if size > DIGEST_BYTES:
            self._digest[name] = None
        elif len(held) > 256:
            held[:] = [np.concatenate(held)]

    # -- the end of the file -------------------------------------------------------------------

    def _ending(self, stopped: str) -> bytes:
        """Everything behind the last chunk."""
        start = self._offset
        out = RecordBuilder()
        summary = RecordBuilder()
        tail: list[mr.McapRecord] = []
        if self._undeclared:
            out.write(_bytes(*self._undeclared))
        digest = self._pack_digest()
        if digest:
            at = out.count
            mr.Attachment(0, 0, c.DIGEST, "application/octet-stream", digest).write(out)
            tail.append(
                mr.AttachmentIndex(
                    start + at, out.count - at, 0, 0, len(digest), c.DIGEST,
                    "application/octet-stream",
                )
            )  # fmt: skip
        at = out.count
        totals = {name: ch.total() for name, ch in self._channels.items()}
        said = {"streams": json.dumps(totals, separators=(",", ":"))}
        if self._rollups and self._rollups.late:
            said["rollup_late_rows"] = str(self._rollups.late)
        if stopped:
            said["stopped"] = stopped
        mr.Metadata(c.TOTALS_RECORD, said).write(out)
        # The format record stands right behind the header, whose length is that of its strings.
        format_at = len(c.MAGIC) + len(_bytes(mr.Header(c.PROFILE, _library())))
        tail += [
            mr.MetadataIndex(format_at, len(_bytes(_format())), c.FORMAT_RECORD),
            mr.MetadataIndex(start + at, out.count - at, c.TOTALS_RECORD),
        ]
        mr.DataEnd(0).write(out)
        groups = (
            (Opcode.SCHEMA, [r for r in self._schemas if isinstance(r, mr.Schema)]),
            (Opcode.CHANNEL, [r for r in self._schemas if isinstance(r, mr.Channel)]),
            (Opcode.STATISTICS, [self._statistics(bool(digest))]),
            (Opcode.CHUNK_INDEX, self._chunks),
            (Opcode.ATTACHMENT_INDEX, tail[:-2]),
            (Opcode.METADATA_INDEX, tail[-2:]),
        )
        summary_start = start + out.count
        offsets = []
        for opcode, group in groups:
            begin = summary.count
            for record in group:
                record.write(summary)
            if summary.count > begin:
                offsets.append(
                    mr.SummaryOffset(opcode, summary_start + begin, summary.count - begin)
                )
        offsets_start = summary_start + summary.count
        for offset in offsets:
            offset.write(summary)
        data = _end(summary)
        head = c.HEAD.pack(c.FOOTER, 20) + summary_start.to_bytes(8, "little")
        crc = zlib.crc32(head + offsets_start.to_bytes(8, "little"), zlib.crc32(data))
        end = _bytes(mr.Footer(summary_start, offsets_start, crc)) + c.MAGIC
        return _end(out) + data + end

    def _pack_digest(self) -> bytes:
        """The rows of all meta streams that were small enough, as compressed message records."""
        body = RecordBuilder()
        for name, held in self._digest.items():
            channel = self._channels[name]
            if not held:
                continue
            for frame in _frames(_Channel(channel.id, channel.stream, 1 << 62), 0, held):
                mr.Message(channel.id, frame.t1, frame.data, frame.t0, frame.seq).write(body)
        data = _end(body)
        if len(data) > c.MAX_CHUNK_BYTES or None in self._digest.values():
            return b""
        return len(data).to_bytes(8, "little") + self._packer.compress(data)

    def _statistics(self, digest: bool) -> mr.Statistics:
        counts = {ch.id: ch.seq - ch.missing for ch in self._channels.values() if ch.rows}
        return mr.Statistics(
            attachment_count=int(digest),
            channel_count=len(self._channels),
            channel_message_counts=counts,
            chunk_count=len(self._chunks),
            message_count=sum(counts.values()),
            metadata_count=2,
            message_start_time=min((k.message_start_time for k in self._chunks), default=0),
            message_end_time=max((k.message_end_time for k in self._chunks), default=0),
            schema_count=len(self._channels),
        )

    # -- bytes ---------------------------------------------------------------------------------

    def _put(self, data: bytes) -> None:
        """Append all of ``data``, or nothing of it and raise :class:`StoreFull`."""
        try:
            self._write_all(data)
        except OSError as e:
            if e.errno not in _FULL:
                self._release()
                raise RecordingError(f"{self.path}: {os.strerror(e.errno or 0)}") from None
            self._stop(os.strerror(e.errno))

    def _write_all(self, data: bytes) -> None:
        view = memoryview(data)
        try:
            at = 0
            while at < len(view):
                at += os.pwrite(self._fd, view[at:], self._offset + at)
        except OSError:
            os.ftruncate(self._fd, self._offset)
            raise
        self._offset += len(view)

    def _stop(self, why: str) -> None:
        """The disk is full: count what is lost, try to end the file, and raise."""
        lost: dict[str, int] = {}
        for name, parts in self._pending.items():
            if name != st.ROLLUP_LANE.name:
                lost[name] = self._channels[name].dropped = sum(map(len, parts))
        self._full = StoreFull(
            f"{self.path}: {why}: the recording ends here and can be read; make room and record "
            "into a new file",
            lost,
        )
        self._pending = {}
        try:
            self._write_all(self._ending(why))
        except OSError:
            pass  # it stays without an end, which readers cope with
        self._release()
        raise self._full

    def _release(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)  # and with it the lock
            self._fd = -1


def _frames(channel: _Channel, seq: int, parts: list[Rows]) -> list[Frame]:
    """``parts`` as frames numbered from ``seq``, none of them too long in time or in bytes."""
    stream = channel.stream
    rows = parts[0] if len(parts) == 1 else np.concatenate(parts)
    t = rows["t"].astype(np.int64)
    if int(t.max()) - int(t.min()) > channel.span:
        rows = join(stream, [rows])
        t = rows["t"].astype(np.int64)
    made = []
    most = max(1, min(FRAME_BYTES * len(rows) // (memory(stream, rows) + 1), 1 << 18))
    at = 0
    while at < len(rows):
        end = min(at + most, len(rows))
        if int(t[at:end].max()) - int(t[at:end].min()) > channel.span:
            end = int(np.searchsorted(t, t[at] + channel.span, "right"))
            end = min(end, at + most)
        part = rows[at:end]
        data = frames.encode(stream, part, frames.PLANES)
        times = t[at:end]
        made.append(
            Frame(stream.name, seq + len(made), int(times.min()), int(times.max()), end - at, data)
        )
        at = end
    return made


def _create(path: str, force: bool) -> int:
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
    try:
        if force and os.path.lexists(path):
            if not stat.S_ISREG(os.lstat(path).st_mode):
                raise RecordingError(f"{path} is not a plain file: name another one")
            os.unlink(path)
        fd = os.open(path, flags, 0o600)
    except FileExistsError:
        raise RecordingError(f"{path} exists: name another file, or use --force") from None
    except OSError as e:
        raise RecordingError(f"{path}: {os.strerror(e.errno or 0)}") from None
    fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    return fd


def _library() -> str:
    try:
        return f"dsprobe {version('dsprobe')}"
    except PackageNotFoundError:
        return "dsprobe"


def _format() -> mr.Metadata:
    return mr.Metadata(c.FORMAT_RECORD, {"format": f"{c.FORMAT_MAJOR}.{c.FORMAT_MINOR}"})


def _bytes(*records: mr.McapRecord) -> bytes:
    out = RecordBuilder()
    for record in records:
        record.write(out)
    return _end(out)


def _end(out: RecordBuilder) -> bytes:
    data: bytes = out.end()  # type: ignore[no-untyped-call]
    return data
