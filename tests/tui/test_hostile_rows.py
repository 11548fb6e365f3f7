"""Rows that no agent writes, from a file or a socket: the screens stay whole and say something."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as some

from dsprobe.recordings import streams as st
from dsprobe.recordings.cudastreams import CUDA_STREAMS
from dsprobe.recordings.model import Field, Rows, Stream
from dsprobe.tui.control import every_screen
from dsprobe.tui.draw import columns, draw
from dsprobe.tui.glyphs import ASCII, BLOCKS
from dsprobe.tui.lines import text_of
from dsprobe.tui.observer import Observer
from dsprobe.tui.player import Player
from dsprobe.tui.text import once
from tests.tui.memory import MemorySession

SECOND = 10**9
BOOT = 1_000 * SECOND
NAMES = ("gpu.memory", "gpu.stack", "gpu.age", "cuda.thread", "cuda.stream", "cuda.calls",
         "cuda.open", "cuda.call", "meta.process", "meta.thread", "meta.stack", "meta.frame",
         "meta.string")  # fmt: skip


def arbitrary(stream: Stream, seed: int, n: int) -> Rows:
    """``n`` rows of any bits at all, but in order of time."""
    random = np.random.default_rng(seed)
    rows = stream.empty(n)
    for field in stream.fields:
        if field.is_text:
            words = ("", "\x1b[2J", "世界", "a" * 3000, "/x/y.py", "\x00\n")
            rows[field.name] = random.choice(np.array(words, object), n)
            continue
        kind = np.dtype(field.type)
        shape = (n, field.shape) if field.shape else (n,)
        bits = random.integers(0, 256, (*shape, kind.itemsize), np.uint8)
        small = random.integers(0, 4, shape).astype(kind)
        values = bits.view(kind)[..., 0]
        rows[field.name] = np.where(random.random(shape) < 0.6, small, values)
    rows["t"] = np.sort(BOOT + random.integers(0, 120 * SECOND, n).astype(np.uint64))
    return rows


def everything(session: MemorySession) -> None:
    """All screens at some sizes and orders, live or not."""
    for screen in every_screen():
        for order in getattr(screen, "orders", ("",)):
            if order:
                screen.order, screen.all_open = order, True  # type: ignore[attr-defined]
            player = Player(lambda: 0, *session.span(), growing=False, live=False)
            player.jump(BOOT + 110 * SECOND)
            observer = Observer(session, player, screen)
            for width, height, glyphs in ((80, 24, BLOCKS), (13, 7, ASCII), (200, 60, BLOCKS)):
                player.resize(columns(screen, width, height))
                while (snap := observer.look()).body.pending:
                    pass
                lines = [text_of(x) for x in draw(snap, screen, glyphs, width, height)]
                assert [len(line) for line in lines] == [width] * height
                assert all(line.isprintable() for line in lines)
    assert once(session, 100, BLOCKS).replace("\n", "").isprintable()


@settings(max_examples=25, deadline=None)
@given(some.integers(0, 2**32), some.integers(1, 60))
def test_any_bits_are_drawn(seed: int, n: int) -> None:
    session = MemorySession(live=False)
    session.append("meta.coverage", t=BOOT, probe=["memory", "launches", "calls"], program="",
                   status=0)  # fmt: skip
    session.append("cpu.load", t=BOOT + np.arange(120) * SECOND, dt=SECOND)
    for i, name in enumerate(NAMES):
        session.append_rows(st.STREAMS[name], arbitrary(st.STREAMS[name], seed + i, n))
    session.refresh()
    everything(session)


@pytest.mark.parametrize("missing", ["live", "process", "hist", "id", "function", "kind", "shed"])
def test_streams_of_another_version_are_drawn(missing: str) -> None:
    session = MemorySession(live=False)
    session.append("cpu.load", t=BOOT + np.arange(120) * SECOND, dt=SECOND)
    for i, whole in enumerate(CUDA_STREAMS):
        fields = tuple(f for f in whole.fields if f.name != missing)
        fields += (Field("new", "<u4", "count", "of a later version"),)
        part = Stream(whole.name, whole.doc, whole.source, fields)
        session.append_rows(part, arbitrary(part, i, 30))
    session.refresh()
    everything(session)
