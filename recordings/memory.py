"""GPU memory of processes at a moment, and what grew between two moments.

Both work on any session.  The state at ``t`` is read from the last :data:`STATE` before it, as
every stack that holds memory has a row at least every ten seconds.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from dsprobe.recordings import cudastreams as cuda
from dsprobe.recordings.identities import Identities
from dsprobe.recordings.model import Rows
from dsprobe.recordings.presence import Presence, presence
from dsprobe.recordings.references import last_of
from dsprobe.recordings.samples import ending, summed
from dsprobe.recordings.session import Session
from dsprobe.recordings.tables import word

SECOND = 10**9
MINUTE = 60 * SECOND
STATE = 12 * SECOND
STACKS_LATE = 2 * SECOND
"""So long after memory there are rows of its stacks: they are looked at once a second."""


@dataclass(frozen=True)
class KindMemory:
    """Live memory of one process and kind (a word of ``cudastreams.MEMORY_KINDS``), exact.

    ``device`` is whether the kind takes memory of a device.  ``grown`` is by how many bytes
    ``live`` changed since the moment asked for; the counts are those of the time since then, of
    which the process was seen for ``seen`` ns.  ``frees`` are calls; ``reclaimed`` blocks of
    ``reclaimed_bytes`` were not freed, but went with their context or process.
    """

    process: int
    kind: str
    device: bool
    live: int
    blocks: int
    grown: int
    allocs: int
    frees: int
    failed: int
    unknown: int
    shed: int
    reclaimed: int
    reclaimed_bytes: int
    seen: int


@dataclass(frozen=True)
class StackMemory:
    """What one stack of one process has allocated and not yet freed, of one kind.

    ``grown`` and ``grown_blocks`` say by how much that changed since the moment asked for, below 0
    where it shrank.  ``age`` (ns) is the mean age of what is live, 0 where nothing is.
    """

    process: int
    stack: int
    kind: str
    live: int
    blocks: int
    grown: int
    grown_blocks: int
    age: int


@dataclass(frozen=True)
class AgeMemory:
    """Live memory of one process and kind that was allocated ``youngest`` to ``oldest`` s ago."""

    process: int
    kind: str
    youngest: int
    oldest: int
    live: int
    blocks: int


@dataclass(frozen=True)
class Memory:
    """Memory at moment ``t`` and how it changed since ``since``; largest first.

    ``unexplained`` are bytes live that are of none of ``stacks``: the kernel's table of stacks was
    full, or the session begins less than ten seconds before ``t``.
    """

    t: int
    since: int
    kinds: tuple[KindMemory, ...]
    stacks: tuple[StackMemory, ...]
    ages: tuple[AgeMemory, ...]
    unexplained: int

    @property
    def live(self) -> int:
        """Bytes live on devices."""
        return sum(k.live for k in self.kinds if k.device)

    @property
    def whole(self) -> bool:
        """Whether the stacks tell of nearly all that is live."""
        return self.unexplained <= sum(k.live for k in self.kinds) / 100


def memory_at(
    session: Session, t: int, since: int | None = None, who: Identities | None = None
) -> Memory:
    """Memory at ``t``, and how it changed since ``since`` (default: a minute before)."""
    since = max(t - MINUTE, 0) if since is None else max(min(since, t), 0)
    then, now = _State(session, since), _State(session, t)
    kinds = _kinds(session, then, now, presence(session, since, t, who))
    stacks = _stacks(then, now)
    explained = sum(s.live for s in stacks)
    ages = _ages(session, now)
    return Memory(t, since, kinds, stacks, ages, max(now.counted - explained, 0))


class _State:
    """The last rows of gpu.memory and gpu.stack before ``t``, by process and kind, and stack."""

    def __init__(self, session: Session, t: int) -> None:
        self.t = t
        rows = ending(session, cuda.GPU_MEMORY, t - STATE, t)
        self.kinds = {_key(r, "process", "kind"): r for r in last_of(rows, "process", "kind")}
        stacks = ending(session, cuda.GPU_STACK, t - STATE, t)
        self.stacks = self.held(last_of(stacks, "process", "stack", "kind"))
        # Stacks are looked at less often: compare with what was live when they were, and is now.
        looked = stacks["t"][-1] if len(stacks) else max(t - STACKS_LATE, 0)
        then = last_of(rows[rows["t"] <= looked], "process", "kind")
        self.counted = sum(r["live"].item() for r in then
                           if self.kinds[_key(r, "process", "kind")]["live"])  # fmt: skip

    def held(self, rows: Rows) -> Rows:
        """``rows`` but those of which a later row says that the process holds nothing of that kind
        any more: when it ends, its stacks get no rows."""
        keep = np.ones(len(rows), bool)
        for (process, kind), whole in self.kinds.items():
            if not whole["live"]:
                of = (rows["process"] == process) & (rows["kind"] == kind)
                keep &= ~of | (rows["t"] > whole["t"])
        held: Rows = rows[keep]
        return held


def _key(row: Rows, *names: str) -> tuple[int, ...]:
    return tuple(int(row[name]) for name in names)


_COUNTS = ("allocs", "frees", "failed", "unknown", "shed", "reclaimed", "reclaimed_bytes")


def _kinds(
    session: Session, then: _State, now: _State, presence: Presence
) -> tuple[KindMemory, ...]:
    keys = ("process", "kind")
    sums = summed(session, cuda.GPU_MEMORY, (then.t, now.t), keys, _COUNTS)
    # A row counts what was reclaimed as freed, too.
    sums["frees"] = sums["frees"] - np.minimum(sums["frees"], sums["reclaimed"])
    ids = zip(sums["process"].tolist(), sums["kind"].tolist(), strict=True)
    counts = dict(zip(ids, zip(*(sums[n].tolist() for n in _COUNTS), strict=True), strict=True))
    found = []
    for key in {*counts, *now.kinds}:
        live, blocks = _amount(now.kinds.get(key))
        before, _ = _amount(then.kinds.get(key))
        found.append(
            KindMemory(
                key[0], word(cuda.MEMORY_KINDS, key[1]), key[1] < len(cuda.ON_DEVICE), live, blocks,
                live - before, *(*counts.get(key, (0,) * len(_COUNTS)), presence.time(key[0])),
            )
        )  # fmt: skip
    return tuple(sorted(found, key=lambda k: (-k.live, k.process, k.kind)))


def _stacks(then: _State, now: _State) -> tuple[StackMemory, ...]:
    states = (then.stacks, now.stacks)
    names = ("process", "stack", "kind")
    keys = [np.concatenate([rows[name] for rows in states]) for name in names]
    order = np.lexsort(keys)
    new = np.zeros(len(order), bool)
    new[:1] = True
    for key in keys:
        new[1:] |= key[order][1:] != key[order][:-1]
    number = np.empty(len(order), np.intp)  # of the stack in each row
    number[order] = np.cumsum(new) - 1
    of = {"then": number[: len(then.stacks)], "now": number[len(then.stacks) :]}

    def column(when: str, name: str) -> npt.NDArray[np.uint64]:
        values = np.zeros(int(new.sum()), np.uint64)
        values[of[when]] = states[when == "now"][name]
        return values

    first = order[new]
    process, stack, kind = (key[first] for key in keys)
    live, before = column("now", "live"), column("then", "live")
    used = np.flatnonzero((live > 0) | (before > 0))
    used = used[np.lexsort((kind[used], stack[used], process[used], ~live[used]))]
    columns = (process, stack, kind, live, column("now", "blocks"), before,
               column("then", "blocks"), column("now", "born"))  # fmt: skip
    kinds = [word(cuda.MEMORY_KINDS, k) for k in range(256)]
    return tuple(
        StackMemory(p, s, kinds[k], n, blocks, n - was, blocks - blocks_then,
                    max(now.t - born, 0) if born and n else 0)
        for p, s, k, n, blocks, was, blocks_then, born
        in zip(*(c[used].tolist() for c in columns), strict=True)
    )  # fmt: skip


def _amount(row: Rows | None) -> tuple[int, int]:
    return (0, 0) if row is None else (int(row["live"]), int(row["blocks"]))


def _ages(session: Session, now: _State) -> tuple[AgeMemory, ...]:
    rows = ending(session, cuda.GPU_AGE, now.t - STATE, now.t)
    newest = {_key(r, "process", "kind"): int(r["t"]) for r in last_of(rows, "process", "kind")}
    return tuple(
        AgeMemory(
            int(r["process"]), word(cuda.MEMORY_KINDS, int(r["kind"])),
            1 << int(r["age"]) if r["age"] else 0, 2 << int(r["age"]),
            int(r["live"]), int(r["blocks"]),
        )
        for r in now.held(rows)
        if r["t"] == newest[_key(r, "process", "kind")]
    )  # fmt: skip
