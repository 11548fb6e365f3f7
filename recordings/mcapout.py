"""An MCAP file being written: whole records or none of them, and an end with all indexes.

What goes into the records is the business of :mod:`dsprobe.recordings.writer`; their encoding is
that of the ``mcap`` package.
"""

from __future__ import annotations

import fcntl
import os
import stat
import zlib
from collections.abc import Iterable, Mapping

import zstandard
from mcap import records as mr
from mcap.data_stream import RecordBuilder
from mcap.opcode import Opcode

from dsprobe.recordings import container as c
from dsprobe.recordings.errors import RecordingError
from dsprobe.recordings.owner import give

LEVEL = 3
_BINARY = "application/octet-stream"


class ChunkBody:
    """The records of a chunk to be: declarations, then messages."""

    def __init__(self, declarations: bytes = b"") -> None:
        self._out = RecordBuilder()
        self._out.write(declarations)
        self._index: dict[int, mr.MessageIndex] = {}
        self.first, self.last = 1 << 62, 0
        """Range of the log times."""

    def add(self, channel: int, sequence: int, t0: int, t1: int, data: bytes) -> None:
        if channel not in self._index:
            self._index[channel] = mr.MessageIndex(channel_id=channel, records=[])
        self._index[channel].records.append((t1, self._out.count))
        mr.Message(
            channel_id=channel,
            log_time=t1,
            data=data,
            publish_time=t0,
            sequence=sequence & 0xFFFFFFFF,
        ).write(self._out)
        self.first, self.last = min(self.first, t1), max(self.last, t1)

    @property
    def counts(self) -> dict[int, int]:
        """Number of messages by channel."""
        return {id: len(entry.records) for id, entry in self._index.items()}

    @property
    def index(self) -> Iterable[mr.MessageIndex]:
        return self._index.values()

    def take(self) -> bytes:
        """The bytes; the body is empty after that."""
        return end(self._out)


