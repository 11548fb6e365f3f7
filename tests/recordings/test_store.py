"""Writing a recording and reading it again."""

import dataclasses
import os
import stat
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as some

from dsprobe.recordings import frames, session
from dsprobe.recordings import streams as st
from dsprobe.recordings.errors import RecordingError
from dsprobe.recordings.filesession import open_file
from dsprobe.recordings.frames import Frame
from dsprobe.recordings.index import load_summary
from dsprobe.recordings.model import Field, Stream
from dsprobe.recordings.writer import Writer
from tests.recordings.sample import (
    FOREVER,
    SECOND,
    T0,
    facts,
    head,
    host_second,
    random_rows,
    same,
    write_host,
)


@pytest.mark.parametrize("end", [True, False])
def test_every_stream_comes_back(tmp_path: Path, end: bool) -> None:
    path = tmp_path / "all.mcap"
    rows = {s.name: random_rows(s, 40 + i) for i, s in enumerate(st.STREAMS.values())}
    writer = Writer(path, rollups=False)
    for name, batch in rows.items():
        writer.write(frames.make(st.STREAMS[name], 0, batch))
    writer.flush()
    if end:
        writer.close()
    else:
        writer.abandon()
    with open_file(path) as source:
        assert source.streams == st.STREAMS
        for name, batch in rows.items():
            assert same(source.read(name, 0, FOREVER), batch), name
        assert {name: t.rows for name, t in source.totals().items()} == {
            name: len(batch) for name, batch in rows.items()
        }
        times = np.concatenate(
            [b["t"] for n, b in rows.items() if not n.startswith(("meta.", "rollup."))]
        )
        assert source.span() == (times.min(), times.max())
        assert source.truncated != end
        assert bool(source.problems) != end


def test_it_is_an_mcap_file_that_other_tools_read(tmp_path: Path) -> None:
    from mcap.reader import make_reader

    path = tmp_path / "host.mcap"
    rows = write_host(path, 130)
    with open(path, "rb") as f:
        reader = make_reader(f, validate_crcs=True)
        summary = reader.get_summary()
        assert summary is not None
        assert summary.statistics is not None
        assert reader.get_header().profile == "dsprobe"
        counts = summary.statistics.channel_message_counts
        topics = {c.topic: counts.get(c.id, 0) for c in summary.channels.values()}
        found: dict[str, list[np.ndarray]] = {}
        for schema, channel, message in reader.iter_messages(log_time_order=False):
            assert schema is not None
            stream = Stream.from_json(schema.data)
            batch = frames.decode(stream, message.data)
            assert message.publish_time == batch["t"].min()
            assert message.log_time == batch["t"].max()
            found.setdefault(channel.topic, []).append(batch)
        assert {name: len(parts) for name, parts in found.items()} == topics
        for name, batch in rows.items():
            assert same(np.concatenate(found[name]), batch)
        # Roll-ups: one chunk a minute holds any.
        ids = {c.id for c in summary.channels.values() if c.topic == "rollup.lane"}
        assert sum(bool(ids & set(k.message_index_offsets)) for k in summary.chunk_indexes) == 3
        assert len(summary.chunk_indexes) == 131  # a flush each, and the last roll-ups


@pytest.fixture(scope="module")
def host(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path, dict[str, np.ndarray]]:
    folder = tmp_path_factory.mktemp("host")
    rows = write_host(folder / "whole.mcap", 30)
    write_host(folder / "cut.mcap", 30, end=False)
    return folder / "whole.mcap", folder / "cut.mcap", rows


@settings(max_examples=60, deadline=None)
@given(
    name=some.sampled_from(("softirq.cpu", "softirq.slow", "tcp.retransmit", "meta.clock")),
    start=some.integers(-2 * SECOND, 32 * SECOND),
    length=some.one_of(some.integers(0, 3 * SECOND), some.just(FOREVER)),
    whole=some.booleans(),
)
def test_any_interval_equals_brute_force(
    host: tuple[Path, Path, dict[str, np.ndarray]], name: str, start: int, length: int, whole: bool
) -> None:
    rows = host[2][name]
    begin, end = T0 + start, min(T0 + start + length, FOREVER)
    with open_file(host[0 if whole else 1]) as source:
        expected = rows[(rows["t"] >= begin) & (rows["t"] < end)]
        assert same(source.read(name, begin, end), expected)
        parts = list(source.blocks(name, begin, end))
        assert sum(map(len, parts)) == len(expected)


