"""What a recording holds, in words and plain values: for ``info`` and ``dump``."""

from __future__ import annotations

import functools
import ipaddress
import math
from collections.abc import Callable, Iterator
from dataclasses import asdict
from typing import Any

from dsprobe.recordings import cudastreams as cuda
from dsprobe.recordings import session
from dsprobe.recordings.filesession import FileSession
from dsprobe.recordings.identities import Identities
from dsprobe.recordings.lanes import LANES
from dsprobe.recordings.model import Field, Rows, Stream
from dsprobe.recordings.references import is_interned
from dsprobe.recordings.rollups import COVERED
from dsprobe.recordings.stacks import Stacks
from dsprobe.recordings.walltime import WallTime

_V4_MAPPED = bytes(10) + b"\xff\xff"


def info(source: FileSession) -> dict[str, Any]:
    """What a recording holds, ready for JSON.

    ``lost`` is what is known to be lost, so at least that many rows.  From the file's own sums
    where it has them, else by reading it whole.
    """
    totals = source.totals()
    facts = session.facts(source)
    wall = WallTime(session.clock(source), facts)
    first, last = source.span()
    lost = source.lost()
    zero = (0, 0)
    streams = {
        name: dict(zip(("rows", "bytes"), totals.get(name, zero), strict=True))
        | {"lost": lost.get(name, 0)}
        for name in sorted({*source.streams, *lost})
    }
    return {
        "file": source.path,
        "format": ".".join(map(str, source.format or ())),
        "written_by": source.library,
        "host": facts.get("host", ""),
        "start": wall.iso(first) if last else None,
        "end": wall.iso(last) if last else None,
        "duration_s": (last - first) / 1e9,
        "start_ns": first,
        "end_ns": last,
        "live": source.live,
        "truncated": source.truncated,
        "facts": facts,
        "streams": streams,
        "processes": _processes(source, wall),
        "coverage": _coverage(source),
        "problems": list(source.problems),
    }


def _processes(source: FileSession, wall: WallTime) -> list[dict[str, Any]]:
    """Processes that used CUDA."""
    who = Identities(source)
    who.refresh()
    return [
        asdict(p) | {"ended": wall.iso(p.ended) if p.ended else None}
        for p in sorted(who.processes.values(), key=lambda p: p.id)
    ]


def _coverage(source: FileSession) -> dict[str, Any]:
    """State of each probe at the end, and of its programs where they have one of their own."""
    found: dict[str, Any] = {}
    for (probe, program), state in sorted(session.coverage(source).items()):
        entry = found.setdefault(probe, {"status": "", "reason": ""})
        said = {"status": state.status, "reason": state.reason}
        if program:
            entry.setdefault("programs", {})[program] = said
        else:
            entry.update(said)
    return found


def dump_rows(source: FileSession, stream: str, start: int, end: int) -> Iterator[dict[str, Any]]:
    """The rows of ``stream`` in ``[start, end)`` as plain values, in order.

    Enumerations and lanes read as their words, addresses as text, references as the text they
    stand for, with the number beside it as ``<field>_id``.  ``time`` is the wall clock, where the
    recording knows it.
    """
    declared = source.streams.get(stream)
    if declared is None:
        return
    wall = WallTime(session.clock(source), session.facts(source))
    columns = [(f.name, *_column(source, f)) for f in declared.fields]
    for rows in source.blocks(stream, start, end):
        values = [(name, suffix, read(rows[name])) for name, suffix, read in columns]
        for i, t in enumerate(rows["t"].tolist()):
            row: dict[str, Any] = {"t": t}
            when = wall.iso(t)
            if when:
                row["time"] = when
            for name, raw, column in values[1:]:
                row[name] = column[i]
                if raw is not None:
                    row[f"{name}_id"] = int(rows[name][i])
            yield row


Column = Callable[[Rows], list[Any]]


def _column(source: FileSession, f: Field) -> tuple[bool | None, Column]:
    """How to read a column; the first is True where its number is to be shown too."""
    if f.ref and not f.shape:
        return True, _referred(source, f.ref)
    if f.names and not f.shape:
        return None, _lookup(dict(enumerate(f.names)))
    if f.unit == "id" and f.name == "lane":
        keys = {lane.id: lane.key for lane in LANES} | {COVERED: "covered"}
        return True, _lookup(keys)
    if f.unit == "address" and f.shape == 16:
        return None, lambda column: [_address(a.tobytes()) for a in column]
    if f.type.startswith("S"):
        return None, lambda column: [_text(v) for v in column.tolist()]
    return None, lambda column: [_finite(v) for v in column.tolist()]


def _lookup(names: dict[int, str]) -> Column:
    return lambda column: [names.get(v, v) for v in column.tolist()]


def _referred(source: FileSession, target: str) -> Column:
    """Text of the ids of an interned stream: its first text field, by the last row of an id; of a
    stack its frames, the innermost first."""
    who, stacks = Identities(source), Stacks(source)
    by_id: dict[str, Callable[[int], Any]] = {
        cuda.META_PROCESS.name: lambda id: who.process(id).label,
        cuda.META_THREAD.name: lambda id: who.thread(id).label if id else None,
        cuda.META_KERNEL.name: who.kernel,
        cuda.META_FRAME.name: lambda id: stacks.frame(id).text,
        cuda.META_STACK.name: lambda id: [f.text for f in stacks.frames(id)] if id else None,
    }
    if target in by_id:
        who.refresh()
        stacks.refresh()
        text = functools.lru_cache(1 << 14)(by_id[target])
        return lambda column: [text(v) for v in column.tolist()]
    return _lookup(_names(source, target))


def _names(source: FileSession, target: str) -> dict[int, str]:
    declared: Stream | None = source.streams.get(target)
    if declared is None or not is_interned(declared):
        return {}
    text = next((f.name for f in declared.fields if f.is_text), "")
    rows = source.read(target, 0, session.FOREVER)
    return dict(zip(rows["id"].tolist(), rows[text].tolist(), strict=True)) if text else {}


def _text(value: Any) -> Any:
    return value.decode(errors="replace") if isinstance(value, bytes) else value


def _finite(value: Any) -> Any:
    """JSON has no infinities and no NaN."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    return [_finite(v) for v in value] if isinstance(value, list) else value


def _address(raw: bytes) -> str:
    if raw.startswith(_V4_MAPPED):
        return str(ipaddress.IPv4Address(raw[12:]))
    return str(ipaddress.IPv6Address(raw))
