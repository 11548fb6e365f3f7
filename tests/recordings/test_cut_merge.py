"""Parts of recordings, and several as one: rows in are rows out, and names still mean the same."""

import os
from collections import Counter
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as some

from dsprobe.recordings import session
from dsprobe.recordings import streams as st
from dsprobe.recordings.cut import cut
from dsprobe.recordings.errors import RecordingError
from dsprobe.recordings.filesession import FileSession, open_file
from dsprobe.recordings.merge import merge, union
from dsprobe.recordings.model import Field, Stream
from dsprobe.recordings.rollups import covered
from dsprobe.recordings.writer import Writer
from tests.recordings.sample import FOREVER, SECOND, T0, facts, head, host_second, same, write_host

_T = Field("t", "<u8", "ns", "CLOCK_MONOTONIC")
_ID = Field("id", "<u4", "id", "")
STACK = Stream(
    "meta.path", "", "", (_T, _ID, Field("frames", "<u4", "id", "", 3, ref="meta.string"))
)
SAMPLE = Stream(
    "profile.sample",
    "",
    "",
    (
        _T,
        Field("stack", "<u4", "id", "", ref="meta.path"),
        Field("name", "<u4", "id", "", ref="meta.string"),
    ),
)
"""A stream whose references lead to rows that have references of their own."""


@pytest.fixture(scope="module")
def host(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, np.ndarray]]:
    path = tmp_path_factory.mktemp("host") / "h.mcap"
    return path, write_host(path, 12)


@settings(max_examples=40, deadline=None)
@given(
    start=some.integers(-SECOND, 13 * SECOND),
    length=some.integers(1, 14 * SECOND),
    only=some.none() | some.sets(some.sampled_from(("softirq.cpu", "tcp.retransmit")), min_size=1),
)
def test_a_cut_holds_the_interval_and_what_it_needs(
    host: tuple[Path, dict[str, np.ndarray]], start: int, length: int, only: set[str] | None
) -> None:
    path, rows = host
    out = path.parent / "cut.mcap"
    begin, end = T0 + start, T0 + start + length
    with open_file(path) as source:
        cut(source, out, begin, end, only, force=True)
    with open_file(out) as part:
        assert not part.problems
        netns = set()
        for name, all_rows in rows.items():
            if name.startswith("meta."):
                continue
            kept = all_rows[(all_rows["t"] >= begin) & (all_rows["t"] < end)]
            kept = kept if only is None or name in only else kept[:0]
            assert same(part.read(name, 0, FOREVER), kept)
            if name == "tcp.retransmit":
                netns = set(kept["netns"].tolist())
        assert set(part.read("meta.netns", 0, FOREVER)["id"].tolist()) == netns
        assert session.facts(part)["host"] == "testhost"
        # The clock goes on from the last pair before the interval.
        clock = part.read("meta.clock", 0, FOREVER)["t"]
        pairs = rows["meta.clock"]["t"]
        inside = pairs[(pairs >= begin) & (pairs < end)]
        before = pairs[pairs < begin][-1:]
        assert clock.tolist() == ([*before.tolist(), *inside.tolist()] or pairs[:1].tolist())
        if end > T0:
            assert session.coverage(part)["tcp", ""].status == "missing"


def profile(path: Path, seed: int, prefix: str) -> None:
    """Samples with stacks and names, numbered from 1 in the order they were met."""
    rng = np.random.default_rng(seed)
    words = [f"{prefix}{i}" for i in range(6)] + ["common"]
    rng.shuffle(words)
    with Writer(path) as writer:
        head(writer)
        for i in range(20):
            t = T0 + seed * 100 + i * SECOND // 4
            writer.append(
                SAMPLE, SAMPLE.rows(t=[t], stack=[rng.integers(1, 5)], name=[rng.integers(0, 8)])
            )
        ids = np.arange(1, 5)
        writer.append(
            STACK, STACK.rows(t=np.full(4, T0), id=ids, frames=rng.integers(1, 8, (4, 3)))
        )
        text = st.META_STRING.rows(t=np.full(7, T0), id=np.arange(1, 8), text=words)
        writer.append(st.META_STRING, text)


def strings(source: FileSession) -> dict[int, str]:
    rows = source.read("meta.string", 0, FOREVER)
    assert len(rows) == len(np.unique(rows["id"]))
    return dict(zip(rows["id"].tolist(), rows["text"].tolist(), strict=True))


def resolved(source: FileSession) -> list[tuple[Any, ...]]:
    """Samples with words instead of numbers."""
    text = strings(source)
    stacks = {
        int(r["id"]): tuple(text.get(f) for f in r["frames"].tolist())
        for r in source.read("meta.path", 0, FOREVER)
    }
    return [
        (int(r["t"]), stacks.get(int(r["stack"])), text.get(int(r["name"])))
        for r in source.read("profile.sample", 0, FOREVER)
    ]


