"""The MCAP container, read without trust: records, and what a chunk holds.

Layout of every record: opcode (1 byte), length (8 bytes), content; integers are little-endian and
strings carry a 4-byte length (https://mcap.dev/spec).  Nothing here allocates more than a constant
or than the bytes it was given, whatever those bytes say.  Writing uses the ``mcap`` package.
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import zstandard

MAGIC = b"\x89MCAP0\r\n"
HEADER, FOOTER, SCHEMA, CHANNEL, MESSAGE, CHUNK, MESSAGE_INDEX, CHUNK_INDEX = range(1, 9)
ATTACHMENT, ATTACHMENT_INDEX, STATISTICS, METADATA, METADATA_INDEX, SUMMARY_OFFSET = range(9, 15)
DATA_END = 15
PRIVATE = 0x80
"""Opcodes from here on are left to private use; a later minor version may have some."""

PROFILE = "dsprobe"
SCHEMA_ENCODING = "dsprobe.stream+json"
MESSAGE_ENCODING = "msgpack"
FORMAT_RECORD = "dsprobe.format"
TOTALS_RECORD = "dsprobe.totals"
DIGEST = "dsprobe.meta"
FORMAT_MAJOR, FORMAT_MINOR = 1, 0

HEAD = struct.Struct("<BQ")
CHUNK_HEAD = struct.Struct("<QQQII")  # first and last time, size unpacked, CRC, length of codec
MAX_CHUNK_BYTES = 20 << 20
MAX_RECORD_BYTES = 1 << 20  # of any record but a chunk, an attachment or the whole summary
MAX_MESSAGES = 1 << 17

_MESSAGE_HEAD = struct.Struct("<HIQQ")
_FOOTER = struct.Struct("<QQI")
_CHUNK_INDEX = struct.Struct("<QQQQI")
FOOTER_BYTES = HEAD.size + _FOOTER.size + len(MAGIC)

CODEC_OFFSET = HEAD.size + CHUNK_HEAD.size - 4
CODEC = b"\x04\x00\x00\x00zstd"
"""The bytes at ``CODEC_OFFSET`` of every chunk we write: what to look for after damage."""


class Damaged(ValueError):
    """Bytes that are not the record they should be."""


class Message(NamedTuple):
    """A frame inside an unpacked chunk: ``data`` is ``payload[start:end]``."""

    sequence: int
    t0: int
    t1: int
    start: int
    end: int


class ChunkHead(NamedTuple):
    """What a chunk record says before its data; ``data`` is an offset into the record."""

    first: int
    last: int
    unpacked: int
    crc: int
    codec: str
    data: int
    packed: int


class ChunkEntry(NamedTuple):
    """One entry of the chunk index of the summary."""

    first: int
    last: int
    offset: int
    length: int
    channels: npt.NDArray[np.uint16]


class Fields:
    """Takes strings and numbers off the front of a record's content."""

    def __init__(self, data: bytes) -> None:
        self.data = data
        self.at = 0

    def take(self, n: int) -> bytes:
        part = self.data[self.at : self.at + n]
        if len(part) != n:
            raise Damaged("a record shorter than its fields")
        self.at += n
        return part

    def u2(self) -> int:
        return int.from_bytes(self.take(2), "little")

    def u4(self) -> int:
        return int.from_bytes(self.take(4), "little")

    def u8(self) -> int:
        return int.from_bytes(self.take(8), "little")

    def text(self) -> str:
        try:
            return self.take(self.u4()).decode()
        except UnicodeDecodeError:
            raise Damaged("text that is not UTF-8") from None

    def done(self) -> None:
        """Nothing may follow: a length that was damaged must not swallow the next record."""
        if self.at != len(self.data):
            raise Damaged("a record longer than its fields")

    def map(self) -> dict[str, str]:
        end = self.u4() + self.at
        if end > len(self.data):
            raise Damaged("a record shorter than its fields")
        found = {}
        while self.at < end:
            key = self.text()
            found[key] = self.text()
        return found


class Schema(NamedTuple):
    id: int
    name: str
    encoding: str
    data: bytes


class Channel(NamedTuple):
    id: int
    schema: int
    topic: str
    encoding: str
    metadata: dict[str, str]


def header(content: bytes) -> tuple[str, str]:
    """Profile and library."""
    f = Fields(content)
    profile, library = f.text(), f.text()
    f.done()
    return profile, library


def schema(content: bytes) -> Schema:
    f = Fields(content)
    id, name, encoding = f.u2(), f.text(), f.text()
    data = f.take(f.u4())
    f.done()
    return Schema(id, name, encoding, data)


def channel(content: bytes) -> Channel:
    f = Fields(content)
    found = Channel(f.u2(), f.u2(), f.text(), f.text(), f.map())
    f.done()
    return found


def metadata(content: bytes) -> tuple[str, dict[str, str]]:
    f = Fields(content)
    name, data = f.text(), f.map()
    f.done()
    return name, data


