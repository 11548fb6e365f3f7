"""When processes are looked into: at the start, when the kernel tells of a mapping, and rarely.

A scan of all processes costs a third of a core on a host with 2,000 of them if it is made every
second.  So the kernel is asked to tell of each new mapping (:mod:`dsprobe.probes.mappings`), and a
scan goes round once a minute, for what was missed.  Where something certainly was, one is made at
once.
"""

from __future__ import annotations

import contextlib
import os
import resource
import selectors
import time
from collections.abc import Iterable

from dsprobe.agent.search import Given, Scanned, Search
from dsprobe.agent.vetting import Vetting
from dsprobe.probes.mappings import Mappings
from dsprobe.probes.tracer import Coverage

NAME = b"/libcuda.so"
ROUND_SECONDS = 60.0
"""A slow scan takes so long, and the next begins when it ends."""
UNTOLD_SECONDS = 5.0
"""The same where the kernel does not tell of mappings."""
AGAIN_NS = 1_000_000_000
"""From one scan at full speed to the next, and at least ten times as long as one takes."""
CPUS_NS = 1_000_000_000
"""How often CPUs that come and go are looked for."""
LOOKS = 64
"""Processes looked at for what the kernel told at once; more are left to a scan."""
LAST_SECONDS = 0.5
"""How long the end waits for a look that goes on."""
MAX_HUNG = 4
"""Processes whose files do not answer, each of which costs a thread."""


class Discovery:
    """Call :meth:`begin` once and :meth:`tick` often."""

    def __init__(self, selector: selectors.BaseSelector, probe: str) -> None:
        """``probe`` is the name under which coverage tells of it."""
        self._selector, self._probe = selector, probe
        self._mappings: Mappings | None = None
        self._watched: list[int] = []
        self._told: dict[int, None] = {}
        self._hung: set[int] = set()
        self._vetting = Vetting()
        self._search = Search(self._hung, self._vetting)
        self._round = UNTOLD_SECONDS
        self._fast: bool | None = None
        """Whether the scan that goes on is one at full speed; None: none does."""
        self._wanted = True
        self._earliest = self._started = self._cpus_at = 0
        self.busy = True
        """Whether something is soon to be found."""
        self.reading = False
        """Whether libraries are being read that were found already."""
        self.lost = 0
        """Records of mappings that were lost so far; each loss is followed by a scan."""

    def begin(self) -> list[Coverage]:
        """Watch from now on, and scan."""
        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        if soft < hard:  # a process that uses CUDA costs a descriptor
            with contextlib.suppress(OSError, ValueError):
                resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
        try:
            self._mappings = Mappings(NAME)
        except OSError as e:
            self._schedule(time.monotonic_ns())
            why = f"the kernel does not tell of new mappings ({e.strerror}): all processes are"
            return [self._cover("attached", f"{why} looked at every {UNTOLD_SECONDS:g} s")]
        self._round = ROUND_SECONDS
        self._register()
        self._schedule(time.monotonic_ns())
        return [self._cover("attached", "")]

    def tick(self, now: int) -> tuple[list[Given], list[Coverage]]:
        """What was found since the last call, and what became of discovery itself."""
        if self._mappings and now >= self._cpus_at:
            self._cpus_at = now + CPUS_NS
            self._follow(self._mappings)
        self._listen()
        for i, pid in enumerate(self._told):
            if i == LOOKS:
                self._wanted = True
                break
            self._search.look(pid)
        self.busy = bool(self._told) or bool(self._fast)
        self._told.clear()
        coverage = self._leave_out()
        self.reading = self._search.reading
        given = list(self._search.take())
        for g in given:
            if isinstance(g, Scanned) and g.began >= self._started:
                if self._fast:
                    self._earliest = now + max(AGAIN_NS, 10 * g.busy)
                self._fast = None
        self._schedule(now)
        return given, coverage

    def scan(self, at_once: bool = False) -> None:
        """Ask for a scan at full speed that begins after now; ``at_once``: however soon after the
        one before."""
        self._wanted = True
        if at_once:
            self._fast, self._earliest = None, 0

    def look(self, pid: int) -> None:
        """Look at one process again."""
        self._told[pid] = None

    def tree(self, roots: Iterable[int]) -> None:
        """Find the descendants of ``roots``."""
        self._search.tree(roots)

    def close(self) -> None:
        for fd in self._watched:
            self._selector.unregister(fd)
        self._watched.clear()
        if self._mappings:
            self._mappings.close()
            self._mappings = None
        self._search.close()
        self._search.join(LAST_SECONDS)

    # -- parts --------------------------------------------------------------------------------

    def _cover(self, status: str, reason: str) -> Coverage:
        return Coverage(self._probe, "discovery", status, reason)

    def _schedule(self, now: int) -> None:
        if self._wanted and not self._fast and now >= self._earliest:
            self._wanted, self._fast = False, True
            self._started = time.monotonic_ns()
            self._search.scan()
        elif self._fast is None:
            self._fast = False
            self._started = time.monotonic_ns()
            self._search.scan(self._round)

    def _listen(self, mask: int = 0) -> None:
        if self._mappings:
            seen = self._mappings.take()
            self._told.update(dict.fromkeys(m.pid for m in seen.mappings))
            self.lost += seen.lost
            self._wanted |= bool(seen.lost)

    def _register(self) -> None:
        """A ring that is half full wakes the agent, which empties it."""
        for fd in self._watched:
            with contextlib.suppress(KeyError, ValueError):
                self._selector.unregister(fd)
        self._watched = self._mappings.fds if self._mappings else []
        for fd in self._watched:
            self._selector.register(fd, selectors.EVENT_READ, self._listen)

    def _follow(self, mappings: Mappings) -> None:
        before = set(self._watched)
        # Closed descriptors leave an epoll by themselves, but their numbers are used again.
        try:
            changed = mappings.follow_cpus()
        except OSError:
            changed, self._wanted = True, True  # this second's scan finds what that CPU maps
        if changed or before != set(mappings.fds):
            self._register()

    def _leave_out(self) -> list[Coverage]:
        """Go on without a process whose files do not answer; its thread hangs until they do."""
        pid = self._search.hangs_at
        gone = {p for p in self._hung if not os.path.exists(f"/proc/{p}")}
        if gone and not pid:
            self._hung -= gone
            return [] if self._hung else [self._cover("attached", "")]
        if not pid or pid in self._hung:
            return []
        self._hung.add(pid)
        if len(self._hung) > MAX_HUNG:
            return [self._cover("stalled", "several processes take too long to look into")]
        self._search.close()
        self._search = Search(self._hung, self._vetting)
        self._fast, self._wanted, self._earliest = None, True, 0
        return [
            self._cover("stalled", f"process {pid} takes too long to look into: it is left out")
        ]
