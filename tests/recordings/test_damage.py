"""Damaged, foreign and hostile files: what is whole is read, the rest is named."""

import struct
import zlib
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import zstandard
from mcap import records as mr

from dsprobe.recordings import container as c
from dsprobe.recordings import streams as st
from dsprobe.recordings.errors import RecordingError
from dsprobe.recordings.filesession import open_file
from dsprobe.recordings.mcapout import ChunkBody, McapOut, pack
from dsprobe.recordings.writer import Writer
from tests.recordings.sample import FOREVER, SECOND, T0, same, write_host

SECONDS = 8


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> tuple[bytes, dict[str, np.ndarray]]:
    path = tmp_path_factory.mktemp("whole") / "w.mcap"
    rows = write_host(path, SECONDS)
    return path.read_bytes(), rows


def boundaries(data: bytes) -> Iterator[tuple[int, int, int]]:
    """Opcode, start and end of every record, the file's magic left out."""
    at = len(c.MAGIC)
    while at < len(data) - len(c.MAGIC):
        opcode, length = c.HEAD.unpack_from(data, at)
        yield opcode, at, at + c.HEAD.size + length
        at += c.HEAD.size + length


def chunk_spans(data: bytes) -> list[tuple[int, int]]:
    return [(a, b) for op, a, b in boundaries(data) if op == c.CHUNK]


def put(tmp_path: Path, data: bytes) -> Path:
    path = tmp_path / "damaged.mcap"
    path.write_bytes(data)
    return path