def test_references_of_references_are_kept_and_nothing_else(tmp_path: Path) -> None:
    profile(tmp_path / "p.mcap", 1, "a")
    with open_file(tmp_path / "p.mcap") as source:
        whole = resolved(source)
        for begin in range(20):
            at = T0 + 100 + begin * SECOND // 4
            cut(source, tmp_path / "c.mcap", at, at + 1, force=True)
            with open_file(tmp_path / "c.mcap") as part:
                assert resolved(part) == whole[begin : begin + 1]
                sample = part.read("profile.sample", 0, FOREVER)[0]
                stacks = part.read("meta.path", 0, FOREVER)
                assert stacks["id"].tolist() == [sample["stack"]]
                needed = {int(sample["name"]), *stacks["frames"].ravel().tolist()} - {0}
                assert set(strings(part)) == needed


@settings(max_examples=15, deadline=None)
@given(some.lists(some.integers(0, 5), min_size=2, max_size=4, unique=True))
def test_ids_that_mean_different_things_are_given_anew(
    tmp_path_factory: pytest.TempPathFactory, seeds: list[int]
) -> None:
    folder = tmp_path_factory.mktemp("ids")
    paths = [folder / f"{s}.mcap" for s in seeds]
    expected = []
    for path, number in zip(paths, seeds, strict=True):
        profile(path, number, "abcdef"[number])
        with open_file(path) as source:
            expected += resolved(source)
    assert merge(paths, folder / "m.mcap")[1] == ()
    with open_file(folder / "m.mcap") as merged:
        assert resolved(merged) == sorted(expected, key=lambda row: row[0])
        assert merged.verify()


def test_an_id_nobody_explains_takes_no_other_meaning(tmp_path: Path) -> None:
    for name, id in (("a", 5), ("b", 6)):
        with Writer(tmp_path / f"{name}.mcap") as writer:
            head(writer)
            at = T0 + ord(name)
            writer.append(SAMPLE, SAMPLE.rows(t=[at, at], stack=[1, 1], name=[5, 6]))
            writer.append(st.META_STRING, st.META_STRING.rows(t=[T0], id=[id], text=[name]))
    merge([tmp_path / "a.mcap", tmp_path / "b.mcap"], tmp_path / "m.mcap")
    with open_file(tmp_path / "m.mcap") as merged:
        assert [name for _, _, name in resolved(merged)] == ["a", None, None, "b"]


@settings(max_examples=25, deadline=None)
@given(
    cuts=some.lists(some.integers(1, 12 * SECOND - 1), min_size=1, max_size=3, unique=True),
    overlap=some.integers(0, 3 * SECOND),
)
def test_parts_merged_are_the_whole(
    host: tuple[Path, dict[str, np.ndarray]], cuts: list[int], overlap: int
) -> None:
    """Whether the parts of one recording touch or overlap, each row comes back once."""
    path, rows = host
    limits = [0, *sorted(cuts), 12 * SECOND]
    parts = []
    with open_file(path) as source:
        for i, (a, b) in enumerate(pairwise(limits)):
            parts.append(path.parent / f"part{i}.mcap")
            cut(source, parts[-1], T0 + a, T0 + b + overlap, force=True)
        expected = {n: source.read(n, 0, FOREVER) for n in source.streams}
    merge(parts[::-1], path.parent / "merged.mcap", force=True)
    with open_file(path.parent / "merged.mcap") as merged:
        for name in rows:
            assert same(np.sort(merged.read(name, 0, FOREVER)), np.sort(expected[name])), name
        sums = merged.read("rollup.lane", 0, FOREVER)
        assert covered(sums).tolist() == covered(expected["rollup.lane"]).tolist()
        assert np.allclose(
            np.sort(sums, order=("t", "lane"))["value"],
            np.sort(expected["rollup.lane"], order=("t", "lane"))["value"],
        )


@settings(deadline=None)
@given(some.lists(some.lists(some.integers(0, 4), max_size=8), min_size=1, max_size=3),
       some.booleans())  # fmt: skip
def test_a_union_counts_a_row_as_often_as_the_part_that_has_most(
    parts: list[list[int]], text: bool
) -> None:
    stream = st.MARKER if text else st.CPU_LOAD
    made = [
        stream.rows(t=np.array(p, np.uint64), **({"label": [str(v) for v in p]} if text else {}))
        if p
        else stream.empty()
        for p in parts
    ]
    expected: Counter[int] = Counter()
    for p in parts:
        expected |= Counter(p)
    found = union(made)["t"].tolist()
    assert found == sorted(found)
    assert Counter(found) == expected


def refused(paths: list[Path], out: Path, words: str) -> None:
    with pytest.raises(RecordingError, match=words) as e:
        merge(paths, out)
    assert e.value.exit_code == 2
    assert not out.exists()


