"""What a simulated driver was really asked: reads the files that it keeps (libcuda/truth.c).

They can be read at any time, while a process runs or after it was killed.
``python -m tests.simgpu.truth FOLDER [--events]`` prints a JSON line for each process.
"""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

KINDS = (
    "device", "pitch", "managed", "async", "pool", "physical", "mapped", "reserved", "host",
    "registered", "ipc",
)  # fmt: skip
ON_DEVICE = KINDS[:6]
"""Kinds that take memory of a device."""

EVENT = np.dtype(
    [
        ("begun", "<u8"), ("ended", "<u8"), ("gpu_start", "<u8"), ("gpu_end", "<u8"),
        ("out", "<u8"), ("args", "<u8", 9), ("tid", "<u4"), ("result", "<i4"),
        ("symbol", "<u2"), ("depth", "u1"), ("arg_count", "u1"), ("kept", "<u4"),
    ]
)  # fmt: skip
"""One call: CLOCK_MONOTONIC ns, ``ended`` 0 while it has not returned; ``out`` is the address or
handle it gave; ``depth`` 1 is a call from outside the library."""

_COUNTS = np.dtype([("calls", "<u8"), ("returned", "<u8"), ("failed", "<u8")])
_LIVE = np.dtype([("bytes", "<u8"), ("blocks", "<u8"), ("peak", "<u8")])
_HEADER = np.dtype(
    [
        ("magic", "S8"), ("version", "<u4"), ("size", "<u4"), ("pid", "<u4"), ("symbols", "<u4"),
        ("start_ticks", "<u8"), ("opened", "<u8"), ("capacity", "<u8"), ("events", "<u8"),
        ("live", _LIVE, len(KINDS)), ("counts", _COUNTS, 256), ("names", "S48", 256),
    ]
)  # fmt: skip


@dataclass(frozen=True)
class Counts:
    """Of one symbol; ``returned`` includes ``failed``, whose result was not 0."""

    calls: int
    returned: int
    failed: int


@dataclass(frozen=True)
class Live:
    """Of one kind of memory: what is allocated now, in bytes as asked for, and at most was."""

    bytes: int
    blocks: int
    peak: int


@dataclass(frozen=True)
class Process:
    """Truth of one process; ``pid`` is what it calls itself in its own namespace."""

    pid: int
    start_ticks: int
    opened: int
    symbols: tuple[str, ...]
    counts: dict[str, Counts]
    live: dict[str, Live]
    events: npt.NDArray[Any]
    begun: int

    @property
    def lost(self) -> int:
        """Calls that the log had no room for.  Counts and live bytes have them."""
        return self.begun - len(self.events)

    def calls(self, name: str) -> int:
        return self.counts[name].calls if name in self.counts else 0

    def bytes(self, *kinds: str) -> int:
        """Live bytes of ``kinds`` (default: all that take memory of a device)."""
        return sum(self.live[k].bytes for k in kinds or ON_DEVICE)

    def of(self, *names: str) -> npt.NDArray[Any]:
        """Events of these symbols, in the order they began."""
        numbers = [self.symbols.index(n) for n in names]
        return self.events[np.isin(self.events["symbol"], numbers)]

    def to_json(self, events: bool = False) -> dict[str, Any]:
        out: dict[str, Any] = {
            "pid": self.pid,
            "start_ticks": self.start_ticks,
            "opened": self.opened,
            "calls": {n: vars(c) for n, c in self.counts.items()},
            "live": {k: vars(v) for k, v in self.live.items() if v.peak},
            "live_device_bytes": self.bytes(),
            "events": self.begun,
            "events_lost": self.lost,
        }
        if events:
            out["log"] = [self._event(e) for e in self.events]
        return out

    def _event(self, e: Any) -> dict[str, Any]:
        words = {n: int(e[n]) for n in EVENT.names or () if n not in ("args", "kept", "arg_count")}
        args = [int(a) for a in e["args"][: e["arg_count"]]]
        return words | {"symbol": self.symbols[e["symbol"]], "args": args}


def read(path: Path) -> Process:
    """Truth in one file; ValueError if it is none."""
    raw = np.memmap(path, np.uint8, "r") if path.stat().st_size else np.empty(0, np.uint8)
    if len(raw) < _HEADER.itemsize or raw[:8].tobytes() != b"SIMTRUTH":
        raise ValueError(f"{path} holds no truth")
    head = raw[: _HEADER.itemsize].view(_HEADER)[0].copy()
    if head["version"] != 1:
        raise ValueError(f"{path} is of version {head['version']}; this reads 1")
    names = tuple(n.decode() for n in head["names"][: head["symbols"]])
    kept = int(min(head["events"], head["capacity"]))
    start = int(head["size"])
    events = raw[start : start + kept * EVENT.itemsize].view(EVENT).copy()
    counts = {n: Counts(*map(int, c)) for n, c in zip(names, head["counts"], strict=False)}
    return Process(
        pid=int(head["pid"]),
        start_ticks=int(head["start_ticks"]),
        opened=int(head["opened"]),
        symbols=names,
        counts={n: c for n, c in counts.items() if c.calls},
        live={k: Live(*map(int, v)) for k, v in zip(KINDS, head["live"], strict=True)},
        events=events[events["kept"] == 1],
        begun=int(head["events"]),
    )


def read_all(folder: Path) -> list[Process]:
    """Truth of every process that has kept any in ``folder``, in the order they began to."""
    found = [read(p) for p in folder.glob("*.truth")]
    return sorted(found, key=lambda p: p.opened)


def of_pid(folder: Path, pid: int) -> Process:
    """Truth of the process that calls itself ``pid`` (the latest, if it was used again)."""
    return [p for p in read_all(folder) if p.pid == pid][-1]


def totals(processes: list[Process]) -> dict[str, int]:
    """Calls of each symbol over all processes."""
    out: dict[str, int] = {}
    for p in processes:
        for name, c in p.counts.items():
            out[name] = out.get(name, 0) + c.calls
    return out


def main() -> None:
    folder = next((Path(a) for a in sys.argv[1:] if not a.startswith("-")), None)
    if folder is None:
        sys.exit("usage: python -m tests.simgpu.truth FOLDER [--events]")
    for process in read_all(folder):
        print(json.dumps(process.to_json("--events" in sys.argv)))


if __name__ == "__main__":
    main()
