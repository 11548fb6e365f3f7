"""How large recordings are, and how quickly they open, seek and draw."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TypeVar

import numpy as np

from benchlib.cost import busy_network
from benchlib.model import Context, Row
from benchlib.tracers import dsprobe, running
from dsprobe.probes.probe import Batch
from dsprobe.probes.registry import PROBES
from dsprobe.probes.softirq import Softirq
from dsprobe.probes.tcp import Tcp
from dsprobe.probes.tracer import Tracer
from dsprobe.recordings.filesession import open_file
from dsprobe.recordings.model import Rows
from dsprobe.recordings.session import FOREVER
from dsprobe.recordings.streams import SOFTIRQ_SLOW, TCP_RETRANSMIT
from dsprobe.recordings.writer import Writer
from dsprobe.tui.observer import Observer
from dsprobe.tui.player import Player
from tests.support.netns import pair

T = TypeVar("T")

_DRAIN, _FLUSH = 0.05, 0.5  # s, as the agent and record do
_ROWS, _ROWS_QUICK = 20_000_000, 1_000_000
_SPAN = 3600 * 10**9  # of the large file
_SEEKS = 50


def files(ctx: Context) -> Iterator[Row]:
    """Event rows of real softirqs and retransmissions; a large file made of the same rows."""
    yield from _whole(ctx)
    trace = _trace(6 if ctx.quick else 20)
    for stream in (SOFTIRQ_SLOW, TCP_RETRANSMIT):
        batches = [b for b in trace if b[0] is stream]
        path = ctx.folder / f"{stream.name}.mcap"
        _write(path, batches, int(_FLUSH / _DRAIN))
        n = sum(len(rows) for _, rows in batches)
        size = path.stat().st_size / n
        yield Row(f"file, {stream.name} events", "bytes/event", size, 6, note=f"{n:,} events")
    slow = np.concatenate([rows for stream, rows in trace if stream is SOFTIRQ_SLOW])
    yield from _large(ctx, slow)


def _whole(ctx: Context) -> Iterator[Row]:
    """What ``dsprobe record`` writes with all probes under load."""
    path = ctx.folder / "recording.mcap"
    with pair() as p, busy_network(p), running(dsprobe(ctx, "dsprobe", [x.name for x in PROBES])):
        time.sleep(4 if ctx.quick else 20)
    with open_file(path) as session:
        start, end = session.span()
        softirqs = session.read("softirq.cpu", 0, FOREVER)["count"].sum()
        polls = session.read("net.napi", 0, FOREVER)["polls"].sum()
        events = int(softirqs + polls) + len(session.read("tcp.retransmit", 0, FOREVER))
    size = path.stat().st_size
    yield Row("file, all probes under load", "bytes/s", size / (end - start) * 1e9)
    note = f"{events:,} softirqs, polls and retransmissions, most of them summed up"
    yield Row("file, all probes under load", "bytes/event seen", size / events, note=note)


def _trace(seconds: float) -> list[Batch]:
    """Every softirq run and wait, and every retransmission, of a busy network."""
    tracer = Tracer([Softirq(slow_ns=0), Tcp()])
    out: list[Batch] = []
    try:
        bad = [c for c in tracer.load() if c.status != "attached"]
        if bad:
            raise RuntimeError(f"{bad[0].probe} is {bad[0].status}: {bad[0].reason}")
        # Without segmentation offload a packet is a segment: many small losses, many events.
        with pair(segmentation=False) as p, busy_network(p, per_second=10_000, loss=5):
            end = time.monotonic() + seconds
            while time.monotonic() < end:
                time.sleep(_DRAIN)
                out.extend(tracer.drain())
    finally:
        tracer.close()
    return out


def _write(path: Path, batches: list[Batch], per_flush: int) -> None:
    with Writer(path) as writer:
        for i, (stream, rows) in enumerate(batches):
            writer.append(stream, np.ascontiguousarray(rows))
            if i % per_flush == per_flush - 1:
                writer.flush()


def _large(ctx: Context, rows: Rows) -> Iterator[Row]:
    """An hour that holds ``rows`` over and over."""
    total = _ROWS_QUICK if ctx.quick else _ROWS
    path = ctx.folder / "large.mcap"
    ctx.say(f"bench: writing {total:,} rows")
    step = _SPAN // total
    batch = max(int(_FLUSH * 1e9) // step, 1)
    rows = np.sort(rows, order="t")
    gaps = np.diff(rows["t"].astype(np.int64), append=rows["t"][-1:].astype(np.int64))
    # The gaps of the real events, stretched to fill the hour.
    gaps = np.maximum(gaps * step // max(int(gaps.mean()), 1), 1)
    t, start = 10**9, time.perf_counter()
    with Writer(path) as writer:
        for at in range(0, total, batch):
            pick = np.arange(at, min(at + batch, total)) % len(rows)
            part = rows[pick]
            part["t"] = t + np.cumsum(gaps[pick])
            t = int(part["t"][-1])
            writer.append(SOFTIRQ_SLOW, part)
            writer.flush()
    wrote = time.perf_counter() - start
    millions = f"{total / 1e6:g} M rows"
    yield Row(f"file, {millions}: written", "M rows/s", total / wrote / 1e6)
    yield Row(f"file, {millions}: size", "bytes/event", path.stat().st_size / total)
    yield Row(f"file, {millions}: open", "s", _median(ctx.rounds, lambda: open_file(path).close()),
              0.3)  # fmt: skip
    yield from _seeks(path, millions)
    yield from _frames(path, millions)


def _seeks(path: Path, millions: str) -> Iterator[Row]:
    """To moments of rows all over the file, each time for a ten-thousandth of it."""
    rng = np.random.default_rng(1)
    with open_file(path) as session:
        start, end = session.span()
        width = (end - start) // 10_000
        took = []
        for moment in rng.integers(start, end - width, _SEEKS).tolist():
            began = time.perf_counter()
            found = session.read(SOFTIRQ_SLOW.name, moment, moment + width)["t"]
            took.append(time.perf_counter() - began)
            if len(found) and not moment <= found[0] <= found[-1] < moment + width:
                raise RuntimeError(f"a seek to {moment} found {found[0]} to {found[-1]}")
    note = f"worst of {_SEEKS}: {1000 * max(took):.1f}"
    yield Row(f"file, {millions}: seek", "ms", 1000 * statistics.median(took), 20, note=note)


def _frames(path: Path, millions: str) -> Iterator[Row]:
    """What the screen does after opening and after a seek, without the drawing."""
    began = time.perf_counter()
    with open_file(path) as session:
        start, end = session.span()
        player = Player(time.monotonic_ns, start, end, growing=False, live=False)
        player.resize(120)
        player.fit()
        observer = Observer(session, player)
        observer.look()
        yield Row(f"screen, {millions}: overview", "s", time.perf_counter() - began, 1)
        for _ in range(64):
            player.zoom_by(1)
        for _ in range(4):
            player.zoom_by(-1)
        took = []
        for share in (0.9, 0.1, 0.5, 0.7, 0.3):
            player.jump(start + int(share * (end - start)))
            began = time.perf_counter()
            observer.look()
            took.append(time.perf_counter() - began)
        note = f"worst of {len(took)}: {1000 * max(took):.1f}"
        yield Row(f"screen, {millions}: frame after a jump", "ms", 1000 * statistics.median(took),
                  50, note=note)  # fmt: skip


def _median(times: int, action: Callable[[], T]) -> float:
    """Median seconds of ``action``."""
    took = []
    for _ in range(times):
        began = time.perf_counter()
        action()
        took.append(time.perf_counter() - began)
    return statistics.median(took)