def test_what_cannot_be_one_recording_is_refused(tmp_path: Path) -> None:
    write_host(tmp_path / "a.mcap", 3)
    write_host(tmp_path / "boot.mcap", 3, boot_id="b-2")
    write_host(tmp_path / "agent.mcap", 3, agent_pid="78")
    write_host(tmp_path / "none.mcap", 3, boot_id="")
    a, out = tmp_path / "a.mcap", tmp_path / "m.mcap"
    refused([a, tmp_path / "boot.mcap"], out, "another host or boot")
    refused([a, tmp_path / "agent.mcap"], out, "at the same time by two agents")
    refused([a, tmp_path / "none.mcap"], out, "does not say of which boot")
    other = Stream("marker", "", "", (_T, Field("label", "<u4", "count", "")))
    with Writer(tmp_path / "other.mcap") as writer:
        writer.append(st.META_SESSION, facts())
        writer.declare(other)
    with Writer(tmp_path / "marks.mcap") as writer:
        writer.append(st.META_SESSION, facts())
        writer.declare(st.MARKER)
    refused([tmp_path / "marks.mcap", tmp_path / "other.mcap"], out, "declares marker")


def test_a_pause_between_recordings_is_not_quiet(tmp_path: Path) -> None:
    write_host(tmp_path / "a.mcap", range(5))
    write_host(tmp_path / "b.mcap", range(20, 25), agent_pid="78")
    merge([tmp_path / "b.mcap", tmp_path / "a.mcap"], tmp_path / "m.mcap")
    with open_file(tmp_path / "m.mcap") as merged:
        status = {
            s: session.coverage(merged, T0 + s * SECOND)["softirq", ""].status
            for s in (1, 4, 6, 19, 22)
        }
        assert status == {1: "attached", 4: "attached", 6: "off", 19: "off", 22: "attached"}
        assert session.coverage(merged)["tcp", ""].status == "missing"


def test_an_older_recording_gains_the_newer_fields(tmp_path: Path) -> None:
    from dataclasses import replace

    older = replace(st.CPU_LOAD, fields=st.CPU_LOAD.fields[:4])
    for name, stream, at in (("old", older, T0), ("new", st.CPU_LOAD, T0 + SECOND)):
        with Writer(tmp_path / f"{name}.mcap") as writer:
            head(writer)
            writer.append(stream, stream.rows(t=[at], running=[3]))
    merge([tmp_path / "old.mcap", tmp_path / "new.mcap"], tmp_path / "m.mcap")
    with open_file(tmp_path / "m.mcap") as merged:
        rows = merged.read("cpu.load", 0, FOREVER)
        assert rows.dtype == st.CPU_LOAD.dtype
        assert rows["running"].tolist() == [3, 3]


def test_damage_is_carried_on_as_loss(tmp_path: Path) -> None:
    path = tmp_path / "d.mcap"
    write_host(path, 10)
    with open_file(path) as source:
        offset = source._layout.table.row(4)[0]
    data = bytearray(path.read_bytes())
    data[offset + 300] ^= 1
    path.write_bytes(data)
    for begin, end, lost in ((0, FOREVER, 1), (T0, T0 + 3 * SECOND, 0), (T0 + SECOND, FOREVER, 1)):
        with open_file(path) as source:
            cut(source, tmp_path / "c.mcap", begin, end, force=True)
        with open_file(tmp_path / "c.mcap") as part:
            assert part.lost().get("softirq.cpu", 0) == lost
            assert not part.problems
    _, problems = merge([path], tmp_path / "m.mcap")
    assert len(problems) == 1
    with open_file(tmp_path / "m.mcap") as merged:
        assert merged.lost()["softirq.cpu"] == 1


def test_a_cut_refuses_what_makes_no_sense(tmp_path: Path) -> None:
    path, out = tmp_path / "a.mcap", tmp_path / "out.mcap"
    write_host(path, 2)
    before = path.read_bytes()
    os.symlink(path, tmp_path / "link.mcap")
    with open_file(path) as source:
        for target in (path, tmp_path / "link.mcap"):
            with pytest.raises(RecordingError, match="name another output"):
                cut(source, target, 0, FOREVER, force=True)
        with pytest.raises(RecordingError, match="has no stream nothing; it has"):
            cut(source, out, 0, FOREVER, ["nothing"])
        with pytest.raises(RecordingError, match="empty"):
            cut(source, out, T0, T0)
        out.write_text("mine")
        with pytest.raises(RecordingError, match="exists"):
            cut(source, out, 0, FOREVER)
    assert out.read_text() == "mine"
    assert path.read_bytes() == before


def test_a_cut_that_fails_leaves_nothing_behind(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_host(tmp_path / "a.mcap", 2)
    with open_file(tmp_path / "a.mcap") as source:
        monkeypatch.setattr(source, "windows", lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            cut(source, tmp_path / "out.mcap", 0, FOREVER)
    assert not (tmp_path / "out.mcap").exists()


def test_markers_and_unknown_streams_are_cut_too(tmp_path: Path) -> None:
    with Writer(tmp_path / "a.mcap") as writer:
        head(writer)
        writer.append(st.MARKER, st.MARKER.rows(t=[T0, T0 + SECOND], label=["x", "y"]))
        for stream, rows in host_second(0).items():
            writer.append(stream, rows)
    with open_file(tmp_path / "a.mcap") as source:
        cut(source, tmp_path / "b.mcap", T0 + 1, FOREVER)
    with open_file(tmp_path / "b.mcap") as part:
        assert part.read("marker", 0, FOREVER)["label"].tolist() == ["y"]
