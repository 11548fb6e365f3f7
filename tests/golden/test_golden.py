"""The file format does not change unless its version does, and old files stay readable."""

import zlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dsprobe.recordings import container as c
from dsprobe.recordings.filesession import open_file
from dsprobe.recordings.streams import STREAMS
from tests.golden import make
from tests.recordings.sample import FOREVER, same

FILES = sorted(make.FOLDER.glob("v*.mcap"))


def test_there_is_a_file_of_this_version() -> None:
    assert make.FOLDER / make.name() in FILES, "run python -m tests.golden.make"


@pytest.mark.parametrize("path", FILES, ids=lambda p: p.stem)
def test_old_files_stay_readable(path: Path) -> None:
    with open_file(path) as source:
        assert source.verify()
        for name, stream in source.streams.items():
            expected = np.concatenate([make.rows(stream, b) for b in range(make.BATCHES)])
            assert same(source.read(name, 0, FOREVER), expected), name
        assert source.lost()
        assert all(total.rows == len(expected) for total in source.totals().values())


@pytest.mark.parametrize("path", FILES, ids=lambda p: p.stem)
def test_streams_only_grow_at_their_end(path: Path) -> None:
    """A change of meaning needs a new stream name; words of an enumeration may be added."""
    with open_file(path) as source:
        for name, then in source.streams.items():
            assert name in STREAMS, f"{name} is gone: readers of old files still need it"
            now = STREAMS[name].fields[: len(then.fields)]
            for old, new in zip(then.fields, now, strict=True):
                assert (new.name, new.type, new.unit, new.shape, new.ref) == (
                    old.name, old.type, old.unit, old.shape, old.ref,
                ), f"{name}.{old.name}"  # fmt: skip
                assert new.names[: len(old.names)] == old.names, f"{name}.{old.name}"


def content(data: bytes) -> list[tuple[int, Any]]:
    """What the records of a file say, without what depends on how well zstd compresses, and
    without the version of the program."""
    found: list[tuple[int, Any]] = []
    at = len(c.MAGIC)
    while at < len(data) - len(c.MAGIC):
        opcode, n = c.HEAD.unpack_from(data, at)
        record = data[at : at + c.HEAD.size + n]
        body = record[c.HEAD.size :]
        said: Any = body
        if opcode == c.HEADER:
            profile, library = c.header(body)
            said = (profile, library.split()[0])
        elif opcode == c.CHUNK:
            head = c.chunk_head(record, len(record))
            said = (*head[:3], head.codec, c.unpack_chunk(record))
        elif opcode == c.CHUNK_INDEX:
            entry = c.chunk_entry(body)
            said = (entry.first, entry.last, entry.channels.tolist())
        elif opcode == c.ATTACHMENT:
            name, packed = c.attachment(body)
            size = int.from_bytes(packed[:8], "little")
            said = (name, c.unpack(packed[8:], size))
        elif opcode in (c.ATTACHMENT_INDEX, c.METADATA_INDEX):
            said = body.split(b"dsprobe.")[-1]
        elif opcode == c.SUMMARY_OFFSET:
            said = body[0]
        elif opcode == c.FOOTER:
            said = len(body)
        found.append((opcode, said))
        at += len(record)
    return found


def test_the_format_changes_only_with_its_version(tmp_path: Path) -> None:
    golden = make.FOLDER / make.name()
    with open_file(golden) as source:
        make.write(tmp_path / "now.mcap", source.streams.values())
    then, now = content(golden.read_bytes()), content((tmp_path / "now.mcap").read_bytes())
    assert [opcode for opcode, _ in now] == [opcode for opcode, _ in then]
    changed = [opcode for (opcode, a), (_, b) in zip(now, then, strict=True) if a != b]
    assert not changed, (
        "the format changed: raise FORMAT_MINOR, or FORMAT_MAJOR if old readers fail"
    )


def test_the_comparison_sees_a_change() -> None:
    data = (make.FOLDER / make.name()).read_bytes()
    crc = zlib.crc32(data)
    other = data.replace(b"max_span_ns", b"max_span_us", 1)
    assert zlib.crc32(other) != crc
    assert content(other) != content(data)
