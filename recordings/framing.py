"""How rows are parted into frames, and frames into chunks, so that readers take each of them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
import numpy.typing as npt

from dsprobe.recordings import container as c
from dsprobe.recordings import frames
from dsprobe.recordings.assemble import join
from dsprobe.recordings.frames import Frame
from dsprobe.recordings.model import Rows, Stream

FRAME_BYTES = 1 << 20  # of rows in memory: a frame is full
CHUNK_BYTES = 2 << 20  # of frames, or of their rows without long texts: a chunk is full
MESSAGE_BYTES = c.HEAD.size + 22  # that a frame takes in a chunk beside its own


def framed(stream: Stream, span: int, seq: int, parts: Sequence[Rows]) -> list[Frame]:
    """``parts`` as frames numbered from ``seq``, none over ``span`` ns or too many bytes long."""
    rows = parts[0] if len(parts) == 1 else np.concatenate(parts)
    t = rows["t"].astype(np.int64)
    long = int(t.max()) - int(t.min()) > span
    if long:
        rows = join(stream, [rows])
        t = rows["t"].astype(np.int64)
    sums = np.cumsum(_sizes(stream, rows))
    made: list[Frame] = []
    at = 0
    while at < len(rows):
        full = (int(sums[at - 1]) if at else 0) + FRAME_BYTES
        end = max(int(np.searchsorted(sums, full, "right")), at + 1)
        if long:
            end = min(end, int(np.searchsorted(t, t[at] + span, "right")))
        first, last = int(t[at:end].min()), int(t[at:end].max())
        data = frames.encode(stream, rows[at:end], frames.PLANES)
        made.append(Frame(stream.name, seq + len(made), first, last, end - at, data))
        at = end
    return made


def _sizes(stream: Stream, rows: Rows) -> npt.NDArray[np.int64]:
    """Bytes that each row takes at most, in memory and in a frame."""
    sizes = np.full(len(rows), frames.cost(stream, 1), np.int64)
    for f in stream.fields:
        if f.is_text:
            # A character has up to four bytes, as UTF-8 and in memory.
            length = np.fromiter(map(len, rows[f.name]), np.int64, len(rows))
            sizes += 4 * np.minimum(length, frames.MAX_TEXT)
    return sizes


def chunked(made: Sequence[tuple[Stream, Frame]]) -> Iterator[list[Frame]]:
    """``made`` in parts that each make a chunk."""
    group: list[Frame] = []
    used = 0
    for stream, frame in made:
        # Rows of many short texts take far more memory than their frame.
        size = max(len(frame.data), frames.cost(stream, frame.n)) + MESSAGE_BYTES
        if group and used + size > CHUNK_BYTES:
            yield group
            group, used = [], 0
        group.append(frame)
        used += size
    if group:
        yield group
