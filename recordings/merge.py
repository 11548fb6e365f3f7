"""Several recordings of one boot of one host as one.

They share a clock, so no time is changed.  What two of them both hold counts once; numbers of
interned rows that mean different things in different files are given anew, wherever a declaration
says that a field refers to them.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from contextlib import ExitStack
from itertools import pairwise
from typing import Any

import numpy as np

from dsprobe.recordings import session
from dsprobe.recordings import streams as st
from dsprobe.recordings.assemble import fit, in_order
from dsprobe.recordings.cut import WholeWriter, is_event, same_file, unreported
from dsprobe.recordings.errors import EXIT_USAGE, RecordingError
from dsprobe.recordings.filesession import FileSession, open_file
from dsprobe.recordings.model import Rows, Stream
from dsprobe.recordings.references import is_interned
from dsprobe.recordings.renumber import Renumbering

FOREVER = session.FOREVER


def merge(
    paths: Sequence[str | os.PathLike[str]], out: str | os.PathLike[str], force: bool = False
) -> tuple[int, tuple[str, ...]]:
    """Write the recordings at ``paths`` to ``out``; how many rows (but ``meta.*``) it got, and what
    was wrong with the recordings, as sentences."""
    written = 0
    with ExitStack() as stack:
        sources = [stack.enter_context(open_file(path)) for path in paths]
        for source in sources:
            same_file(source.path, out)
        sources.sort(key=lambda s: s.span())
        _check_boot(sources)
        _check_overlap(sources)
        streams = {s.name: s for s in (st.META_LOSS, st.META_COVERAGE)} | _declarations(sources)
        with WholeWriter(out, force=force) as writer:
            for name in sorted(streams):
                writer.declare(streams[name])
            numbers = Renumbering(streams)
            for source in sources:
                numbers.learn(source, {n: _all(source, s) for n, s in numbers.interned(source)})
            edges = {edge for s in sources for pair in s.windows(0, FOREVER) for edge in pair}
            limits = sorted(edges)
            for begin, until in pairwise(limits):
                for name in streams:
                    if is_event(name):
                        parts = [
                            numbers.apply(s, streams[name], _fit(s, streams[name], begin, until))
                            for s in sources
                        ]
                        rows = union(parts)
                        writer.append(streams[name], rows)
                        written += len(rows)
                writer.flush()
            for stream in streams.values():
                if stream.is_meta:
                    writer.append(stream, _meta(stream, sources, numbers))
            spans = [s.span() for s in sources if s.span()[1]]
            if spans:
                writer.cover(min(first for first, _ in spans), max(last for _, last in spans))
        return written, tuple(f"{s.path}: {p}" for s in sources for p in s.problems)


def _meta(stream: Stream, sources: Sequence[FileSession], numbers: Renumbering) -> Rows:
    parts = []
    for source in sources:
        rows = numbers.apply(source, stream, _all(source, stream))
        if is_interned(stream):
            rows = numbers.renamed(source, stream, rows)
        parts.append(rows)
    found = union(parts)
    more: list[Rows] = []
    if stream.name == st.META_LOSS.name:
        more = [unreported(source, 0, FOREVER) for source in sources]
    elif stream.name == st.META_COVERAGE.name:
        more = [_holes(sources)]
    return in_order(np.concatenate([found, *(fit(stream, rows) for rows in more)]))


def union(parts: Sequence[Rows]) -> Rows:
    """All rows of ``parts``, ordered; a row that several parts hold counts as often as it does in
    the one that holds it most."""
    held = [p for p in parts if len(p)]
    if len(held) < 2:
        return in_order(held[0] if held else parts[0])
    together = np.concatenate(held)
    _, group = np.unique(_keys(together), return_inverse=True)
    owner = np.repeat(np.arange(len(held)), [len(p) for p in held])
    # How many equal rows came before this one in its own part: only a number that no earlier part
    # reached for the same row is new.
    order = np.lexsort((np.arange(len(group)), owner, group))
    g, o = group[order], owner[order]
    starts = np.flatnonzero(np.r_[True, (g[1:] != g[:-1]) | (o[1:] != o[:-1])])
    within = np.arange(len(g)) - np.repeat(starts, np.diff(np.r_[starts, len(g)]))
    pairs = np.stack([g, within], axis=1)
    _, first = np.unique(pairs, axis=0, return_index=True)
    return in_order(together[np.sort(order[first])])


def _keys(rows: Rows) -> Any:
    """One comparable value per row."""
    if rows.dtype.hasobject:
        seen: dict[Any, int] = {}
        plain = (tuple(_plain(v) for v in row.tolist()) for row in rows)
        return np.array([seen.setdefault(key, len(seen)) for key in plain], np.int64)
    packed = np.ascontiguousarray(rows)
    return packed.view(np.dtype((np.void, rows.dtype.itemsize)))


def _plain(value: Any) -> Any:
    return tuple(value.ravel().tolist()) if isinstance(value, np.ndarray) else value


def _all(source: FileSession, stream: Stream) -> Rows:
    return _fit(source, stream, 0, FOREVER)


def _fit(source: FileSession, stream: Stream, start: int, end: int) -> Rows:
    """Rows of ``source`` in the dtype of ``stream``."""
    if stream.name not in source.streams:
        return stream.empty()
    return fit(stream, source.read(stream.name, start, end))


def _declarations(sources: Sequence[FileSession]) -> dict[str, Stream]:
    """The fullest declaration of each stream; the others must be a beginning of it."""
    found: dict[str, Stream] = {}
    for source in sources:
        for name, stream in source.streams.items():
            if name == st.ROLLUP_LANE.name:
                continue
            known = found.get(name, stream)
            short, long = sorted((known, stream), key=lambda s: len(s.fields))
            if short.dtype.descr != long.dtype.descr[: len(short.fields)]:
                raise RecordingError(
                    f"{source.path} declares {name} in another way than the other recordings, so "
                    "they cannot be one: give only recordings of one version",
                    EXIT_USAGE,
                )
            found[name] = long
    return found


def _check_boot(sources: Sequence[FileSession]) -> None:
    boots = [session.facts(s).get("boot_id", "") for s in sources]
    for source, boot in zip(sources, boots, strict=True):
        if not boot or boot != boots[0]:
            other = "does not say of which boot it is"
            if boot:
                other = f"is of another host or boot than {sources[0].path}"
            raise RecordingError(
                f"{source.path} {other}, and clocks of different boots cannot be joined: merge "
                "only recordings that one host made without a reboot in between",
                EXIT_USAGE,
            )


def _check_overlap(sources: Sequence[FileSession]) -> None:
    """Two agents at one time both saw every event; one agent's rows are equal in both files."""
    agents = [session.facts(s).get("agent_pid", "") for s in sources]
    for i, a in enumerate(sources):
        for j, b in enumerate(sources[:i]):
            if agents[i] and agents[i] == agents[j]:
                continue
            first, last = max(a.span()[0], b.span()[0]), min(a.span()[1], b.span()[1])
            if first < last and a.span()[1] and b.span()[1]:
                raise RecordingError(
                    f"{b.path} and {a.path} were recorded at the same time by two agents, so "
                    "events would count twice: cut one of them with dsprobe cut first",
                    EXIT_USAGE,
                )


def _holes(sources: Sequence[FileSession]) -> Rows:
    """Coverage for the times between the recordings: nothing was recorded, then it went on."""
    rows: list[Rows] = []
    spans = [(s, *s.span()) for s in sources if s.span()[1]]
    until = spans[0][2] if spans else 0
    for source, first, last in spans[1:]:
        if first > until + 1:
            before = {k for s, a, _ in spans if a < first for k in session.coverage(s)}
            off = st.STATUSES.index("off")
            for probe, program in sorted(before):
                rows.append(_state(until + 1, probe, program, off, "nothing was recorded here"))
            for (probe, program), state in session.coverage(source, first).items():
                if state.status in st.STATUSES:
                    code = st.STATUSES.index(state.status)
                    rows.append(_state(first, probe, program, code, state.reason))
        until = max(until, last)
    return np.concatenate(rows) if rows else st.META_COVERAGE.empty()


def _state(t: int, probe: str, program: str, status: int, reason: str) -> Rows:
    return st.META_COVERAGE.rows(
        t=[t], probe=[probe], program=[program], status=[status], reason=[reason]
    )
