"""Where in a recording the chunks of each stream are: from the summary, or by walking the file.

An intact file ends in a summary that lists every chunk with its time range and channels.  Without
one (the recorder was killed or is still writing, or the file was damaged) :func:`scan` walks the
records and goes on behind damage at the next thing that looks like a chunk.
"""

from __future__ import annotations

import json
import os
import struct
import zlib
from dataclasses import dataclass, field

from dsprobe.recordings import container as c
from dsprobe.recordings.chunktable import ChunkTable
from dsprobe.recordings.errors import EXIT_VERSION, RecordingError
from dsprobe.recordings.model import SchemaError, Stream

MAX_PROBLEMS = 20
MAX_CHUNKS = 2_000_000
MAX_SUMMARY_BYTES = 160 << 20
MAX_SKIPPED_RECORDS = 100_000
MAX_SEARCH_BYTES = 256 << 20
DEFAULT_SPAN = 2 * 10**9
MAX_SPAN = 600 * 10**9


@dataclass
class Layout:
    """What is known of a recording without unpacking a chunk."""

    path: str
    profile: str | None = None
    library: str = ""
    format: tuple[int, int] | None = None
    channels: dict[int, Stream] = field(default_factory=dict)
    spans: dict[int, int] = field(default_factory=dict)
    table: ChunkTable = field(default_factory=ChunkTable)
    totals: dict[str, dict[str, int]] = field(default_factory=dict)
    stopped: str = ""
    covers: tuple[int, int] = (0, 0)
    """The interval that the rows are all there is of; (0, 0) where that was not said."""
    digest: tuple[int, int] | None = None
    ended: bool = False
    """Whether the data section is known to be whole: the recorder said that it was done."""
    resume: int = 0
    """Where the next scan goes on."""
    problems: dict[str, None] = field(default_factory=dict)
    more_problems: int = 0
    _schemas: dict[int, c.Schema] = field(default_factory=dict)

    def problem(self, sentence: str) -> None:
        if len(self.problems) < MAX_PROBLEMS:
            self.problems[sentence] = None
        elif sentence not in self.problems:
            self.more_problems += 1

    def take(self, opcode: int, content: bytes, sure: bool = False) -> None:
        """Learn from a record that is not a chunk; raises :class:`container.Damaged`.

        ``sure``: a checksum has been compared, so what it declares replaces what is known.
        """
        if opcode == c.HEADER:
            self.profile, self.library = c.header(content)
        elif opcode == c.SCHEMA:
            found = c.schema(content)
            self._schemas[found.id] = found
        elif opcode == c.CHANNEL:
            self._channel(c.channel(content), sure)
        elif opcode == c.METADATA:
            name, data = c.metadata(content)
            if name == c.FORMAT_RECORD:
                self._format(data.get("format", ""))
            elif name == c.TOTALS_RECORD:
                self._totals(data)

    def _channel(self, ch: c.Channel, sure: bool) -> None:
        schema = self._schemas.get(ch.schema)
        if (ch.id in self.channels and not sure) or schema is None:
            return
        if schema.encoding != c.SCHEMA_ENCODING or ch.encoding != c.MESSAGE_ENCODING:
            self.problem(f"channel {ch.topic[:64]!r} is not written by dsprobe and was skipped")
            return
        try:
            stream = Stream.from_json(schema.data)
            span = int(ch.metadata.get("max_span_ns", DEFAULT_SPAN))
        except (SchemaError, ValueError) as e:
            self.problem(f"stream {ch.topic[:64]!r} has an unreadable declaration ({e})")
            return
        before = self.channels.get(ch.id, stream)
        if before != stream:
            self.problem("the head of the file is damaged")
        if any(s.name == stream.name and id != ch.id for id, s in self.channels.items()):
            self.problem(f"stream {stream.name[:64]!r} is declared twice; the first one counts")
            return
        self.channels[ch.id] = stream
        self.spans[ch.id] = min(max(span, 0), MAX_SPAN)

    def _format(self, text: str) -> None:
        try:
            major, minor = (int(part) for part in text.split("."))
        except ValueError:
            self.problem("the file does not say in which format it is")
            return
        self.format = (major, minor)
        if major != c.FORMAT_MAJOR:
            raise RecordingError(
                f"{self.path} is in format {major}.{minor} ({self.library[:64]}); this dsprobe "
                f"reads format {c.FORMAT_MAJOR}: install a newer dsprobe",
                EXIT_VERSION,
            )

    def _totals(self, data: dict[str, str]) -> None:
        try:
            streams = json.loads(data.get("streams", "{}"))
            self.totals = {
                str(name): {k: min(max(int(v), 0), 1 << 62) for k, v in total.items()}
                for name, total in streams.items()
            }
        except (ValueError, TypeError, AttributeError, OverflowError, RecursionError):
            self.totals = {}
        self.stopped = data.get("stopped", "")[:200]
        try:
            first, last = (int(n) for n in data.get("covers", "0 0")[:64].split())
        except ValueError:
            return
        if 0 < first <= last < 1 << 62:
            self.covers = (first, last)


