"""What the screen of memory shows, made off the render path: stacks as a tree, and the leaks."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from dsprobe.recordings.cudastreams import ON_DEVICE
from dsprobe.recordings.identities import Process
from dsprobe.recordings.leaks import Findings, Leak, find_leaks
from dsprobe.recordings.memory import KindMemory, Memory, StackMemory, memory_at
from dsprobe.recordings.session import Session
from dsprobe.recordings.stacks import Frame, where, wrappers
from dsprobe.recordings.timeline import SECOND
from dsprobe.tui import units
from dsprobe.tui.screen import Moment
from dsprobe.tui.stacktree import Amounts, Branch, StackTree, branches
from dsprobe.tui.treescreen import TreeBody, TreeRow, empty, state, unseen

KINDS = {
    "device": ON_DEVICE,
    "host": ("host", "registered"),
    "address space": ("reserved", "mapped", "ipc"),
}
"""What the tree is of, by name: kinds of memory that can be added up."""
CALLED = {"device": "device memory", "host": "host memory", "address space": "address space"}
ORDERS = ("growth", "live", "blocks", "age")
LEAKS_OVER = 600 * SECOND
"""Time in which leaks are looked for."""
LEAKS_EVERY = 10 * SECOND
MANY = 1000
"""Where there are more stacks, leaks are looked for once a minute: it takes that much longer."""
NOTHING = Findings((), (), (), 0)
MAX_ROWS = 1000
FEW = 3
"""So many processes are open from the start."""


@dataclass(frozen=True)
class Asked:
    """``kind`` is a key of :data:`KINDS`, ``order`` one of :data:`ORDERS`; ``toggled`` are the
    nodes that the user opened or closed.

    Growth is since ``since``, else since the last marker where ``marked``, else over the time in
    view.
    """

    kind: str = "device"
    order: str = "growth"
    filter: str = ""
    toggled: frozenset[Hashable] = frozenset()
    all_open: bool = False
    marked: bool = False
    since: int | None = None


@dataclass(frozen=True)
class MemoryRow(TreeRow):
    """A process (``depth`` 0), or stacks that go through the same frames.

    ``grown`` and ``age`` (ns) are as in :class:`dsprobe.recordings.memory.StackMemory`.  ``leaks``
    counts the stacks in it that leak, ``rate`` (bytes/s) how fast; ``frames`` are those from the
    innermost one to the outermost.
    """

    live: int
    grown: int
    age: int
    blocks: int
    leaks: int
    rate: float
    frames: tuple[Frame, ...]


class MemoryRows:
    """Makes the body; keep one per viewer, as it remembers which stacks it has seen."""

    def __init__(self) -> None:
        self._session: Session | None = None
        self._tree: StackTree
        self._found = (-1, NOTHING)
        self._wanted = -1
        self._names: dict[tuple[int, ...], tuple[str, tuple[Frame, ...]]] = {}
        self._inside: dict[int, frozenset[tuple[str, str]]] = {}

    def look(self, asked: Asked, moment: Moment) -> TreeBody:
        """The memory at ``moment``."""
        moment.stacks.refresh()
        if self._session is not moment.session:
            self._session, self._found, self._wanted = moment.session, (-1, NOTHING), -1
            self._tree, self._names, self._inside = StackTree(moment.stacks), {}, {}
        since, growth = _since(asked, moment)
        memory = memory_at(moment.session, moment.at, since, moment.who)
        findings, pending = self._findings(moment, len(memory.stacks))
        kinds = KINDS[asked.kind]
        leaks = [leak for leak in findings.leaks if leak.kind in kinds]
        rows, more = self._rows(asked, moment, memory, leaks)
        late = _late(moment)
        called = CALLED[asked.kind]
        nothing = f"no {called} is allocated"
        if late:
            first = moment.scale.text(min(p.late for p in late))
            nothing = f"no {called} is allocated of what was seen since {first}"
        return TreeBody(
            _total(moment, memory, findings.leaks, late),
            f"{called}, {growth}",
            rows,
            _notes(moment, memory, findings, late)
            + (("leaks are being looked for",) if pending else ()),
            more,
            empty(asked.filter, "memory", moment, nothing),
            pending,
        )

    def _findings(self, moment: Moment, stacks: int) -> tuple[Findings, bool]:
        """The leaks up to ``moment``, or to a little before, and whether they are yet to be found.

        They are looked for now and then, at the same moments in a live session as in a replay of
        it; and only at a second look, as that reads minutes: a playhead that moves does not wait.
        """
        every = LEAKS_EVERY if stacks <= MANY else 6 * LEAKS_EVERY
        at_end = not moment.session.live and moment.at >= moment.end
        at = moment.at if at_end else moment.at - moment.at % every
        if self._found[0] == at:
            return self._found[1], False
        if self._wanted != at:
            self._wanted = at
            near = 0 <= at - self._found[0] <= 2 * every
            return self._found[1] if near else NOTHING, True
        start = max(at - LEAKS_OVER, moment.begin)
        self._found = (at, find_leaks(moment.session, start, at, moment.stacks))
        return self._found[1], False

    def _rows(
        self, asked: Asked, moment: Moment, memory: Memory, leaks: Sequence[Leak]
    ) -> tuple[tuple[MemoryRow, ...], int]:
        tree, kinds = self._tree, KINDS[asked.kind]
        stacks = [s for s in memory.stacks if s.kind in kinds and (s.live or s.grown or s.blocks)]
        whole = _by_process([k for k in memory.kinds if k.kind in kinds])
        names = {id: moment.who.process(id).label for id in {s.process for s in stacks} | {*whole}}
        words = asked.filter.lower().split()
        if words:
            stacks = [s for s in stacks if self._passes(s, names[s.process].lower(), words)]
        known = len(tree.parent)
        leaves = [tree.leaf(s.process, s.stack) for s in stacks]
        if len(tree.parent) != known:
            self._names = {}  # what was one stack's own may be so no more
            of: dict[int, list[int]] = {}
            for s in memory.stacks:
                of.setdefault(s.process, []).append(s.stack)
            everywhere = wrappers(moment.stacks.every())  # one may have a single stack
            self._inside = {
                tree.process(id): wrappers(map(moment.stacks.frames, dict.fromkeys(ids)))
                | everywhere
                for id, ids in of.items()
            }
        amounts = np.array(
            [(s.live, s.grown, s.age * s.blocks, s.blocks, 0, 0, 1) for s in stacks], float
        ).reshape(-1, 7)
        first = {leaf: i for i, leaf in reversed(list(enumerate(leaves)))}
        for leak in leaks:  # its stack stands for all that read alike
            i = first.get(tree.leaf(leak.process, leak.stack))
            if i is not None:
                amounts[i, 4:6] += (1, leak.rate)
        roots = {tree.process(id): id for id in {s.process for s in stacks} | ({*whole} if not words
                 else set())}  # fmt: skip
        ends = np.zeros(len(tree.parent), bool)
        ends[leaves] = True
        sums = tree.up(leaves, amounts)
        below = sums.copy()  # what the stacks add up to; a process knows its own sums exactly
        for node, id in roots.items():
            if not words and id in whole:
                sums[node, (0, 1, 3)] = whole[id]
        opened = int((sums[list(roots), 0] > 0).sum()) <= FEW

        def order(node: int) -> tuple[float, ...]:
            live, grown, aged, blocks, _, rate, _ = sums[node].tolist()
            by = {
                "growth": (-rate, -grown),
                "live": (-live, -grown),
                "blocks": (-blocks, -live),
                "age": (-aged / max(blocks, 1), -live),
            }
            return by[asked.order]

        def is_open(node: int) -> bool:
            default = asked.all_open or bool(words) or bool(sums[node, 4] > 0)
            return (default or (opened and tree.parent[node] < 0)) != (node in asked.toggled)

        rows: list[MemoryRow] = []
        more = 0
        for branch in branches(tree, list(roots), ends, sums[:, 6] > 0, order, is_open):
            if len(rows) >= MAX_ROWS:
                more += 1
                continue
            row = self._row(branch, sums)
            if branch.depth:
                rows.append(row)
                continue
            id = roots[branch.node]
            process = moment.who.process(id)
            rows.append(_process_row(row, moment, memory, process, asked.kind))
            rest = sums[branch.node] - below[branch.node]
            if row.opened and rest[0] > 0 and not memory.whole:
                rows.append(_rest_row(branch.node, rest))
        return tuple(rows), more

    def _passes(self, row: StackMemory, process: str, words: Sequence[str]) -> bool:
        text = self._tree.text(self._tree.leaf(row.process, row.stack))
        return all(word in text or word in process for word in words)

    def _row(self, branch: Branch, sums: Amounts) -> MemoryRow:
        live, grown, aged, blocks, leaks, rate, _ = sums[branch.node].tolist()
        named = self._names.get(branch.nodes)
        if named is None:
            frames = tuple(self._tree.path(branch.node))
            alone = [self._tree.alone(node) for node in reversed(branch.nodes)]
            inside = self._inside.get(self._tree.root(branch.node), frozenset())
            name = _name(frames[: len(alone)], alone, inside)
            named = self._names[branch.nodes] = name, frames
        name, frames = named
        return MemoryRow(
            branch.node,
            branch.depth,
            branch.opened,
            name,
            int(live),
            int(grown),
            int(aged / blocks) if blocks else 0,
            int(blocks),
            int(leaks),
            rate,
            frames,
        )


def short(frame: Frame) -> str:
    """A frame without the folders of its file."""
    if frame.kind != "python" or not frame.file:
        return frame.text
    place = frame.file.rsplit("/", 1)[-1] + (f":{frame.line}" if frame.line else "")
    return f"{frame.function or '?'} ({place})"


def _name(
    frames: tuple[Frame, ...], alone: Sequence[bool], inside: frozenset[tuple[str, str]]
) -> str:
    """What a row of ``frames``, the innermost first, is called: by the one that tells most, of
    those that no other stack goes through if there are any, but not those ``inside`` which nearly
    all end; and by those of Python that called it."""
    if not frames:
        return ""
    shared = {f.id for f, single in zip(frames, alone, strict=True) if not single}
    chosen = where(frames, shared, inside)
    at = next(i for i, frame in enumerate(frames) if frame is chosen)
    callers = [f for f in frames[at + 1 :] if f.kind == "python" or chosen.kind != "python"]
    return " < ".join(short(f) for f in (chosen, *callers))


def _since(asked: Asked, moment: Moment) -> tuple[int, str]:
    """The moment that growth is counted from, and what is said of it."""
    before = [m for m in moment.markers if m.t < moment.at]
    if asked.since is not None and asked.since < moment.at:
        return asked.since, f"growth since A, {moment.scale.text(asked.since)}"
    if asked.marked and before:
        label = f" ({before[-1].label})" if before[-1].label else ""
        return before[-1].t, f"growth since A, {moment.scale.text(before[-1].t)}{label}"
    missing = "no marker A before, " if asked.marked or asked.since is not None else ""
    return moment.start, f"{missing}growth over {units.span(moment.at - moment.start)} in view"


def _by_process(kinds: Sequence[KindMemory]) -> dict[int, tuple[int, int, int]]:
    """Live bytes, growth and blocks by process, where there is or was anything."""
    out: dict[int, tuple[int, int, int]] = {}
    for k in kinds:
        live, grown, blocks = out.get(k.process, (0, 0, 0))
        if k.live or k.grown or k.blocks:
            out[k.process] = (live + k.live, grown + k.grown, blocks + k.blocks)
    return out


def _sums(kinds: Sequence[KindMemory], memory: Memory, without: str = "") -> str:
    """``12.3G on device, 1.20G on host, 4.51k blocks, 120 allocs/s``; of one process without what
    stands in its columns."""
    held = [k for k in kinds if k.device or k.kind in KINDS["host"]]
    parts = [
        f"{units.size(sum(k.live for k in kinds if k.kind in KINDS[name]))} on {name}"
        for name in ("device", "host")
        if name != without
    ]
    parts += [] if without else [f"{units.whole(sum(k.blocks for k in held))} blocks"]
    return ", ".join([*parts, _rate(kinds, memory)])


def _rate(kinds: Sequence[KindMemory], memory: Memory) -> str:
    """``120 allocs/s``; not of less than a second, in which there may be no row yet."""
    held = [k for k in kinds if k.device or k.kind in KINDS["host"]]
    rate = sum(k.allocs * 1e9 / k.seen for k in held)
    return f"{units.si(rate) if memory.t - memory.since >= SECOND else '-'} allocs/s"


def _process_row(row: MemoryRow, moment: Moment, memory: Memory, process: Process,
                 shown: str) -> MemoryRow:  # fmt: skip
    kinds = [k for k in memory.kinds if k.process == process.id]
    ended = " (ended)" if process.ended and process.ended <= moment.at else ""
    late = f" (since {moment.scale.text(process.late)})" if process.late else ""
    text = f"{process.label}{late}{ended}: {_sums(kinds, memory, shown)}"
    if process.container:
        text += f", container {process.container[:12]}"
    return replace(row, text=text, frames=())


def _rest_row(node: int, rest: Amounts) -> MemoryRow:
    """What a process holds beyond what its stacks say."""
    said = "no stack is known, as the table of stacks was full or is not all held here"
    frames = (Frame(0, "status", said),)
    live, grown, _, blocks, *_ = map(int, rest.tolist())
    return MemoryRow(-2 - node, 1, None, f"[{said}]", live, grown, 0, blocks, 0, 0.0, frames)


def _ended(moment: Moment, process: int) -> bool:
    return 0 < moment.who.process(process).ended <= moment.at


def _total(moment: Moment, memory: Memory, leaks: Sequence[Leak], late: Sequence[Process]) -> str:
    """Of those that live; what those did that have ended stands for itself."""
    if not memory.kinds and (why := unseen("memory", moment)):
        return f"not known: {why}"
    alive = [k for k in memory.kinds if not _ended(moment, k.process)]
    gone = [k for k in memory.kinds if _ended(moment, k.process)]
    found = f"{units.count(len({k.process for k in alive}), 'process')}: {_sums(alive, memory)}"
    if any(k.allocs for k in gone):
        found += f"; {len({k.process for k in gone})} ended, {_rate(gone, memory)}"
    if late:
        found = f"seen since {moment.scale.text(min(p.late for p in late))}, {found}"
    if leaks:
        rate = units.size(sum(k.rate for k in leaks))
        found = f"{len(leaks)} LEAK{'S' if len(leaks) > 1 else ''} {rate}/s  {found}"
    return found


def _late(moment: Moment) -> list[Process]:
    """Who lives, and had used CUDA before it was first seen."""
    every = moment.who.processes.values()
    return [p for p in every if 0 < p.late <= moment.at and not _ended(moment, p.id)]


def _notes(
    moment: Moment, memory: Memory, findings: Findings, late: Sequence[Process]
) -> tuple[str, ...]:
    """Warnings, worst first."""
    notes = list(state("memory", moment))
    if late:
        named = ", ".join(p.label for p in late[:FEW])
        named += f" and {len(late) - FEW} more" if len(late) > FEW else ""
        first = moment.scale.text(late[0].late) if len(late) == 1 else "they were seen"
        notes.append(f"memory from before {first} is not counted: {named}")
    failed, unknown, shed = (
        [(getattr(k, what), k.process) for k in memory.kinds] for what in ("failed", "unknown",
                                                                            "shed")
    )  # fmt: skip
    for counts, said in (
        (failed, "allocations and frees failed"),
        (unknown, "frees of memory from before the probes were attached"),
        (shed, "calls without a row of their own, to save cost; the totals are exact"),
    ):
        n = sum(count for count, _ in counts)
        if n:
            who = {moment.who.process(id).label for count, id in counts if count}
            of = who.pop() if len(who) == 1 else f"{len(who)} processes"
            notes.append(f"{units.si(n)} {said} ({of})")
    if not memory.whole:
        notes.append(
            f"of {units.size(memory.unexplained)} no stack is known: the table of stacks was full, "
            "or too little is held before this moment"
        )
    if findings.left_out:
        notes.append(f"{units.si(findings.left_out)} stacks were too many to look for leaks in")
    young = [u for u in findings.unjudged if not moment.who.process(u.process).ended]
    if young:
        label = moment.who.process(young[0].process).label
        others = f" and {len(young) - 1} more" if len(young) > 1 else ""
        notes.append(f"{label}{others}: not seen for long enough to tell of leaks")
    return tuple(notes)