class McapOut:
    """The file at ``path``, locked as long as it is open.  Methods that write raise ``OSError``
    after taking back what they had written of the record at hand."""

    def __init__(self, path: str, force: bool) -> None:
        self._fd = create(path, force)
        self._packer = zstandard.ZstdCompressor(level=LEVEL)
        self._schemas: list[mr.Schema] = []
        self._channels: list[mr.Channel] = []
        self._chunks = bytearray()
        self._chunk_count = 0
        self._first, self._last = 1 << 62, 0
        self._counts: dict[int, int] = {}
        self._metadata: list[mr.MetadataIndex] = []
        self._undeclared: list[mr.McapRecord] = []
        self.offset = 0
        """Bytes in the file."""

    @property
    def closed(self) -> bool:
        return self._fd < 0

    def close(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)  # and with it the lock
            self._fd = -1

    def begin(self, library: str, name: str, metadata: Mapping[str, str]) -> None:
        """Magic, header and one metadata record."""
        head = c.MAGIC + pack(mr.Header(c.PROFILE, library))
        record = pack(mr.Metadata(name, dict(metadata)))
        self._metadata.append(mr.MetadataIndex(len(head), len(record), name))
        self._append(head + record)

    def declare(self, name: str, schema: str, metadata: Mapping[str, str]) -> int:
        """Register a channel, to be written in front of the next chunk; its id, from 1."""
        id = len(self._channels) + 1
        self._schemas.append(
            mr.Schema(id=id, data=schema.encode(), encoding=c.SCHEMA_ENCODING, name=name)
        )
        self._channels.append(
            mr.Channel(
                id=id,
                topic=name,
                message_encoding=c.MESSAGE_ENCODING,
                metadata=dict(metadata),
                schema_id=id,
            )
        )
        self._undeclared += (self._schemas[-1], self._channels[-1])
        return id

    def declarations(self) -> bytes:
        """Write what was declared since the last call, and give it back for the chunk."""
        records = pack(*self._undeclared)
        self._append(records)
        self._undeclared = []
        return records

    def chunk(self, body: ChunkBody) -> None:
        """Append a chunk and its message indexes, in one write."""
        data = body.take()
        if len(data) > c.MAX_CHUNK_BYTES:
            raise RecordingError(f"a chunk of {len(data)} bytes is larger than any reader takes")
        chunk = mr.Chunk(
            compression="zstd",
            data=self.compress(data),
            message_start_time=body.first,
            message_end_time=body.last,
            uncompressed_crc=zlib.crc32(data),
            uncompressed_size=len(data),
        )
        out = RecordBuilder()
        chunk.write(out)
        length = out.count
        offsets = {}
        for entry in body.index:
            offsets[entry.channel_id] = self.offset + out.count
            entry.write(out)
        where = mr.ChunkIndex(
            message_start_time=chunk.message_start_time,
            message_end_time=chunk.message_end_time,
            chunk_start_offset=self.offset,
            chunk_length=length,
            message_index_offsets=offsets,
            message_index_length=out.count - length,
            compression=chunk.compression,
            compressed_size=len(chunk.data),
            uncompressed_size=chunk.uncompressed_size,
        )
        self._append(end(out))
        # Kept as bytes: a day of recording has two hundred thousand of them.
        self._chunks += pack(where)
        self._chunk_count += 1
        self._first, self._last = min(self._first, body.first), max(self._last, body.last)
        for id, n in body.counts.items():
            self._counts[id] = self._counts.get(id, 0) + n

    def finish(self, attachment: bytes, name: str, metadata: Mapping[str, str]) -> None:
        """Append the end of the file: an attachment ``DIGEST`` where it is not empty, a metadata
        record, and the summary with all indexes."""
        out = RecordBuilder()
        out.write(pack(*self._undeclared))
        attachments = []
        if attachment:
            at = out.count
            mr.Attachment(0, 0, c.DIGEST, _BINARY, attachment).write(out)
            attachments.append(
                mr.AttachmentIndex(
                    self.offset + at, out.count - at, 0, 0, len(attachment), c.DIGEST, _BINARY
                )
            )
        at = out.count
        mr.Metadata(name, dict(metadata)).write(out)
        index = mr.MetadataIndex(self.offset + at, out.count - at, name)
        mr.DataEnd(0).write(out)
        groups = (
            (Opcode.SCHEMA, pack(*self._schemas)),
            (Opcode.CHANNEL, pack(*self._channels)),
            (Opcode.STATISTICS, pack(self._statistics(len(attachments)))),
            (Opcode.CHUNK_INDEX, self._chunks),
            (Opcode.ATTACHMENT_INDEX, pack(*attachments)),
            (Opcode.METADATA_INDEX, pack(*self._metadata, index)),
        )
        start = self.offset + out.count
        self._append(end(out) + _summary(start, groups))

    def compress(self, data: bytes) -> bytes:
        """One zstd frame that states its content size."""
        return self._packer.compress(data)

    def _statistics(self, attachments: int) -> mr.Statistics:
        return mr.Statistics(
            attachment_count=attachments,
            channel_count=len(self._channels),
            channel_message_counts=self._counts,
            chunk_count=self._chunk_count,
            message_count=sum(self._counts.values()),
            metadata_count=len(self._metadata) + 1,
            message_start_time=self._first if self._chunk_count else 0,
            message_end_time=self._last,
            schema_count=len(self._schemas),
        )

    def _append(self, data: bytes) -> None:
        view = memoryview(data)
        try:
            at = 0
            while at < len(view):
                at += os.pwrite(self._fd, view[at:], self.offset + at)
        except OSError:
            os.ftruncate(self._fd, self.offset)
            raise
        self.offset += len(view)


def _summary(start: int, groups: Iterable[tuple[Opcode, bytes | bytearray]]) -> bytes:
    """Summary section of records by opcode that begins at ``start``, footer and magic."""
    out = RecordBuilder()
    offsets = []
    for opcode, group in groups:
        if group:
            offsets.append(mr.SummaryOffset(opcode, start + out.count, len(group)))
            out.write(group)
    offsets_start = start + out.count
    for offset in offsets:
        offset.write(out)
    data = end(out)
    # The checksum runs over the summary and the footer up to the checksum itself.
    footer = c.HEAD.pack(c.FOOTER, 20) + b"".join(
        n.to_bytes(8, "little") for n in (start, offsets_start)
    )
    crc = zlib.crc32(footer, zlib.crc32(data))
    return data + pack(mr.Footer(start, offsets_start, crc)) + c.MAGIC


def create(path: str, force: bool) -> int:
    """A new file for us alone, or for who called sudo; ``force`` replaces a regular file, never a
    link or device."""
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
    give(fd)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        pass  # a file system without locks: the file then never counts as being written
    return fd


def pack(*records: mr.McapRecord) -> bytes:
    out = RecordBuilder()
    for record in records:
        record.write(out)
    return end(out)


def end(out: RecordBuilder) -> bytes:
    data: bytes = out.end()  # type: ignore[no-untyped-call]
    return data