def test_a_read_unpacks_only_what_it_needs(
    host: tuple[Path, Path, dict[str, np.ndarray]], monkeypatch: pytest.MonkeyPatch
) -> None:
    from dsprobe.recordings import container

    unpacked = []
    real = container.unpack_chunk
    monkeypatch.setattr(
        container, "unpack_chunk", lambda record: unpacked.append(1) or real(record)
    )
    with open_file(host[0]) as source:
        session.facts(source)
        session.clock(source)
        session.coverage(source)
        source.span(), source.totals(), source.lost()
        assert not unpacked
        at = T0 + 15 * SECOND
        source.read("softirq.cpu", at, at + 100_000_000)
        assert 1 <= len(unpacked) <= 4
        before = len(unpacked)
        source.read("tcp.retransmit", at, at + 100_000_000)
        assert len(unpacked) == before


def test_rows_out_of_order_come_in_order_and_ties_as_written(tmp_path: Path) -> None:
    path = tmp_path / "order.mcap"
    t = [T0 + s * SECOND for s in (5, 3, 3, 4, 3, 9, 1)]
    labels = list("abcdefg")
    with Writer(path) as writer:
        for i, (when, label) in enumerate(zip(t, labels, strict=True)):
            writer.append(st.MARKER, st.MARKER.rows(t=[when], label=[label]))
            if i % 3 == 2:
                writer.flush()
        writer.append(st.MARKER, st.MARKER.rows(t=t, label=labels))
    with open_file(path) as source:
        assert "".join(source.read("marker", 0, FOREVER)["label"]) == "ggbcebceddaaff"
        third = source.read("marker", T0 + 3 * SECOND, T0 + 3 * SECOND + 1)
        assert "".join(third["label"]) == "bcebce"


def test_frames_that_are_long_in_time_are_split(tmp_path: Path) -> None:
    path = tmp_path / "long.mcap"
    rows = random_rows(st.CPU_LOAD, 1000, span=3600 * SECOND)
    with Writer(path, rollups=False) as writer:
        writer.write(frames.make(st.CPU_LOAD, 0, rows))
    with open_file(path) as source:
        for at in range(0, 3600, 300):
            begin, end = T0 + at * SECOND, T0 + (at + 1) * SECOND
            expected = rows[(rows["t"] >= begin) & (rows["t"] < end)]
            assert same(source.read("cpu.load", begin, end), expected)


def test_a_chunk_ends_by_itself_when_much_comes(tmp_path: Path) -> None:
    path = tmp_path / "much.mcap"
    rows = random_rows(st.TCP_RETRANSMIT, 200_000)
    with Writer(path) as writer:
        for part in np.array_split(rows, 50):
            writer.append(st.TCP_RETRANSMIT, part)
        assert writer.size > 1 << 20
        writer.append(st.TCP_RETRANSMIT, rows)
    with open_file(path) as source:
        assert len(source.read("tcp.retransmit", 0, FOREVER)) == 400_000
        assert source.verify()


# -- frames that never came ------------------------------------------------------------------


def _frames_with(path: Path, seqs: list[int], loss: int = 0) -> None:
    with Writer(path) as writer:
        for i, seq in enumerate(seqs):
            rows = st.MARKER.rows(t=[T0 + i], label=[str(i)])
            writer.write(Frame("marker", seq, T0 + i, T0 + i, 1, frames.encode(st.MARKER, rows)))
        if loss:
            lost = st.META_LOSS.rows(t=[T0], stream=["marker"], reason=["ring"], lost=[loss])
            writer.append(st.META_LOSS, lost)