def message_index(content: bytes) -> int:
    """The channel it is of."""
    f = Fields(content)
    channel = f.u2()
    f.take(f.u4())
    f.done()
    return channel


def attachment(content: bytes) -> tuple[str, bytes]:
    """Name and data, after checking the CRC."""
    f = Fields(content)
    f.take(16)
    name = f.text()
    f.text()
    data = f.take(f.u8())
    if zlib.crc32(content[: f.at]) != f.u4():
        raise Damaged("a wrong checksum")
    f.done()
    return name, data


def footer(tail: bytes) -> tuple[int, int] | None:
    """Start of the summary and its CRC, from the last :data:`FOOTER_BYTES` of a whole file."""
    if len(tail) != FOOTER_BYTES or not tail.endswith(MAGIC):
        return None
    if HEAD.unpack_from(tail) != (FOOTER, _FOOTER.size):
        return None
    start, _, crc = _FOOTER.unpack_from(tail, HEAD.size)
    return start, crc


def chunk_entry(content: bytes) -> ChunkEntry:
    try:
        first, last, offset, length, n = _CHUNK_INDEX.unpack_from(content)
        ids = np.frombuffer(content, "<u2, <u8", n // 10, _CHUNK_INDEX.size)["f0"]
    except (struct.error, ValueError):
        raise Damaged("a record shorter than its fields") from None
    if first >> 62 or last >> 62 or offset >> 62 or length >> 62:
        raise Damaged("a time or offset out of range")
    return ChunkEntry(first, last, offset, length, ids)


def chunk_head(start: bytes, length: int) -> ChunkHead:
    """Read the head of a chunk record from its first bytes; ``length`` is its whole length.

    Raises :class:`Damaged` unless every number in it agrees with the others and with our limits.
    """
    try:
        opcode, content = HEAD.unpack_from(start)
        first, last, unpacked, crc, n = CHUNK_HEAD.unpack_from(start, HEAD.size)
        at = HEAD.size + CHUNK_HEAD.size
        if n > 16:
            raise Damaged("a compression without a name")
        codec = start[at : at + n].decode()
        (packed,) = struct.unpack_from("<Q", start, at + n)
    except (struct.error, UnicodeDecodeError):
        raise Damaged("a torn record") from None
    data = at + n + 8
    if opcode != CHUNK or content + HEAD.size != length or data + packed != length:
        raise Damaged("lengths that contradict each other")
    if first > last or last >> 62:
        raise Damaged("times out of range")
    if unpacked > MAX_CHUNK_BYTES or packed > MAX_CHUNK_BYTES:
        raise Damaged(f"{unpacked} bytes of data")
    return ChunkHead(first, last, unpacked, crc, codec, data, packed)


def unpack_chunk(record: bytes) -> bytes:
    """The records inside a chunk record, uncompressed, its CRC checked."""
    head = chunk_head(record, len(record))
    data = unpack(record[head.data :], head.unpacked) if head.codec == "zstd" else b""
    if head.codec == "":
        data = record[head.data :]
    elif head.codec != "zstd":
        raise Damaged(f"compression {head.codec}, which dsprobe never writes")
    if len(data) != head.unpacked or (head.crc and zlib.crc32(data) != head.crc):
        raise Damaged("a wrong checksum")
    return data


def unpack(packed: bytes, size: int) -> bytes:
    """Decompress one zstd frame that must hold ``size`` bytes and must say so."""
    try:
        # libzstd allocates what the frame claims, so the claim is compared first.
        if zstandard.frame_content_size(packed) != size or size > MAX_CHUNK_BYTES:
            raise Damaged("compressed data of an unexpected size")
        return zstandard.ZstdDecompressor().decompress(packed) if size else b""
    except zstandard.ZstdError:
        raise Damaged("compressed data that is broken") from None


def records(data: bytes) -> Iterator[tuple[int, int, int]]:
    """Opcode, start and end of the content of each record in ``data``."""
    at = 0
    while at < len(data):
        if len(data) - at < HEAD.size:
            raise Damaged("a torn record")
        opcode, length = HEAD.unpack_from(data, at)
        at += HEAD.size
        if length > len(data) - at:
            raise Damaged("a torn record")
        yield opcode, at, at + length
        at += length


def messages(data: bytes) -> dict[int, list[Message]]:
    """The messages in the records of an unpacked chunk, by channel, in written order."""
    found: dict[int, list[Message]] = {}
    n = 0
    for opcode, start, end in records(data):
        n += 1
        if n > MAX_MESSAGES:
            raise Damaged("too many records")
        if opcode != MESSAGE:
            continue
        if end - start < _MESSAGE_HEAD.size:
            raise Damaged("a torn message")
        channel, sequence, t1, t0 = _MESSAGE_HEAD.unpack_from(data, start)
        found.setdefault(channel, []).append(
            Message(sequence, t0, t1, start + _MESSAGE_HEAD.size, end)
        )
    return found
