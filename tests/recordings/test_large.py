"""However much comes at once, each way of writing a recording makes one that is read whole."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from dsprobe.agent.commands.capture import Capture
from dsprobe.recordings import container as c
from dsprobe.recordings import cudastreams as cuda
from dsprobe.recordings import frames, wire
from dsprobe.recordings import streams as st
from dsprobe.recordings.cut import cut
from dsprobe.recordings.filesession import FileSession
from dsprobe.recordings.framing import chunked
from dsprobe.recordings.merge import merge
from dsprobe.recordings.model import Rows, Stream
from dsprobe.recordings.writer import Writer
from tests.recordings.sample import FOREVER, SECOND, T0, facts, same

N = 400_000


def launches() -> Rows:
    """Much alike: 24 MB that pack into little."""
    rows = cuda.CUDA_LAUNCH.empty(N)
    rows["t"] = T0 + np.arange(N, dtype=np.uint64) * 100_000
    rows["process"], rows["thread"], rows["grid"], rows["block"] = 1, 2, 8, 128
    return rows


def histograms() -> Rows:
    """Wide rows of noise."""
    rows = cuda.CUDA_THREAD.empty(N // 4)
    rows["t"] = T0 + np.arange(len(rows), dtype=np.uint64)
    rows["hist"] = np.random.default_rng(1).integers(0, 1 << 32, rows["hist"].shape, np.uint32)
    return rows


def empty_texts() -> Rows:
    """Next to nothing in a frame, much in memory."""
    rows = cuda.META_FRAME.empty(N // 2)
    rows["t"], rows["id"] = T0 + np.arange(len(rows), dtype=np.uint64), np.arange(len(rows))
    for name in ("function", "file", "module", "build_id"):
        rows[name] = ""
    return rows


def long_texts() -> Rows:
    """Nearly all of it in the first rows, in characters of four bytes."""
    rows = st.META_STRING.empty(2_000)
    rows["t"], rows["id"] = T0 + np.arange(len(rows), dtype=np.uint64), np.arange(len(rows))
    rows["text"] = ["\U0001f600" * (frames.MAX_TEXT if i < 100 else 1) for i in range(len(rows))]
    return rows


def rare() -> Rows:
    """One row in ten seconds, so a frame for each."""
    rows = st.TCP_RETRANSMIT.empty(2_000)
    rows["t"] = T0 + np.arange(len(rows), dtype=np.uint64) * (10 * SECOND)
    return rows


MAKERS = (
    (cuda.CUDA_LAUNCH, launches), (cuda.CUDA_THREAD, histograms), (cuda.META_FRAME, empty_texts),
    (st.META_STRING, long_texts), (st.TCP_RETRANSMIT, rare),
)  # fmt: skip


def agent(stream: Stream, rows: Rows, size: int) -> Iterator[dict[str, Any]]:
    """Messages of an agent: frames of ``size`` rows."""
    receiver = wire.Receiver(wire.MAX_MESSAGE)
    for seq, at in enumerate(range(0, len(rows), size)):
        yield from receiver.feed(wire.frame(frames.make(stream, seq, rows[at : at + size])))


def recorded(path: Path, stream: Stream, rows: Rows) -> None:
    """As record and save write what an agent sends."""
    cost = frames.cost(stream, 1) + 4 * max((len(t) for t in rows["text"]), default=0) if (
        stream is st.META_STRING) else frames.cost(stream, 1)  # fmt: skip
    messages = list(agent(stream, rows, max((4 << 20) // cost, 1)))
    connection = SimpleNamespace(
        streams={}, path="", receive=lambda _: messages, give_up=lambda why: pytest.fail(why)
    )
    with Writer(path) as writer:
        capture = Capture(connection, writer)  # type: ignore[arg-type]
        writer.append(st.META_SESSION, facts())
        capture.step(0)
    assert not capture.lost


def appended(path: Path, stream: Stream, rows: Rows) -> None:
    with Writer(path) as writer:
        writer.append(st.META_SESSION, facts())
        writer.append(stream, rows)


def whole(path: Path, stream: Stream, rows: Rows) -> bool:
    with FileSession(path) as f:
        return f.verify() and not f.lost() and same(f.read(stream.name, 0, FOREVER), rows)


@pytest.mark.parametrize("write", [appended, recorded])
@pytest.mark.parametrize(("stream", "make"), MAKERS)
def test_any_amount_at_once_is_read_whole(
    tmp_path: Path, stream: Stream, make: Callable[[], Rows],
    write: Callable[[Path, Stream, Rows], None],
) -> None:  # fmt: skip
    rows = make()
    first = tmp_path / "first.mcap"
    write(first, stream, rows)
    assert whole(first, stream, rows)

    middle = int(rows["t"][len(rows) // 2])
    parts = [tmp_path / "a.mcap", tmp_path / "b.mcap"]
    with FileSession(first) as f:
        if not stream.name.startswith("meta."):  # of those a part keeps what its rows refer to
            cut(f, parts[0], 0, middle)
            cut(f, parts[1], middle, FOREVER)
            assert whole(parts[0], stream, rows[rows["t"] < middle])
            assert whole(parts[1], stream, rows[rows["t"] >= middle])
    whole_of = [p for p in parts if p.exists()] or [first]
    merged, again = tmp_path / "m.mcap", tmp_path / "again.mcap"
    assert merge(whole_of, merged)[1] == ()
    assert whole(merged, stream, rows)
    assert merge([merged], again)[1] == ()
    assert whole(again, stream, rows)


def test_a_chunk_holds_so_many_frames() -> None:
    frame = frames.make(st.MARKER, 0, st.MARKER.rows(t=[T0], label=["a"]))
    groups = list(chunked([(st.MARKER, frame)] * (c.MAX_MESSAGES + 1)))
    assert max(map(len, groups)) < c.MAX_MESSAGES
    assert sum(map(len, groups)) == c.MAX_MESSAGES + 1