class File:
    """Reads ranges of a file that may change under us; short where the file ends."""

    def __init__(self, fd: int) -> None:
        self.fd = fd
        self.error = ""
        """Why a part of it could not be read; it then counts as missing."""
        self._at = 0
        self._buffer = b""

    def size(self) -> int:
        return os.fstat(self.fd).st_size

    def read(self, offset: int, n: int) -> bytes:
        """Exactly the bytes there are in ``[offset, offset + n)``."""
        parts = []
        while n > 0:
            part = self._pread(n, offset)
            if not part:
                break
            parts.append(part)
            offset += len(part)
            n -= len(part)
        return b"".join(parts)

    def peek(self, offset: int, n: int) -> bytes:
        """Like :meth:`read`, for many small neighbouring reads of at most 64 KiB."""
        if not self._at <= offset <= offset + n <= self._at + len(self._buffer):
            self._at, self._buffer = offset, self._pread(1 << 16, offset)
        at = offset - self._at
        return self._buffer[at : at + n]

    def _pread(self, n: int, offset: int) -> bytes:
        """Empty where the disk, or what stands in the file's place, gives nothing back."""
        try:
            return os.pread(self.fd, n, offset)
        except (OSError, OverflowError) as e:
            self.error = getattr(e, "strerror", "") or str(e)
            return b""

    def forget(self) -> None:
        self._buffer = b""


def load_summary(file: File, layout: Layout) -> bool:
    """Fill ``layout`` from the summary; False (and nothing to rely on) where it is not intact."""
    size = file.size()
    found = c.footer(file.read(size - c.FOOTER_BYTES, c.FOOTER_BYTES)) if size > 64 else None
    if found is None:
        return False
    start, crc = found
    length = size - c.FOOTER_BYTES - start
    if not 0 < length <= MAX_SUMMARY_BYTES:
        return False
    summary = file.read(start, length)
    tail = file.read(size - c.FOOTER_BYTES, c.HEAD.size + 16)
    if not crc or zlib.crc32(tail, zlib.crc32(summary)) != crc:
        return False
    try:
        first = file.read(0, 4096)
        if not first.startswith(c.MAGIC):
            return False
        opcode, n = c.HEAD.unpack_from(first, len(c.MAGIC))
        if opcode != c.HEADER or n > 2048:
            return False
        at = len(c.MAGIC) + c.HEAD.size
        layout.take(opcode, first[at : at + n])
        _load(file, layout, summary)
    except (c.Damaged, struct.error):
        return False
    layout.ended = True
    layout.resume = size
    return True


def _load(file: File, layout: Layout, summary: bytes) -> None:
    metadata: list[tuple[int, int]] = []
    for opcode, start, end in c.records(summary):
        if opcode == c.CHUNK_INDEX:
            e = c.chunk_entry(summary[start:end])
            if len(layout.table) < MAX_CHUNKS:
                layout.table.add(e.offset, e.length, e.first, e.last, e.channels.tolist())
        elif opcode == c.METADATA_INDEX:
            metadata.append(struct.unpack_from("<QQ", summary, start))
        elif opcode == c.ATTACHMENT_INDEX:
            where = struct.unpack_from("<QQ", summary, start)
            if c.DIGEST.encode() in summary[start:end]:
                layout.digest = where
        else:
            layout.take(opcode, summary[start:end])
    for offset, length in metadata[:16]:
        record = file.read(offset, length) if length <= c.MAX_RECORD_BYTES else b""
        opcode, n = c.HEAD.unpack_from(record)
        if opcode != c.METADATA or n + c.HEAD.size != len(record):
            raise c.Damaged("metadata")
        layout.take(opcode, record[c.HEAD.size :])


