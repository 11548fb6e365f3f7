"""What a session says of GPUs and of processes that use CUDA, in plain values: for ``report``."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Collection
from dataclasses import asdict
from typing import Any

from dsprobe.recordings import session as sn
from dsprobe.recordings.blocked import CallRow, calls, open_calls, slowest_calls
from dsprobe.recordings.gpus import gpus, plain, xids
from dsprobe.recordings.identities import Identities, Process
from dsprobe.recordings.launches import Launches, by_stream, by_thread, longest_gaps
from dsprobe.recordings.leaks import Thresholds, find_leaks
from dsprobe.recordings.memory import Memory, memory_at
from dsprobe.recordings.peaks import peaks
from dsprobe.recordings.session import Session
from dsprobe.recordings.stacks import Stacks, where, wrappers
from dsprobe.recordings.walltime import WallTime

SECOND = 10**9
PROBES = ("memory", "launches", "calls")
MAX_PROCESSES = 64
MAX_STACKS = 1000
MAX_ENDED = 8
"""Of processes that have ended, the latest."""


def report(
    session: Session, start: int, end: int, thresholds: Thresholds, limit: int
) -> dict[str, Any]:
    """What happened within (start, end], ready for JSON; lists of single things have at most
    ``limit`` entries.  Sizes are bytes, times seconds, but for ``*_ns`` (CLOCK_MONOTONIC)."""
    return _Report(session, start, end, thresholds, limit).made()


class _Report:
    def __init__(
        self, session: Session, start: int, end: int, thresholds: Thresholds, limit: int
    ) -> None:
        self.session, self.start, self.end = session, start, end
        self.thresholds, self.limit = thresholds, limit
        self.who, self.stacks = Identities(session), Stacks(session)
        self.who.refresh()
        self.stacks.refresh()
        self.wall = WallTime(sn.clock(session), sn.facts(session))

        self.memory = memory_at(session, end, start, self.who)
        self.inside = wrappers(self.stacks.every())

    def made(self) -> dict[str, Any]:
        facts = sn.facts(self.session)
        states = sn.coverage(self.session, self.end)
        probes = {name: states[name, ""] for name in PROBES if (name, "") in states}
        return {
            "source": self.session.name,
            "host": facts.get("host", ""),
            "start": self.wall.iso(self.start),
            "end": self.wall.iso(self.end),
            "start_ns": self.start,
            "end_ns": self.end,
            "duration_s": (self.end - self.start) / SECOND,
            "facts": facts,
            "probes": {name: asdict(state) for name, state in probes.items()},
            "nvml": asdict(states["nvml", ""]) if ("nvml", "") in states else None,
            **plain(
                gpus(self.session, self.start, self.end),
                xids(self.session, self.start, self.end),
            ),
            "processes": self.processes(),
            **self.leaks(),
            "growing": self.growing(),
            "unexplained": 0 if self.memory.whole else self.memory.unexplained,
            "gaps": self.gaps(),
            "slow_calls": self.slow_calls(),
            "open_calls": self.open_calls(),
            "lost": dict(self.session.lost()),
            "problems": list(self.session.problems),
        }

    # -- processes -------------------------------------------------------------------------------

    def processes(self) -> list[dict[str, Any]]:
        """Those that lived in the interval, the newest of them that have ended last."""
        all = sorted(self.who.processes.values(), key=lambda p: p.id)
        lived = [p for p in all if not p.ended or p.ended > self.end]
        ended = [p for p in all if self.start < p.ended <= self.end]
        threads: dict[int, list[Launches]] = defaultdict(list)
        streams: dict[int, list[Launches]] = defaultdict(list)
        made: dict[int, list[CallRow]] = defaultdict(list)
        for row in by_thread(self.session, self.start, self.end, self.who):
            threads[row.process].append(row)
        for row in by_stream(self.session, self.start, self.end, self.who):
            streams[row.process].append(row)
        for call in calls(self.session, self.start, self.end, self.who):
            made[call.process].append(call)
        most = peaks(self.session, self.start, self.end)
        return [
            self._process(p)
            | {
                "memory": _memory(self.memory, p.id, most),
                "threads": [self._launches(r) for r in threads[p.id][: self.limit]],
                "streams": [self._launches(r) for r in streams[p.id][: self.limit]],
                "blocked": _by_kind(made[p.id]),
                "calls": [self._call(r) for r in made[p.id][: self.limit]],
            }
            for p in [*lived[:MAX_PROCESSES], *ended[-MAX_ENDED:]]
        ]

    def _process(self, p: Process) -> dict[str, Any]:
        times = {n: self.wall.iso(t) if t else None for n, t in (("ended", p.ended),
                                                                 ("late", p.late))}  # fmt: skip
        return asdict(p) | times | {"label": p.label}

    def _launches(self, row: Launches) -> dict[str, Any]:
        return {
            "thread": self.who.thread(row.thread).label if row.thread else None,
            "stream": row.stream,
            "launches": row.count,
            "rate": row.rate,
            "interval_p50_s": _seconds(row.p50),
            "interval_p99_s": _seconds(row.p99),
            "longest_s": row.longest / SECOND,
            "quiet_s": row.quiet / SECOND,
            "shed": None if math.isnan(row.shed) else row.shed,
        }

    def _call(self, row: CallRow) -> dict[str, Any]:
        return {
            "function": self.who.text(row.function),
            "kind": row.kind,
            "copy": row.copy,
            "count": row.count,
            "failed": row.failed,
            "busy_s": row.busy / SECOND,
            "threads": row.threads,
            "rate": row.rate,
            "timed": row.timed,
            "p50_s": _seconds(row.p50),
            "p99_s": _seconds(row.p99),
            "bytes": row.bytes,
        }

    # -- single things ---------------------------------------------------------------------------

    def leaks(self) -> dict[str, Any]:
        th = self.thresholds
        found = find_leaks(self.session, self.start, self.end, self.stacks, th)
        return {
            "leaks": [
                {
                    "process": self.who.process(leak.process).label,
                    "process_id": leak.process,
                    "stack_id": leak.stack,
                    "kind": leak.kind,
                    "live": leak.live,
                    "blocks": leak.blocks,
                    "grown": leak.grown,
                    "bytes_per_minute": leak.rate * 60,
                    "blocks_per_minute": leak.block_rate * 60,
                    "windows": leak.windows,
                    "window_s": leak.window / SECOND,
                    **self._stack(leak.stack),
                    "where": leak.place.text,
                }
                for leak in found.leaks
            ],
            "judged": [self.who.process(id).label for id in found.judged],
            "unjudged": [
                {
                    "process": self.who.process(u.process).label,
                    "seen_s": u.seen / SECOND,
                    "ended": 0 < self.who.process(u.process).ended <= self.end,
                }
                for u in found.unjudged
            ],
            "needed_s": th.needed / SECOND,
            "stacks_left_out": found.left_out,
        }

    def _stack(self, id: int, among: Collection[int] = ()) -> dict[str, Any]:
        """Stack ``id``, named by the frame that tells it from the others ``among``."""
        frames = self.stacks.frames(id)
        same = self.stacks.same(id)
        others = {other for other in among if self.stacks.same(other) != same}
        common = {f.id for other in others for f in self.stacks.frames(other)}
        return {
            "where": where(frames, common, self.inside).text,
            "caching_allocator": any("CachingAllocator" in f.function for f in frames),
            "frames": [asdict(f) | {"text": f.text} for f in frames],
        }

    def growing(self) -> list[dict[str, Any]]:
        """The stacks that hold most more at the end than at the start."""
        rows = sorted(self.memory.stacks, key=lambda s: -s.grown)[: self.limit]
        known = {row.stack for row in self.memory.stacks[:MAX_STACKS]}
        return [
            {
                "process": self.who.process(row.process).label,
                "process_id": row.process,
                "stack_id": row.stack,
                "kind": row.kind,
                "live": row.live,
                "blocks": row.blocks,
                "grown": row.grown,
                "age_s": row.age / SECOND,
                **self._stack(row.stack, known),
            }
            for row in rows
            if row.grown > 0
        ]

    def gaps(self) -> list[dict[str, Any]]:
        return [
            {
                "end": self.wall.iso(g.t),
                "end_ns": g.t,
                "duration_s": g.duration / SECOND,
                "process": self.who.process(g.process).label,
                "thread": self.who.thread(g.thread).label,
                "within": self.who.text(g.function) or None,
                "within_s": g.within / SECOND,
            }
            for g in longest_gaps(self.session, self.start, self.end, self.limit)
        ]

    def slow_calls(self) -> list[dict[str, Any]]:
        found = slowest_calls(self.session, self.start, self.end, self.limit)
        stacks = {c.stack for c in found} - {0}
        return [
            {
                "end": self.wall.iso(c.t),
                "end_ns": c.t,
                "duration_s": c.duration / SECOND,
                "process": self.who.process(c.process).label,
                "thread": self.who.thread(c.thread).label,
                "function": self.who.text(c.function),
                "kind": c.kind,
                "result": c.result,
                "bytes": c.bytes,
                **(self._stack(c.stack, stacks) if c.stack else {"where": None, "frames": []}),
            }
            for c in found
        ]

    def open_calls(self) -> list[dict[str, Any]]:
        return [
            {
                "process": self.who.process(c.process).label,
                "thread": self.who.thread(c.thread).label,
                "function": self.who.text(c.function),
                "for_s": c.duration / SECOND,
            }
            for c in open_calls(self.session, self.end)[: self.limit]
        ]


def _memory(memory: Memory, process: int, most: dict[tuple[int, str], int]) -> dict[str, Any]:
    kinds = [k for k in memory.kinds if k.process == process]
    return {
        "live": sum(k.live for k in kinds if k.device),
        "grown": sum(k.grown for k in kinds if k.device),
        "kinds": [
            {n: v for n, v in asdict(k).items() if n not in ("process", "seen")}
            | {"peak": max(most.get((process, k.kind), 0), k.live), "seen_s": k.seen / SECOND}
            for k in kinds
        ],
    }


def _by_kind(rows: list[CallRow]) -> dict[str, dict[str, float]]:
    found: dict[str, dict[str, float]] = {}
    for row in rows:
        name = row.kind if row.copy in ("none", "any") else f"{row.kind} {row.copy}"
        if not row.timed:  # as launches: nobody knows how long they took
            name = f"{name}, not timed"
        entry = found.setdefault(name, {"busy_s": 0.0, "threads": 0.0, "count": 0, "failed": 0})
        entry["busy_s"] += row.busy / SECOND
        entry["threads"] += row.threads
        entry["count"] += row.count
        entry["failed"] += row.failed
    return found


def _seconds(ns: float) -> float | None:
    return None if math.isnan(ns) else ns / SECOND
