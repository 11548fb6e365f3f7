"""Looks into processes for driver libraries, on a thread of its own: a read of /proc may hang.

A scan goes through all processes, as spread out as it was asked for; a single process is looked at
in between.  What a library is, :mod:`dsprobe.agent.libraryfiles` reads once for each file.
"""

from __future__ import annotations

import contextlib
import os
import queue
import threading
import time
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from dsprobe.agent.libraryfiles import Key, Known, LibraryFiles
from dsprobe.agent.shares import NOBODY
from dsprobe.agent.vetting import Vetting
from dsprobe.probes import driver, processes
from dsprobe.probes.driver import Driver

STALLED_NS = 3_000_000_000
MAX_PATH = 512


@dataclass(frozen=True)
class Copy:
    """A library that a process maps, open at ``fd`` (the taker's to close); without ``driver`` it
    is not one, for the reason ``error``.  ``version`` changes with its contents."""

    key: Key
    version: tuple[int, int]
    path: str
    fd: int
    driver: Driver | None
    error: str = ""


@dataclass(frozen=True)
class Found:
    """What process ``pid`` mapped at ``t``: nothing also where it has ended.

    ``pidfd`` is the taker's to close, -1 where there is none.  ``error``: what cannot be read.
    ``returns``: whether this kernel's probes on returns harm nobody (:meth:`Vetting.survives`).
    """

    t: int
    pid: int
    pidfd: int
    copies: tuple[Copy, ...] = ()
    error: str = ""
    uid: int = NOBODY
    returns: bool = True

    def close(self) -> None:
        for fd in (self.pidfd, *(c.fd for c in self.copies)):
            if fd >= 0:
                os.close(fd)


@dataclass(frozen=True)
class Tree:
    """The processes that were asked for, and all that descend from them."""

    pids: frozenset[int]


@dataclass(frozen=True)
class Scanned:
    """A scan that began at ``began`` and took ``busy`` ns of CPU time has looked at ``looked``
    processes, of which ``closed`` may not be looked into; ``users`` map a driver library."""

    began: int
    busy: int
    looked: int
    closed: int
    users: frozenset[int]


class _Late:
    """Asks that files which take long to read be put aside."""


Given = Found | Tree | Scanned

_SLICE = 8
"""Processes that a scan looks at in one go."""