_SMALL = frozenset((c.HEADER, c.SCHEMA, c.CHANNEL, c.METADATA, c.MESSAGE_INDEX))


class _Scan:
    """One walk over the records from ``layout.resume`` on."""

    def __init__(self, file: File, layout: Layout) -> None:
        self.file, self.layout = file, layout
        self.size = file.size()
        self.skipped = 0
        self.pending: tuple[int, int, c.ChunkHead] | None = None
        self.members: list[int] = []

    def settle(self, sure: bool) -> None:
        """Enter the pending chunk; ``sure``: the list of its channels has been read to its end."""
        if self.pending is None:
            return
        offset, length, head = self.pending
        listed = self.members if sure and self.members else None
        self.layout.table.add(offset, length, head.first, head.last, listed)
        self.pending, self.members = None, []

    def run(self, at: int) -> None:
        while at < self.size and not self.layout.ended:
            if len(self.layout.table) >= MAX_CHUNKS or self.skipped > MAX_SKIPPED_RECORDS:
                self.layout.problem("the rest of the file was not read: too many records")
                break
            length = self.step(at)
            if length:
                at += length
                continue
            self.settle(sure=False)
            found = self.search(at + 1)
            if found < 0:
                break
            self.layout.problem(f"bytes {at} to {found} are damaged and were skipped")
            at = found
        self.settle(sure=False)
        self.layout.resume = at

    def step(self, at: int) -> int:
        """Take the record at ``at``; its length, or 0 where there is no whole, sound record."""
        start = self.file.peek(at, c.HEAD.size)
        if len(start) < c.HEAD.size:
            return 0
        opcode, content = c.HEAD.unpack(start)
        length = int(content) + c.HEAD.size
        if at + length > self.size:
            return 0
        if opcode != c.MESSAGE_INDEX:
            self.settle(sure=True)
        try:
            if opcode == c.CHUNK:
                head = c.chunk_head(self.file.peek(at, c.CODEC_OFFSET + 64), length)
                self.pending, self.members = (at, length, head), []
            elif opcode >= c.PRIVATE:
                self.skipped += 1
                self.layout.problem("records of an unknown kind were skipped")
            elif opcode == c.ATTACHMENT and content <= c.MAX_CHUNK_BYTES:
                self.skipped += 1
                c.attachment(self.file.read(at + c.HEAD.size, content))
            elif opcode == c.DATA_END and content == 4:
                self.layout.ended = True
            elif opcode not in _SMALL or content > c.MAX_RECORD_BYTES:
                return 0
            elif opcode == c.MESSAGE_INDEX:
                self.members.append(c.message_index(self.content(at, content)))
            else:
                self.skipped += opcode not in (c.SCHEMA, c.CHANNEL)
                self.layout.take(opcode, self.content(at, content))
        except c.Damaged:
            return 0
        return length

    def content(self, at: int, n: int) -> bytes:
        """The ``n`` bytes of content of the record at ``at``."""
        get = self.file.peek if n < 1 << 15 else self.file.read
        return get(at + c.HEAD.size, n)

    def search(self, at: int) -> int:
        """Where the next sound chunk begins at or after ``at``; -1 if there is none."""
        step, keep = 1 << 20, len(c.CODEC) - 1
        end = min(self.size, at + MAX_SEARCH_BYTES)
        base = at + c.CODEC_OFFSET
        while base < end:
            block = self.file.read(base, step + keep)
            hit = block.find(c.CODEC)
            while hit >= 0:
                start = base + hit - c.CODEC_OFFSET
                if self.plausible(start):
                    return start
                hit = block.find(c.CODEC, hit + 1)
            base += step
        return -1

    def plausible(self, at: int) -> bool:
        start = self.file.peek(at, c.CODEC_OFFSET + 64)
        try:
            length = c.HEAD.unpack_from(start)[1] + c.HEAD.size
            c.chunk_head(start, length)
        except (c.Damaged, struct.error):
            return False
        return at + int(length) <= self.size


def scan(file: File, layout: Layout) -> None:
    """Walk the records behind ``layout.resume`` into ``layout``; call again when the file grew."""
    file.forget()
    at = layout.resume or len(c.MAGIC)
    if not c.MAGIC.startswith(file.read(0, len(c.MAGIC))):
        layout.problem("the first bytes of the file are damaged")
    tail = layout.table.drop_unlisted_tail()
    _Scan(file, layout).run(tail if tail >= 0 else at)
