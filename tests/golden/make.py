"""Makes the golden recording of the current format version: ``python -m tests.golden.make``.

A golden file is made once per format version, when the version changes, and kept for ever: readers
must go on understanding it.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable
from pathlib import Path

import numpy as np

from dsprobe.recordings import container as c
from dsprobe.recordings.model import Rows, Stream
from dsprobe.recordings.streams import STREAMS
from dsprobe.recordings.writer import Writer

FOLDER = Path(__file__).parent
T0 = 1_000_000_000_000
SECOND = 10**9
BATCHES, BATCH = 3, 7


def name() -> str:
    minor = f".{c.FORMAT_MINOR}" if c.FORMAT_MINOR else ""
    return f"v{c.FORMAT_MAJOR}{minor}.mcap"


def rows(stream: Stream, batch: int) -> Rows:
    """The same rows with every version of every library: plain arithmetic."""
    made = stream.empty(BATCH)
    k = np.arange(BATCH) + BATCH * batch
    for i, f in enumerate(stream.fields):
        if f.name == "t":
            made["t"] = T0 + batch * SECOND + np.arange(BATCH) * 1_234_567
        elif f.is_text:
            made[f.name] = [f"{f.name} {n % 4} é" for n in k]
        elif f.type.startswith("S"):
            made[f.name] = [b"task-%d" % (n % 4) for n in k]
        else:
            cells = np.arange(max(f.shape, 1))
            values = (k[:, None] * 37 + cells * 5 + i) % (len(f.names) or 100)
            made[f.name] = values if f.shape else values[:, 0]
    return made


def write(path: Path, streams: Iterable[Stream]) -> None:
    """Three seconds of ``streams``; the last frame of each is missing one before it."""
    streams = list(streams)
    with Writer(path, rollups=False) as writer:
        for stream in streams:
            writer.declare(stream)
        for batch in range(BATCHES):
            for stream in streams:
                writer.append(stream, rows(stream, batch), missing=int(batch == BATCHES - 1))
            writer.flush()


def main() -> None:
    path = FOLDER / name()
    if path.exists():
        sys.exit(f"{path} exists: raise FORMAT_MINOR or FORMAT_MAJOR, files of old versions stay")
    write(path, STREAMS.values())


if __name__ == "__main__":
    main()
