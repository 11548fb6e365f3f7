"""Driver libraries with probes in them.

A library is a file, by device and inode: containers that bring their own copies have several.  It
gets its probes once, and with them every process that maps it now or later.  Overlays show one
file as several, on devices of their own: what a probe is in beneath is tried out
(:mod:`dsprobe.probes.samefile`).
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol, runtime_checkable

import numpy as np

from dsprobe.agent.libraryfiles import Key
from dsprobe.agent.search import Copy, Found
from dsprobe.agent.shares import room
from dsprobe.probes.driver import Driver
from dsprobe.probes.probe import Batch, Uprobe
from dsprobe.probes.samefile import same_file
from dsprobe.probes.tracer import Coverage, Tracer
from dsprobe.recordings.cudastreams import META_PLACEMENT
from dsprobe.recordings.model import Rows

MAX_LIBRARIES = 32
FORGET_NS = 60_000_000_000
"""A plan that no library has had for so long is forgotten: by then its probes are surely off."""
ENTRY, RETURN = "entry", "return"
_NAMED = 4
"""Functions that coverage names; meta.placement has all."""


@runtime_checkable
class Cuda(Protocol):
    """The probe that knows which functions are traced, and how (:mod:`dsprobe.probes.cuda`)."""

    name: str

    def want(self, pids: Iterable[int]) -> None:
        """See only these processes and, from then on, their children; those of all calls."""

    def wants(self, pid: int) -> bool:
        """Whether calls of this process are seen."""

    def look_at(self, pid: int) -> None:
        """A process maps a library that may be given probes next."""

    def process_seen(self, pid: int, driver: Driver) -> None:
        """A process maps a library; before probes are put into it where that is still to come."""

    def strangers(self) -> set[int]:
        """Processes whose calls are seen though :meth:`process_seen` was not called."""

    def library(self, driver: Driver, returns: bool) -> tuple[list[Uprobe], Rows]:
        """Where to put probes, without those on returns if not ``returns``, and rows of
        META_PLACEMENT as if all of them could be put there."""

    def forget(self, uprobes: Iterable[Uprobe]) -> None:
        """All of these have been taken off, and are not put anywhere again."""


@dataclass
class Library:
    """``name`` is what coverage calls it.  ``error``: why it has no probes; ``since``: when it got
    them; ``empty``: since when nobody is known to map it, 0 while somebody does.  ``fd`` is open on
    it while it has probes; ``doubt`` is why another one may be the same file beneath; ``uid`` is
    the user who mapped it first; ``versions`` are those of its contents by each key."""

    key: Key
    uid: int
    path: str
    name: str
    driver: Driver | None
    error: str = ""
    users: set[int] = field(default_factory=set)
    since: int = 0
    uprobes: Sequence[Uprobe] = ()
    empty: int = 0
    fd: int = -1
    doubt: str = ""
    versions: dict[Key, tuple[int, int]] = field(default_factory=dict)


@dataclass
class _Plan:
    """Where probes go in libraries of one build.  ``code`` is without its path.  ``unused``: since
    when no library has it, 0 while one does."""

    code: Driver
    returns: bool
    uprobes: list[Uprobe]
    placement: Rows
    unused: int = 0


class Libraries:
    """``coverage`` and ``batches`` are what there is to say; the caller takes them."""

    def __init__(self, tracer: Tracer, cuda: Cuda) -> None:
        self._tracer, self._cuda = tracer, cuda
        self._by_key: dict[Key, Library] = {}
        self._plans: list[_Plan] = []
        self.refused: set[int] = set()
        """Users for whose libraries there was no room; the caller takes them."""
        self.coverage: list[Coverage] = []
        self.batches: list[Batch] = []

    def __iter__(self) -> Iterator[Library]:
        """Each once, though the same file may be known by several keys."""
        return iter({id(x): x for x in self._by_key.values()}.values())

    def get(self, key: Key) -> Library | None:
        return self._by_key.get(key)

    def mapped(self, f: Found, copy: Copy, new: bool) -> bool:
        """A process maps a library, ``new`` if that was not known: put probes into it where there
        are none.  True where all processes are to be looked at again, as others may map it."""
        library = self._by_key.get(copy.key)
        changed = library is not None and library.versions[copy.key] != copy.version
        if library and changed:  # written to in place: probes sit in what it was
            self._remove(library, "its file has changed")
            library = None
        if library is None:
            library = self._new(copy, f.uid)
        if library is None:
            return changed
        library.users.add(f.pid)
        library.empty = 0
        if library.driver:
            if new or changed:
                self._cuda.process_seen(f.pid, library.driver)
            if not library.since and not library.error:
                self._attach(library, library.driver, copy.fd, f.returns)
        return changed

    def let_go(self, pid: int, key: Key) -> bool:
        """It maps it no more; whether nobody is known to any more."""
        library = self._by_key.get(key)
        if library is None:
            return False
        library.users.discard(pid)
        if library.users or library.empty:
            return False
        library.empty = time.monotonic_ns()
        return True

    def detach_empty(self, since: int) -> None:
        """Those that nobody mapped at ``since`` lose their probes."""
        for library in list(self):
            if library.empty and library.empty < since:
                self._remove(library, "no process maps it any more")

    def close(self) -> None:
        """Probes are the tracer's to take off."""
        for library in self:
            if library.since:
                os.close(library.fd)
        self._by_key.clear()

    # -- parts --------------------------------------------------------------------------------

    def _remove(self, library: Library, why: str) -> None:
        self._by_key = {k: x for k, x in self._by_key.items() if x is not library}
        if library.since:
            for which in (RETURN, ENTRY):
                self._tracer.detach_library((library.key, which))
            os.close(library.fd)
        used = {id(x.uprobes) for x in self}
        for plan in self._plans:
            if not plan.unused and id(plan.uprobes) not in used:
                plan.unused = time.monotonic_ns()
        self._tell(library, "detached", why)

    def _room(self, uid: int, good: bool) -> bool:
        """Whether another library of a user may be followed.  A ``good`` one takes the place of one
        that cannot be traced, the user's own first."""
        holders = [x.uid for x in self]
        if room(holders, uid, MAX_LIBRARIES):
            return True
        bad = [x for x in self if good and x.error]
        for x in sorted(bad, key=lambda x: x.uid != uid):
            holders.remove(x.uid)
            if room(holders, uid, MAX_LIBRARIES):
                self._remove(x, "one that can be traced has its place")
                return True
            holders.append(x.uid)
        return False

    def _new(self, copy: Copy, uid: int) -> Library | None:
        try:
            library, doubt = self._twin(copy), ""
        except OSError as e:
            library, doubt = None, f"; {e}: what it does is counted twice if it is one file with" \
                " another that is traced"  # fmt: skip
        if library is None:
            if not self._room(uid, not copy.error):
                self.refused.add(uid)
                return None
            library = Library(
                copy.key, uid, copy.path, self._name(copy), copy.driver, copy.error, doubt=doubt
            )
        library.versions[copy.key] = copy.version
        self._by_key[copy.key] = library
        if library.error:
            self._tell(library, "missing", library.error)
        return library

    def _name(self, copy: Copy) -> str:
        """Containers may each have a copy of the same build at the same path."""
        build = copy.driver.build_id[:12] if copy.driver else ""
        name = f"{copy.path} ({build})" if build else copy.path
        taken = name in {x.name for x in self}
        return f"{name}, inode {copy.key[1]} of device {copy.key[0]}" if taken else name

    def _twin(self, copy: Copy) -> Library | None:
        """The library with probes that is the same file beneath.  Raises OSError where it cannot be
        told."""
        build = copy.driver.build_id if copy.driver else None
        like = [x for x in self if x.since and x.driver and x.driver.build_id == build
                and x.key[0] != copy.key[0]]  # fmt: skip
        at = same_file(copy.fd, [x.fd for x in like]) if like else None
        return None if at is None else like[at]

    def _attach(self, library: Library, driver: Driver, fd: int, with_returns: bool) -> None:
        try:
            uprobes, placement = self._plan(driver, with_returns)
        except ValueError as e:
            library.error = str(e)
            self._tell(library, "missing", library.error)
            return
        errors: list[tuple[Uprobe, str]] = []
        # A call that is entered in between is then not seen; the other way round it would look as
        # if it went on for ever.
        for which, returns in ((RETURN, True), (ENTRY, False)):
            these = [u for u in uprobes if u.returns == returns]
            if these:
                errors += self._tracer.attach_library((library.key, which), fd, these)
        library.since, library.uprobes = time.monotonic_ns(), uprobes
        library.fd = os.dup(fd)
        places = {f.offset + driver.entries[name].offset: name
                  for name, f in driver.functions.items() if name in driver.entries}  # fmt: skip
        failed = {places[u.offset]: why for u, why in errors}
        self._placed(library, placement, failed, with_returns)

    def _plan(self, driver: Driver, returns: bool) -> tuple[list[Uprobe], Rows]:
        """Made once for all copies of one build."""
        code = replace(driver, path="", version="")
        for plan in self._plans:
            if (plan.code, plan.returns) == (code, returns):
                plan.unused = 0
                return plan.uprobes, plan.placement.copy()
        for plan in [p for p in self._plans if p.unused]:
            if time.monotonic_ns() - plan.unused > FORGET_NS:
                self._plans.remove(plan)
                kept = {u.cookie for p in self._plans for u in p.uprobes}
                self._cuda.forget([u for u in plan.uprobes if u.cookie not in kept])
        uprobes, placement = self._cuda.library(driver, returns)
        if driver.refused:
            names = list(driver.refused)
            none = META_PLACEMENT.rows(
                library=[driver.path] * len(names), build_id=[driver.build_id] * len(names),
                function=names, why=list(driver.refused.values()),
            )  # fmt: skip
            placement = np.concatenate([placement, none])
        self._plans.append(_Plan(code, returns, uprobes, placement.copy()))
        return uprobes, placement

    def _placed(
        self, library: Library, placement: Rows, failed: dict[str, str], with_returns: bool
    ) -> None:
        """Say which functions have a probe, and where it is expensive."""
        placement["t"] = library.since
        placement["library"] = library.path
        for row in placement:
            if row["function"] in failed:
                row["attached"], row["why"] = 0, failed[row["function"]]
        on = placement["attached"] == 1
        names = placement["function"]
        dear, without = names[on & (placement["cheap"] == 0)], names[~on]
        said = f"{int(on.sum())} of {len(names)} functions"
        if len(dear):
            said += f"; expensive in {len(dear)}: {_some(dear)}"
        if len(without):
            said += f"; not in {_some(without)}"
        if not with_returns:
            # From 6.11 on a probed function returns through a system call, for which a filter that
            # does not know it kills the process.  Probes go into all processes, and a filter may be
            # set at any time.
            said += ("; on entry only: calls are counted, not timed, and memory is not followed, as"
                     " this kernel lets seccomp filters kill a process at a probe on a"
                     " return")  # fmt: skip
        if on.any():
            self._tell(library, "attached", said + library.doubt)
        else:
            library.error = next(iter(failed.values()), "it has none of the functions to be traced")
            self._tell(library, "missing", library.error)
        self.batches.append((META_PLACEMENT, placement))

    def _tell(self, library: Library, status: str, reason: str) -> None:
        self.coverage.append(Coverage(self._cuda.name, library.name, status, reason))


def _some(names: Sequence[str]) -> str:
    more = len(names) - _NAMED
    return ", ".join(map(str, names[:_NAMED])) + (f" and {more} more" if more > 0 else "")
