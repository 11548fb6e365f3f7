"""Frames: what goes in comes out, and no bytes make reading cost more than they are worth."""

import dataclasses

import msgpack
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as some

from dsprobe.recordings import frames
from dsprobe.recordings.model import Field, Stream
from dsprobe.recordings.streams import MARKER, SOFTIRQ_CPU, STREAMS
from tests.recordings.sample import random_rows, same

CODINGS = ("", frames.PLANES)


@pytest.mark.parametrize("name", STREAMS)
@pytest.mark.parametrize("coding", CODINGS)
@pytest.mark.parametrize("n", [0, 1, 257])
def test_every_stream_comes_back(name: str, coding: str, n: int) -> None:
    rows = random_rows(STREAMS[name], n)
    data = frames.encode(STREAMS[name], rows, coding)
    assert same(frames.decode(STREAMS[name], data), rows)
    assert frames.count(data) == n


@pytest.mark.parametrize("coding", CODINGS)
def test_times_that_go_back_come_back(coding: str) -> None:
    rows = MARKER.rows(t=[5, 2**62 - 1, 0, 7], label=list("abcd"))
    assert same(frames.decode(MARKER, frames.encode(MARKER, rows, coding)), rows)


def test_a_newer_writer_and_an_older_one() -> None:
    newer = dataclasses.replace(
        SOFTIRQ_CPU, fields=(*SOFTIRQ_CPU.fields, Field("later", "<u4", "count", "new"))
    )
    old = random_rows(SOFTIRQ_CPU, 5)
    seen = frames.decode(newer, frames.encode(SOFTIRQ_CPU, old))
    assert (seen["busy"] == old["busy"]).all()
    assert not seen["later"].any()
    new = random_rows(newer, 5)
    seen = frames.decode(SOFTIRQ_CPU, frames.encode(newer, new))
    assert (seen["busy"] == new["busy"]).all()


def test_text_that_is_not_utf8_is_kept_readable() -> None:
    rows = MARKER.rows(t=[1], label=["caf\udce9"])
    assert frames.decode(MARKER, frames.encode(MARKER, rows))["label"][0] == "caf?"


ONE = frames.encode(MARKER, random_rows(MARKER, 3), frames.PLANES)


@settings(deadline=None)
@given(some.binary(max_size=64) | some.builds(lambda at, b: ONE[:at] + b + ONE[at + len(b) :],
       some.integers(0, len(ONE)), some.binary(max_size=9)))  # fmt: skip
def test_any_bytes_are_a_frame_or_a_frame_error(data: bytes) -> None:
    try:
        rows = frames.decode(MARKER, data)
    except frames.FrameError:
        return
    assert rows.dtype == MARKER.dtype


T = np.arange(3, dtype="<u8").tobytes()


@pytest.mark.parametrize(
    "body",
    [
        {"n": 1 << 20, "cols": {"t": b""}},
        {"n": 1 << 40, "cols": {}},
        {"n": -1, "cols": {}},
        {"n": True, "cols": {}},
        {"cols": {"t": T}},
        {"n": 3, "cols": {}},
        {"n": 3, "cols": {"t": T[:-1]}},
        {"n": 3, "cols": {"t": T, "label": ["a", "b"]}},
        {"n": 3, "cols": {"t": T, "label": ["a", "b", 3]}},
        {"n": 3, "cols": {"t": T, "label": [[[]], [], []]}},
        {"n": 3, "cols": [1, 2]},
        {"n": 3, "enc": "later", "cols": {"t": T}},
        {"n": 1, "cols": {"t": b"\xff" * 8, "label": [""]}},
        [],
        7,
    ],
)
def test_nonsense_is_refused(body: object) -> None:
    with pytest.raises(frames.FrameError):
        frames.decode(MARKER, msgpack.packb(body))


def test_unknown_keys_and_columns_are_skipped() -> None:
    body = {"n": 3, "of": {"a": [1, {}]}, "cols": {"x": [[], {}], "t": T, "label": ["", "b", ""]}}
    assert frames.decode(MARKER, msgpack.packb(body))["label"].tolist() == ["", "b", ""]


WIDE = Stream("wide", "", "", (Field("t", "<u8", "", ""), Field("w", "<u8", "", "", 4096)))


@pytest.mark.parametrize(
    "data",
    [
        b"\x82\xa1n\x03\xa4cols" + b"\x91" * 4_000_000,
        b"\x82" + b"\xdc\xff\xff" * 1_000_000,
        b"\xdf\xff\xff\xff\xff" + b"\x80" * 1_000_000,
        msgpack.packb({"n": 3000, "cols": {"t": bytes(8 * 3000)}}),
        msgpack.packb({"n": 1 << 20, "cols": {"t": bytes(8 << 20)}}),
    ],
)
def test_small_bytes_do_not_become_large_rows(data: bytes) -> None:
    import tracemalloc

    tracemalloc.start()
    try:
        with pytest.raises(frames.FrameError):
            frames.decode(WIDE, data)
        assert tracemalloc.get_traced_memory()[1] < 3 * len(data) + (1 << 20)
    finally:
        tracemalloc.stop()
