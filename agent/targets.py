"""Which processes use CUDA: what discovery finds, who is wanted, who has gone.

A library loses its probes when nobody maps it any more.  A forked child maps it without a word, so
a scan that began after the last known process had gone must find nobody.
"""

from __future__ import annotations

import os
import selectors
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from dsprobe.agent.discovery import Discovery
from dsprobe.agent.libraries import MAX_LIBRARIES, Cuda, Libraries
from dsprobe.agent.libraryfiles import Key
from dsprobe.agent.search import Found, Scanned, Tree
from dsprobe.agent.shares import room
from dsprobe.probes.probe import Batch, BpfProbe
from dsprobe.probes.tracer import Coverage, Tracer

MAX_PROCESSES = 2048
"""Of which, as of libraries, one user has a share (:mod:`dsprobe.agent.shares`)."""
_NAMED = 4


@dataclass
class Process:
    """``t``: when it was last looked at; ``pidfd`` is -1 where there is none."""

    t: int
    pidfd: int
    keys: set[Key]
    uid: int


class Targets:
    """Call :meth:`begin` once, :meth:`start` when programs are loaded, and :meth:`tick` often.

    ``pids``: only these processes and what descends from them.
    """

    def __init__(
        self, selector: selectors.BaseSelector, tracer: Tracer, pids: Sequence[int] = ()
    ) -> None:
        self._selector, self._tracer, self._pids = selector, tracer, frozenset(pids)
        self._probe = next((p for p in tracer.wanted if isinstance(p, Cuda)), None)
        self._discovery: Discovery | None = None
        self._libraries: Libraries | None = None
        self._lanes: dict[str, str] = {}
        self._processes: dict[int, Process] = {}
        self._wanted: frozenset[int] = frozenset()
        """Who was asked for so far; BPF adds children and takes off what ends."""
        self._all_wanted = 0 if pids else 1
        """Since when it is known who is wanted; 0: not yet."""
        self._strangers: set[int] = set()
        self._errors: dict[int, str] = {}
        self._refused: tuple[set[int], set[int]] = set(), set()
        """Users not all of whose processes and libraries are followed: as the scan before found,
        and since."""
        self._looked = self._closed = 0
        self._said = ("", "")

    # -- life ---------------------------------------------------------------------------------

    def begin(self) -> list[Coverage]:
        """Look for targets, while programs are still being compiled."""
        if self._probe is None:
            return []
        self._discovery = Discovery(self._selector, self._probe.name)
        return self._discovery.begin()

    def start(self, loaded: Iterable[Coverage]) -> list[Coverage]:
        """Programs are loaded: what is to be said of that.

        Of the probes that see nothing without a library it is not said that they are attached:
        that is said of them when there is one.
        """
        probe = self._probe
        on = [p for p in self._tracer.probes if probe and _needs(type(p), type(probe))]
        if probe is None:
            return list(loaded)
        if not on:
            self.close()
            why = "no probe of CUDA calls works here"
            return [*loaded, Coverage(probe.name, "discovery", "off", why)]
        names = {p.name for p in on}
        said = [c for c in loaded if not c.program and c.status == "attached"]
        self._lanes = {c.probe: c.reason for c in said if c.probe in names}
        rest = [c for c in loaded if c.program or c.probe not in self._lanes]
        self._libraries = Libraries(self._tracer, probe)
        if self._pids:
            self._want(probe, self._pids)
        return rest

    def tick(self, now: int) -> tuple[list[Coverage], list[Batch]]:
        """Take up what was found: what changed, and rows of ``meta.placement``."""
        if not (self._discovery and self._libraries and self._probe):
            return [], []
        running = {p.name for p in self._tracer.probes}
        if self._probe.name not in running:  # it was taken off
            self.close()
            return [], []
        self._lanes = {lane: note for lane, note in self._lanes.items() if lane in running}
        strangers = self._probe.strangers()
        for pid in strangers - self._strangers:
            self._discovery.look(pid)
        self._strangers = strangers
        given, coverage = self._discovery.tick(now)
        for g in given:  # all of them before probes are put in for any: they may share a library
            if isinstance(g, Found) and g.copies and g.pid not in self._processes:
                self._probe.look_at(g.pid)
        for g in given:
            if isinstance(g, Found):
                try:
                    self._found(g)
                finally:
                    g.close()
            elif isinstance(g, Tree):
                self._want(self._probe, g.pids)
            else:
                self._scanned(g)
        libraries = self._libraries
        coverage += libraries.coverage
        coverage += self._say()
        batches, libraries.batches, libraries.coverage = libraries.batches, [], []
        return coverage, batches

    @property
    def busy(self) -> bool:
        """Whether processes are being looked at, and the next tick should be soon."""
        return self._discovery is not None and self._discovery.busy

    def close(self) -> None:
        """Stop looking.  What is attached is the tracer's to take off."""
        if self._discovery:
            self._discovery.close()
            self._discovery = None
        for process in self._processes.values():
            self._unfollow(process)
        self._processes.clear()
        if self._libraries:
            self._libraries.close()

    # -- processes ----------------------------------------------------------------------------

    def _want(self, probe: Cuda, pids: frozenset[int]) -> None:
        """Until a look at the tree brings nobody new: from then on BPF follows forks."""
        assert self._discovery
        new = pids - self._wanted
        if new:
            self._wanted |= new
            probe.want(new)
            self._discovery.tree(self._pids)
        else:
            self._all_wanted = time.monotonic_ns()
            self._discovery.scan(at_once=True)

    def _found(self, f: Found) -> None:
        assert self._discovery
        assert self._libraries
        assert self._probe
        known = self._processes.get(f.pid)
        if f.error and self._errors.get(f.pid) != f.error and len(self._errors) < MAX_PROCESSES:
            self._errors[f.pid] = f.error
            coverage = Coverage(self._probe.name, f"process {f.pid}", "missing", f.error)
            self._libraries.coverage.append(coverage)
        if not f.error and f.copies and self._errors.pop(f.pid, ""):
            coverage = Coverage(self._probe.name, f"process {f.pid}", "attached", "")
            self._libraries.coverage.append(coverage)
        if not f.copies:
            if known and known.t < f.t:
                self._drop(f.pid)
            return
        if not self._all_wanted or not self._probe.wants(f.pid):
            return
        holders = [] if known else [p.uid for p in self._processes.values()]
        if not known and not room(holders, f.uid, MAX_PROCESSES):
            self._refused[1].add(f.uid)
            return
        process = self._follow(f, known.keys if known else set())
        for copy in f.copies:
            new = copy.key not in process.keys or f.pid in self._strangers
            if self._libraries.mapped(f, copy, new):
                self._discovery.scan()
            process.keys.add(copy.key)
        self._refused[1].update(self._libraries.refused)
        self._libraries.refused.clear()
        self._let_go(f.pid, process.keys - {c.key for c in f.copies})
        process.keys &= {c.key for c in f.copies}

    def _follow(self, f: Found, keys: set[Key]) -> Process:
        """By this descriptor: an earlier one may be of another process that had its PID."""
        if f.pid in self._processes:
            self._unfollow(self._processes[f.pid])
        pidfd = os.dup(f.pidfd) if f.pidfd >= 0 else -1
        if pidfd >= 0:
            self._selector.register(pidfd, selectors.EVENT_READ, lambda _: self._drop(f.pid))
        self._processes[f.pid] = made = Process(f.t, pidfd, keys, f.uid)
        return made

    def _unfollow(self, process: Process) -> None:
        if process.pidfd >= 0:
            self._selector.unregister(process.pidfd)
            os.close(process.pidfd)

    def _drop(self, pid: int) -> None:
        """It has ended, or maps nothing any more."""
        process = self._processes.pop(pid)
        self._unfollow(process)
        self._let_go(pid, process.keys)

    def _let_go(self, pid: int, keys: Iterable[Key]) -> None:
        assert self._libraries
        for key in list(keys):
            if self._libraries.let_go(pid, key) and self._discovery:
                self._discovery.scan()

    def _scanned(self, s: Scanned) -> None:
        assert self._libraries
        if self._all_wanted and s.began > self._all_wanted:
            self._looked, self._closed = s.looked, s.closed
        for pid, process in list(self._processes.items()):
            if pid not in s.users and process.t < s.began:
                self._drop(pid)
        self._errors = {pid: e for pid, e in self._errors.items() if pid in s.users}
        self._refused = self._refused[1], set()
        if len(self._processes) < MAX_PROCESSES:
            self._libraries.detach_empty(s.began)

    # -- what is said -------------------------------------------------------------------------

    def _say(self) -> list[Coverage]:
        """Of the lanes, where it changes."""
        status, reason = self._state()
        if not status or (status, reason) == self._said:
            return []
        self._said = status, reason
        return [self.state_of(lane) for lane in self._lanes]

    def state_of(self, lane: str) -> Coverage:
        """What holds for a probe: as was said last, and attached where it needs no library."""
        note = self._lanes.get(lane)
        status, reason = self._said if note is not None and self._said[0] else ("attached", "")
        return Coverage(lane, "", status, "; ".join(x for x in (reason, note or "") if x))

    def _left_out(self) -> str:
        users = sorted(self._refused[0] | self._refused[1])
        if not users:
            return ""
        named = ", ".join(map(str, users[:_NAMED])) + (" ..." if len(users) > _NAMED else "")
        return (
            f"there are more than {MAX_PROCESSES:,} processes or {MAX_LIBRARIES} libraries, or more"
            f" than a quarter of them are one user's: not all of user {named} are seen"
        )

    def _state(self) -> tuple[str, str]:
        """A word of STATUSES, "" while it is not known, and the reason."""
        assert self._libraries
        d = self._discovery
        if any(x.since and not x.error for x in self._libraries):
            return "attached", self._left_out()
        for x in self._libraries:
            if x.error:
                return "missing", f"{x.name} cannot be traced: {x.error}"
        if not self._looked or not self._all_wanted or (d and d.reading):
            return "", ""
        begins = "lanes begin when one does"
        if not self._pids:
            looked = f"{self._looked:,} were looked at in /proc"
            if self._closed:
                looked += f", {self._closed:,} of them may not be: run dsprobe on the host, as root"
            # Nothing is amiss: most hosts, and every host before its server starts, are like that.
            return "attached", f"no process has libcuda.so mapped ({looked}); {begins}"
        asked = f"--pid {','.join(map(str, sorted(self._pids)))}"
        if not any(os.path.exists(f"/proc/{pid}") for pid in self._wanted):
            return "missing", f"the processes asked for ({asked}) have ended"
        return "missing", (
            f"no process of those asked for ({asked}), nor a child of theirs, has libcuda.so"
            f" mapped; {begins}"
        )


def _needs(probe: type[BpfProbe], other: type[BpfProbe] | type[Cuda]) -> bool:
    """Whether ``probe`` is ``other``, or requires it."""
    return probe is other or any(_needs(p, other) for p in probe.requires)