@pytest.mark.parametrize(
    ("seqs", "loss", "expected"),
    [
        ([0, 1, 2], 0, 0),
        ([1000, 1001], 0, 0),  # came late
        ([5, 8, 9], 0, 2),
        ([5, 8, 9], 7, 7),  # whoever dropped them has said so
        ([5, 6, 0, 1], 0, 0),  # began anew
        ([2**32 - 2, 2**32 - 1, 2**32, 2**32 + 2], 0, 1),
    ],
)
def test_missing_frames_count_as_lost(
    tmp_path: Path, seqs: list[int], loss: int, expected: int
) -> None:
    _frames_with(tmp_path / "gaps.mcap", seqs, loss)
    with open_file(tmp_path / "gaps.mcap") as source:
        assert source.lost().get("marker", 0) == expected
        assert len(source.read("marker", 0, FOREVER)) == len(seqs)


def test_sequence_numbers_wrap_in_the_file() -> None:
    from dsprobe.recordings.assemble import Sequences

    numbers = Sequences()
    assert [numbers.see("s", n, 32) for n in (2**32 - 1, 0, 2, 2, 1)] == [0, 0, 1, 0, 0]
    assert numbers.missing == {"s": 1}


# -- what other versions wrote -----------------------------------------------------------------

NEWER = Stream(
    "gpu.later",
    "From a later version.",
    "somewhere",
    (
        Field("t", "<u8", "ns", "CLOCK_MONOTONIC"),
        Field("x", "<f8", "furlongs", "unit of the future"),
        Field("v", "<i2", "count", "an array", 5),
    ),
)


def test_unknown_streams_and_fields_are_kept(tmp_path: Path) -> None:
    path = tmp_path / "newer.mcap"
    more = dataclasses.replace(st.MARKER, fields=(*st.MARKER.fields, Field("by", "S8", "text", "")))
    unknown, known = random_rows(NEWER, 30), random_rows(more, 20)
    with Writer(path) as writer:
        writer.append(NEWER, unknown)
        writer.append(more, known)
    with open_file(path) as source:
        assert source.streams["gpu.later"] == NEWER
        assert same(source.read("gpu.later", 0, FOREVER), unknown)
        assert same(source.read("marker", 0, FOREVER), known)
        assert not len(source.read("no.such", 0, FOREVER))
        assert source.read("no.such", 0, FOREVER).dtype.names == ("t",)
        assert source.read("softirq.cpu", 0, FOREVER).dtype == st.SOFTIRQ_CPU.dtype


def test_rows_must_fit_what_was_declared(tmp_path: Path) -> None:
    with Writer(tmp_path / "x.mcap") as writer:
        writer.declare(st.MARKER)
        with pytest.raises(frames.FrameError):
            writer.append(st.MARKER, random_rows(st.CPU_LOAD, 1))
        with pytest.raises(frames.FrameError):
            writer.write(Frame("no.such", 0, 0, 0, 1, b""))
        with pytest.raises(frames.FrameError):
            writer.write(Frame("marker", 0, 0, 0, 1, b"\x00"))


# -- the file itself ----------------------------------------------------------------------------


def test_files_are_private_and_never_overwritten(tmp_path: Path) -> None:
    path = tmp_path / "a.mcap"
    write_host(path, 1)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    before = path.read_bytes()
    with pytest.raises(RecordingError, match="exists"):
        Writer(path)
    assert path.read_bytes() == before
    Writer(path, force=True).close()
    assert path.read_bytes() != before

    (tmp_path / "target").write_text("precious")
    link = tmp_path / "link.mcap"
    link.symlink_to(tmp_path / "target")
    for force in (False, True):
        with pytest.raises(RecordingError):
            Writer(link, force=force)
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(RecordingError, match="not a plain file"):
        Writer(tmp_path / "pipe", force=True)
    with pytest.raises(RecordingError, match="No such file"):
        Writer(tmp_path / "none" / "x.mcap")
    assert (tmp_path / "target").read_text() == "precious"


@pytest.mark.parametrize("name", ["pipe", "folder", "none"])
def test_what_is_no_file_is_refused_at_once(tmp_path: Path, name: str) -> None:
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "folder").mkdir()
    with pytest.raises(RecordingError):
        open_file(tmp_path / name)


