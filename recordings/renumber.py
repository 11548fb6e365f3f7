"""New numbers for interned rows that mean different things in different recordings."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from dsprobe.recordings.errors import RecordingError
from dsprobe.recordings.filesession import FileSession
from dsprobe.recordings.model import Rows, Stream
from dsprobe.recordings.references import ALIKE, NUMBERED, is_interned, last_of_ids
from dsprobe.recordings.session import facts


class Renumbering:
    """Maps the ids of each source's interned meta streams into one numbering for all.

    What numbers of ``references.NUMBERED`` streams mean depends on the agent that gave them; of
    any other stream an id means what its row says.

    Teach it every source with :meth:`learn` before asking for rows: an id that a source uses
    without explaining it must not take on what another source says of that number.
    """

    def __init__(self, streams: Mapping[str, Stream]) -> None:
        self._streams = streams
        self._order = _dependencies_first([s for s in streams.values() if is_interned(s)])
        self._taken: dict[str, set[int]] = {s.name: set() for s in self._order}
        self._content: dict[str, dict[int, Any]] = {s.name: {} for s in self._order}
        self._by_content: dict[str, dict[Any, int]] = {s.name: {} for s in self._order}
        self._maps: dict[tuple[FileSession, str], dict[int, int]] = {}
        self._agents: dict[tuple[str, str], dict[int, int]] = {}

    def interned(self, source: FileSession) -> Iterator[tuple[str, Stream]]:
        """Names and declarations of the interned streams of ``source``, those that others refer to
        first."""
        return ((s.name, s) for s in self._order if s.name in source.streams)

    def learn(self, source: FileSession, interned: Mapping[str, Rows]) -> None:
        """Take the interned rows of ``source``, in the order of :meth:`interned`."""
        agent = facts(source).get("agent_pid", "")
        for name, rows in interned.items():
            stream = self._streams[name]
            rows = self.apply(source, stream, rows, learning=True)
            mine = _meanings(stream, rows, (agent, "" if agent else source.path))
            numbers = self._maps.setdefault((source, name), {})
            if agent and name in NUMBERED:
                known_here = self._agents.setdefault((agent, name), {})
                numbers.update((id, known_here[id]) for id in mine.keys() & known_here.keys())
            # First what stays as it is, then what has to move out of the way.
            later = []
            for id, content in mine.items():
                if id in numbers:
                    continue
                if self._content[name].get(id, content) == content:
                    numbers[id] = id
                    self._enter(name, id, content)
                else:
                    later.append((id, content))
            for id, content in later:
                known = self._by_content[name].get(content)
                numbers[id] = self._fresh(stream, mine) if known is None else known
                self._enter(name, numbers[id], content)
            if agent and name in NUMBERED:
                known_here.update(numbers)

    def apply(
        self, source: FileSession, stream: Stream, rows: Rows, learning: bool = False
    ) -> Rows:
        """``rows`` with the references in their fields renumbered."""
        for f in stream.fields:
            if f.ref in self._content and len(rows):
                rows = self._replace(source, f.ref, rows, f.name, learning)
        return rows

    def renamed(self, source: FileSession, stream: Stream, rows: Rows) -> Rows:
        """``rows`` of an interned stream with their own ids renumbered."""
        return self._replace(source, stream.name, rows, "id", False)

    def _replace(
        self, source: FileSession, target: str, rows: Rows, field: str, learning: bool
    ) -> Rows:
        numbers = self._maps.setdefault((source, target), {})
        ids, where = np.unique(rows[field], return_inverse=True)
        new = ids.copy()
        for i, id in enumerate(ids.tolist()):
            if id not in numbers and not learning:
                unexplained = id not in self._content[target]
                numbers[id] = id if unexplained else self._fresh(self._streams[target], {id: None})
            new[i] = numbers.get(id, id)
        if (new == ids).all():
            return rows
        rows = rows.copy()
        rows[field] = new[where].reshape(rows[field].shape)
        return rows

    def _enter(self, name: str, id: int, content: Any) -> None:
        self._content[name][id] = content
        self._by_content[name].setdefault(content, id)
        self._taken[name].add(id)

    def _fresh(self, stream: Stream, avoid: Mapping[int, Any]) -> int:
        taken = self._taken[stream.name]
        taken.update(avoid)
        top = int(np.iinfo(stream.dtype["id"]).max)
        id = max(taken, default=0) + 1
        if id > top:
            id = next((i for i in range(1, len(taken) + 2) if i not in taken), top + 1)
        if id > top:
            raise RecordingError(f"these recordings hold more ids of {stream.name} than fit in one")
        taken.add(id)
        return id


def _meanings(stream: Stream, rows: Rows, agent: tuple[str, str]) -> dict[int, Any]:
    """What each id means: all that its last row says but the id and the time; of a stack its frames
    in order.  Processes and the like of two agents are never the same."""
    found: dict[int, Any] = {}
    for row in last_of_ids(stream, rows):
        values = (row[f.name] for f in stream.fields if f.name not in ("t", "id"))
        said = tuple(v.tobytes() if isinstance(v, (np.ndarray, np.generic)) else v for v in values)
        if "depth" in stream.by_name:
            found.setdefault(int(row["id"]), {})[int(row["depth"])] = said
        else:
            found[int(row["id"])] = said
    if "depth" in stream.by_name:
        found = {id: tuple(of[depth] for depth in sorted(of)) for id, of in found.items()}
    if stream.name in NUMBERED - ALIKE:
        found = {id: (*said, id, agent) for id, said in found.items()}
    return found


def _dependencies_first(streams: list[Stream]) -> list[Stream]:
    """Streams after the ones their fields refer to; a cycle keeps the given order."""
    placed: dict[str, Stream] = {}
    by_name = {s.name: s for s in streams}

    def place(stream: Stream, above: frozenset[str]) -> None:
        if stream.name in placed or stream.name in above:
            return
        for f in stream.fields:
            if f.ref in by_name:
                place(by_name[f.ref], above | {stream.name})
        placed[stream.name] = stream

    for stream in streams:
        place(stream, frozenset())
    return list(placed.values())