class Search:
    """``skip``: processes that are left alone; the caller's to change at any time."""

    def __init__(
        self, skip: Collection[int] = (), vetting: Vetting | None = None,
        proc: Path = Path("/proc"),
    ) -> None:  # fmt: skip
        self._skip, self._vetting, self._proc = skip, vetting or Vetting(), proc
        self._later: dict[int, None] = {}
        """Who maps libraries that are being read, in the order in which they came."""
        self._asked: queue.SimpleQueue[int | Iterator[int] | frozenset[int] | Known | _Late | None]
        self._asked = queue.SimpleQueue()
        self._files = LibraryFiles(self._vetting, self._asked.put)
        self._looking_again = False
        self._given: queue.SimpleQueue[Given] = queue.SimpleQueue()
        self._looking_at, self._since = 0, 0
        self._pause = 0.0
        self._closed = 0
        self._ended = False
        self._thread = threading.Thread(target=self._work, name="search", daemon=True)
        self._thread.start()

    # -- asking -------------------------------------------------------------------------------

    def look(self, pid: int) -> None:
        """Look at one process soon."""
        self._asked.put(pid)

    def scan(self, over: float = 0.0) -> None:
        """Look at all processes, spread out over so many seconds; ends a scan that goes on."""
        self._asked.put(self._scan(over))

    def tree(self, roots: Iterable[int]) -> None:
        """Find the descendants of ``roots``."""
        self._asked.put(frozenset(roots))

    def take(self) -> Iterator[Given]:
        """What there is by now.  Never waits."""
        if self._files.any_late():
            self._asked.put(_Late())
        with contextlib.suppress(queue.Empty):
            while True:
                yield self._given.get_nowait()

    @property
    def reading(self) -> bool:
        """Whether libraries are being read, whose processes are told of then."""
        return self._files.reading or self._looking_again

    @property
    def hangs_at(self) -> int:
        """The process whose files do not answer; 0 while all do."""
        pid, since = self._looking_at, self._since
        return pid if since and time.monotonic_ns() - since > STALLED_NS else 0

    def close(self) -> None:
        """Ask the thread to end; what it gives from now on is closed by it."""
        self._ended = True
        self._asked.put(None)
        for given in self.take():
            if isinstance(given, Found):
                given.close()

    def join(self, seconds: float) -> None:
        self._thread.join(seconds)

    # -- on the thread ------------------------------------------------------------------------

    def _work(self) -> None:
        scan: Iterator[int] | None = None
        while not self._ended:
            try:
                asked = self._asked.get(block=scan is None or self._pause > 0,
                                        timeout=None if scan is None else self._pause)  # fmt: skip
            except queue.Empty:
                if scan is not None and next(scan, None) is None:
                    scan = None
                continue
            if isinstance(asked, int):
                self._look(asked)
            elif isinstance(asked, frozenset):
                self._give(Tree(frozenset(children_of(asked, self._proc))))
            elif isinstance(asked, Known):
                self._looking_again = True  # before its place is free: more is to be found
                self._files.learn(asked)
                self._look_again()
            elif isinstance(asked, _Late):
                self._looking_again = True
                self._files.put_aside()
                self._look_again()
            elif asked is not None:
                scan, self._pause = asked, 0.0

    def _scan(self, over: float) -> Iterator[int]:
        began, busy, looked = time.monotonic_ns(), 0, 0
        self._closed = 0
        users = set()
        pids = [int(entry) for entry in os.listdir(self._proc) if entry.isdigit()]
        self._pause = over * _SLICE / max(len(pids), 1)
        for pid in pids:
            before = time.thread_time_ns()
            if self._look(pid, others=False):
                users.add(pid)
            busy += time.thread_time_ns() - before
            looked += 1
            if looked % _SLICE == 0:
                yield pid
        self._give(Scanned(began, busy, looked, self._closed, frozenset(users)))

    def _look(self, pid: int, others: bool = True) -> bool:
        """Whether ``pid`` maps one; without ``others``, one that does not is not told of."""
        if pid in self._skip:
            return False
        self._looking_at, self._since = pid, time.monotonic_ns()
        try:
            found = self._find(pid)
        except Exception as e:  # nor may one process
            why = f"process {pid} cannot be looked into: {type(e).__name__}: {e}"
            found = Found(time.monotonic_ns(), pid, -1, (), why)
        finally:
            self._since = 0
        if found is None:
            return True
        tells = bool(found.copies or found.error)
        if tells or others:
            self._give(found)
        else:
            found.close()
        return tells

    def _give(self, given: Given) -> None:
        self._given.put(given)
        if self._ended:
            self.close()

    def _find(self, pid: int) -> Found | None:
        """None where a library of it is still being read: it is looked at again then."""
        t = time.monotonic_ns()
        none = Found(t, pid, -1)
        try:
            # Most processes map none: they are asked this one thing.
            if not driver.libraries_of(pid, self._proc):
                return none
            pidfd = _pidfd(pid)
        except PermissionError:
            self._closed += 1
            return none
        except (OSError, ValueError):
            return none
        copies: list[Copy] = []
        known = processes.facts(pid, self._proc)
        uid = known.uid if known else NOBODY
        error, mapped, late = "", [], False
        with contextlib.suppress(OSError, ValueError):
            mapped = driver.libraries_of(pid, self._proc)  # of the process that pidfd holds
        for m in mapped:
            try:
                copy, aside = self._copy(m, uid)
                if aside:
                    error = f"{aside} of process {pid} takes long to read: not traced until it is"
                    self._later[pid] = None
                elif copy:
                    copies.append(copy)
                else:
                    late = True
            except FileNotFoundError:
                pass  # unmapped, or ended
            except OSError as e:
                path = processes.printable(os.fsencode(m.path), MAX_PATH)
                error = f"{path} of process {pid} cannot be opened: {e.strerror}"
        returns = not copies or self._vetting.survives()
        found = Found(t, pid, pidfd, tuple(copies), error, uid, returns)
        if late:
            self._later[pid] = None
            found.close()
        return None if late else found

    def _copy(self, mapped: driver.Mapped, uid: int) -> tuple[Copy | None, str]:
        """What it maps, None where that is not known yet; its path where it takes long."""
        with driver.opened(mapped, self._proc) as opened:
            fd = os.dup(opened)
        state = os.fstat(fd)
        key, version = (state.st_dev, state.st_ino), (state.st_size, state.st_mtime_ns)
        path = processes.printable(os.fsencode(mapped.path), MAX_PATH)
        known = self._files.get(key, version)
        if known is None:
            try:
                self._files.start(key, version, fd, path, uid)
            finally:
                os.close(fd)
            return None, path if self._files.is_aside(key) else ""
        return Copy(key, version, path, fd, known.driver, known.error), ""

    def _look_again(self) -> None:
        """At who waits for a library to be read."""
        later, self._later = self._later, {}
        for pid in later:
            self._look(pid)
        self._looking_again = False


def _pidfd(pid: int) -> int:
    """pidfd_open(2), Linux 5.3; -1 where there is none."""
    try:
        return os.pidfd_open(pid)
    except ProcessLookupError:
        raise
    except OSError:
        return -1


def children_of(roots: Iterable[int], proc: Path = Path("/proc")) -> set[int]:
    """``roots`` and all that descend from them, as far as their parents live."""
    parents: dict[int, int] = {}
    for entry in os.listdir(proc):
        if entry.isdigit():
            # The name, in parentheses, may hold anything; the state and the parent follow it.
            with contextlib.suppress(OSError, ValueError, IndexError):
                stat = (proc / entry / "stat").read_bytes()
                parents[int(entry)] = int(stat[stat.rindex(b")") :].split()[2])
    wanted = set(roots)
    while more := {pid for pid, parent in parents.items() if parent in wanted} - wanted:
        wanted |= more
    return wanted