def test_a_file_that_is_being_written_grows(tmp_path: Path) -> None:
    path = tmp_path / "live.mcap"
    writer = Writer(path)
    with open_file(path) as empty:
        assert empty.live
        assert empty.span() == (0, 0)
    head(writer)
    source = open_file(path)
    seen = 0
    for number in range(12):
        for stream, batch in host_second(number).items():
            writer.append(stream, batch)
        assert not source.refresh()
        writer.flush()
        assert source.refresh()
        assert source.live
        assert not source.problems
        rows = source.read("softirq.cpu", 0, FOREVER)
        assert len(rows) > seen
        seen = len(rows)
        assert len(session.clock(source).mono) == number + 1
        assert source.span()[1] == T0 + (number + 1) * SECOND - 1
    writer.close()
    assert source.refresh()
    assert not source.live
    assert not source.problems
    assert len(source.read("softirq.cpu", 0, FOREVER)) == seen
    assert len(session.clock(source).mono) == 12
    assert len(source.read("rollup.lane", 0, FOREVER))
    assert not source.refresh()
    source.close()


def test_the_copy_of_meta_streams_equals_the_chunks(tmp_path: Path) -> None:
    path = tmp_path / "m.mcap"
    write_host(path, 300)
    with open_file(path) as source:
        copies = {n: source.read(n, 0, FOREVER) for n in source.streams if n.startswith("meta.")}
        assert len(copies["meta.clock"]) == 300
        source._layout.digest = None
        source._meta, source._meta_done = {}, 0
        for name, rows in copies.items():
            assert same(source.read(name, 0, FOREVER), rows)


def test_more_meta_rows_than_are_kept_in_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from dsprobe.recordings import filesession, writer

    monkeypatch.setattr(writer, "DIGEST_BYTES", 1000)
    monkeypatch.setattr(filesession, "META_BYTES", 1000)
    rows = write_host(tmp_path / "m.mcap", 100)["meta.clock"]
    with open_file(tmp_path / "m.mcap") as source:
        assert source._layout.digest is None
        assert same(source.read("meta.clock", 0, FOREVER), rows)
        at = T0 + 50 * SECOND
        assert len(source.read("meta.clock", at, at + SECOND)) == 1


def test_nothing_recorded_is_a_recording(tmp_path: Path) -> None:
    Writer(tmp_path / "e.mcap").close()
    with open_file(tmp_path / "e.mcap") as source:
        assert not source.problems
        assert source.span() == (0, 0)
        assert source.totals() == {}
        assert load_summary(source._file, source._layout)


def test_facts_and_coverage(tmp_path: Path) -> None:
    write_host(tmp_path / "a.mcap", 2, host="other")
    with open_file(tmp_path / "a.mcap") as source:
        said = session.facts(source)
        assert said["host"] == "other"
        assert set(said) == set(facts()["key"])
        state = session.coverage(source)["tcp", ""]
        assert (state.status, state.reason[:10]) == ("missing", "tracepoint")


def test_meta_rows_of_a_large_file_that_was_cut_off(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They are found without unpacking what lies between them."""
    from dsprobe.recordings import container

    writer = Writer(tmp_path / "big.mcap")
    head(writer)
    for i in range(20):
        at = T0 + i * SECOND
        writer.append(st.META_CLOCK, st.META_CLOCK.rows(t=[at], wall=[at]))
        writer.append(st.TCP_RETRANSMIT, random_rows(st.TCP_RETRANSMIT, 5000, start=at))
        writer.flush()
    writer.abandon()
    unpacked = []
    real = container.unpack_chunk
    monkeypatch.setattr(
        container, "unpack_chunk", lambda record: unpacked.append(len(record)) or real(record)
    )
    with open_file(tmp_path / "big.mcap") as source:
        assert len(session.clock(source).mono) == 20
        assert session.facts(source)["host"] == "testhost"
    assert sum(unpacked) < (tmp_path / "big.mcap").stat().st_size / 5