def test_cut_off_at_every_record(
    tmp_path: Path, whole: tuple[bytes, dict[str, np.ndarray]]
) -> None:
    data, rows = whole
    ends = {0, 1, 7, 8, 9}
    for _, a, b in boundaries(data):
        ends |= {a, a + 1, a + 9, (a + b) // 2, b - 1}
    chunks = chunk_spans(data)
    for end in sorted(ends):
        with open_file(put(tmp_path, data[:end])) as source:
            assert source.truncated or source.problems, end
            complete = sum(b <= end for _, b in chunks)
            clock = source.read("meta.clock", 0, FOREVER)
            # One chunk a second, and a last one for the roll-ups.
            assert len(clock) == min(complete, SECONDS), end
            for name in ("softirq.cpu", "tcp.retransmit"):
                expected = rows[name][rows[name]["t"] < T0 + complete * SECOND]
                assert same(source.read(name, 0, FOREVER), expected) or not complete, (name, end)


def test_bytes_after_the_end(tmp_path: Path, whole: tuple[bytes, dict[str, np.ndarray]]) -> None:
    with open_file(put(tmp_path, whole[0] + b"\x00" * 100)) as source:
        assert source.problems
        assert same(source.read("softirq.cpu", 0, FOREVER), whole[1]["softirq.cpu"])


@pytest.mark.parametrize("indexed", [True, False])
def test_a_damaged_chunk_is_left_out_and_said(
    tmp_path: Path, whole: tuple[bytes, dict[str, np.ndarray]], indexed: bool
) -> None:
    data, rows = whole
    third = chunk_spans(data)[2]
    broken = bytearray(data if indexed else data[: chunk_spans(data)[-1][1]])
    broken[third[1] - 5] ^= 0x10
    with open_file(put(tmp_path, bytes(broken))) as source:
        assert not source.verify()
        assert any("left out" in p for p in source.problems)
        kept = rows["softirq.cpu"]
        kept = kept[(kept["t"] < T0 + 2 * SECOND) | (kept["t"] >= T0 + 3 * SECOND)]
        assert same(source.read("softirq.cpu", 0, FOREVER), kept)
        assert source.lost()["softirq.cpu"] == 1
        clock = len(source.read("meta.clock", 0, FOREVER))
        assert clock == (SECONDS if indexed else SECONDS - 1)  # there is the copy at the end


@pytest.mark.parametrize("indexed", [True, False])
def test_damaged_lengths_and_runs_of_zeros(
    tmp_path: Path, whole: tuple[bytes, dict[str, np.ndarray]], indexed: bool
) -> None:
    data, _ = whole
    spans = chunk_spans(data)
    for offset, patch in ((1, b"\xff" * 8), (1, b"\x10"), (0, b"\x00" * 400), (33, b"\xff\xff")):
        broken = bytearray(data if indexed else data[: spans[-1][1]])
        at = spans[3][0] + offset
        broken[at : at + len(patch)] = patch
        with open_file(put(tmp_path, bytes(broken))) as source:
            rows = source.read("softirq.cpu", 0, FOREVER)
            seconds = set(((rows["t"] - np.uint64(T0)) // np.uint64(SECOND)).tolist())
            assert seconds == set(range(SECONDS)) - {3}
            assert source.problems


def test_every_flipped_bit_of_the_head(
    tmp_path: Path, whole: tuple[bytes, dict[str, np.ndarray]]
) -> None:
    """Without a summary, with damage in the declarations: the copies in the chunks are used."""
    data, rows = whole
    data = data[: chunk_spans(data)[-1][1]]
    first = chunk_spans(data)[0][0]
    rng = np.random.default_rng(1)
    refused = []
    for at in {*range(100), *rng.integers(0, first, 100).tolist()}:
        broken = bytearray(data)
        broken[at] ^= 1 << int(rng.integers(0, 8))
        try:
            with open_file(put(tmp_path, bytes(broken))) as source:
                assert same(source.read("softirq.cpu", 0, FOREVER), rows["softirq.cpu"]), at
        except RecordingError as e:
            refused.append((at, e.exit_code))
    # Only a change to the number of the format makes the file unreadable.
    assert {code for _, code in refused} <= {4}
    assert len(refused) <= 8


def test_damaged_summary_and_copy(
    tmp_path: Path, whole: tuple[bytes, dict[str, np.ndarray]]
) -> None:
    data, rows = whole
    for opcode in (c.CHUNK_INDEX, c.FOOTER, c.STATISTICS, c.CHANNEL, c.ATTACHMENT, c.METADATA):
        at = [a for op, a, _ in boundaries(data) if op == opcode][-1]
        broken = bytearray(data)
        broken[at + 12] ^= 1
        with open_file(put(tmp_path, bytes(broken))) as source:
            assert same(source.read("softirq.cpu", 0, FOREVER), rows["softirq.cpu"])
            assert len(source.read("meta.clock", 0, FOREVER)) == SECONDS
            assert source.problems or opcode == c.METADATA


# -- files of others -----------------------------------------------------------------------------


def foreign(path: Path, profile: str, end: bool) -> None:
    from mcap.writer import Writer as McapWriter

    with open(path, "wb") as f:
        writer = McapWriter(f)
        writer.start(profile=profile, library="robot")
        schema = writer.register_schema("x", "jsonschema", b"{}")
        channel = writer.register_channel("/x", "json", schema)
        writer.add_message(channel, 1, b"{}", 1)
        writer.flush()
        if end:
            writer.finish()


@pytest.mark.parametrize("profile", ["ros2", "", "dsprobe2"])
@pytest.mark.parametrize("end", [True, False])
def test_someone_elses_mcap_file_is_refused(tmp_path: Path, profile: str, end: bool) -> None:
    foreign(tmp_path / "f.mcap", profile, end)
    with pytest.raises(RecordingError, match="not one that dsprobe wrote") as e:
        open_file(tmp_path / "f.mcap")
    assert e.value.exit_code == 1


@pytest.mark.parametrize("data", [b"x", b"PK\x03\x04" * 100, bytes(5000), b"{}" * 9])
def test_what_is_no_recording_is_refused(tmp_path: Path, data: bytes) -> None:
    with pytest.raises(RecordingError, match="is not a recording"):
        open_file(put(tmp_path, data))


def test_random_bytes_are_refused_or_empty(tmp_path: Path) -> None:
    rng = np.random.default_rng(3)
    for size in (10, 100, 5000, 200_000):
        with pytest.raises(RecordingError, match="is not a recording"):
            open_file(put(tmp_path, rng.bytes(size)))


@pytest.mark.parametrize("end", [True, False])
@pytest.mark.parametrize(("version", "fine"), [("1.9", True), ("2.0", False), ("0.1", False)])
def test_versions(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, version: str, fine: bool, end: bool
) -> None:
    major, minor = map(int, version.split("."))
    with monkeypatch.context() as patch:
        patch.setattr(c, "FORMAT_MAJOR", major)
        patch.setattr(c, "FORMAT_MINOR", minor)
        write_host(tmp_path / "v.mcap", 1, end=end)
    if fine:
        with open_file(tmp_path / "v.mcap") as source:
            assert source.format == (major, minor)
            assert len(source.read("softirq.cpu", 0, FOREVER))
    else:
        with pytest.raises(RecordingError, match=r"install a newer dsprobe") as e:
            open_file(tmp_path / "v.mcap")
        assert e.value.exit_code == 4


# -- bombs -----------------------------------------------------------------------------------------


def chunk_record(payload: bytes, size: int | None = None, packed: bytes | None = None) -> bytes:
    return pack(
        mr.Chunk(
            compression="zstd",
            data=zstandard.compress(payload) if packed is None else packed,
            message_start_time=T0,
            message_end_time=T0,
            uncompressed_crc=zlib.crc32(payload),
            uncompressed_size=len(payload) if size is None else size,
        )
    )


def hostile_chunks() -> dict[str, bytes]:
    zeros = bytes(300 << 20)
    bomb = zstandard.compress(zeros)
    endless = zstandard.ZstdCompressor(write_content_size=False).compress(zeros[: 64 << 20])
    tiny_records = struct.pack("<BQ", 0x80, 0) * 200_000
    unpackable = b"\x82\xa1n\xce\x00\x0f\x00\x00\xa4cols\x81\xa1t" + b"\x91" * 3_000_000
    body = ChunkBody()
    body.add(1, 0, T0, T0, unpackable)
    return {
        "claims less than it holds": chunk_record(zeros, 1000, bomb),
        "says what it holds": chunk_record(b"", len(zeros), bomb),
        "does not say": chunk_record(b"", 64 << 20, endless),
        "many records": chunk_record(tiny_records),
        "deep frame": chunk_record(body.take()),
        "no data": chunk_record(b"", 10, b""),
    }


@pytest.mark.parametrize("name", hostile_chunks())
def test_bombs_cost_no_memory(
    tmp_path: Path, whole: tuple[bytes, dict[str, np.ndarray]], name: str
) -> None:
    import tracemalloc

    data, rows = whole
    data = data[: chunk_spans(data)[-1][1]]  # no summary, so everything is looked at
    chunk = hostile_chunks()[name]
    path = put(tmp_path, data + chunk * 3)
    tracemalloc.start()
    try:
        with open_file(path) as source:
            assert not source.verify()
            assert same(source.read("softirq.cpu", 0, FOREVER), rows["softirq.cpu"])
            assert source.problems
        assert tracemalloc.get_traced_memory()[1] < 60 << 20
    finally:
        tracemalloc.stop()


def test_a_summary_that_points_anywhere(tmp_path: Path) -> None:
    path = tmp_path / "lies.mcap"
    out = McapOut(str(path), False)
    out.begin("x", c.FORMAT_RECORD, {"format": "1.0"})
    channel = out.declare("marker", st.MARKER.to_json(), {"max_span_ns": "99999999999999999999"})
    for offset, length in ((1 << 61, 100), (0, 1 << 61), (8, 50), (1 << 62, 1 << 62)):
        entry = mr.ChunkIndex(length, offset, "zstd", 1, T0, 1, {channel: 1}, T0, 1)
        out._chunks += pack(entry)
    out.finish(b"\xff" * 20, c.TOTALS_RECORD, {"streams": '{"marker":{"rows":-5,"last":1e999}}'})
    out.close()
    with open_file(path) as source:
        assert not len(source.read("marker", 0, FOREVER))
        assert not len(source.read("meta.clock", 0, FOREVER))
        assert source.problems


def test_a_stream_declared_twice_and_declarations_that_are_nonsense(tmp_path: Path) -> None:
    path = tmp_path / "twice.mcap"
    out = McapOut(str(path), False)
    out.begin("x", c.FORMAT_RECORD, {"format": "1.0"})
    for schema in (st.MARKER.to_json(), st.MARKER.to_json(), "{}", '{"fields": 3}', "[" * 100_000):
        out.declare("marker", schema, {})
    out.finish(b"", c.TOTALS_RECORD, {})
    out.close()
    with open_file(path) as source:
        assert set(source.streams) == {"marker"}
        assert len(source.problems) == 4


def test_many_problems_are_counted_not_listed(tmp_path: Path) -> None:
    with Writer(tmp_path / "x.mcap") as writer:
        for i in range(60):
            writer.append(st.MARKER, st.MARKER.rows(t=[T0 + i], label=["x"]))
            writer.flush()
    data = bytearray((tmp_path / "x.mcap").read_bytes())
    for a, b in chunk_spans(bytes(data)):
        data[(a + b) // 2 + 20] ^= 1
    with open_file(put(tmp_path, bytes(data))) as source:
        assert not source.verify()
        assert len(source.problems) == 21
        assert source.problems[-1] == "40 more problems of these kinds"
        assert source.lost()["marker"] == 60
