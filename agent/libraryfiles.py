"""Reads library files: what they export, where probes go, whether that holds in a trial.

Each is read once, on a thread, as a trial takes as long as the library likes.  All threads share
one interpreter with the agent's loop, so there are few; a file that takes long gives up its place
to the next one, and what is found in the end is still taken.
"""

from __future__ import annotations

import errno
import os
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from dsprobe.agent.shares import room
from dsprobe.agent.vetting import Vetting
from dsprobe.probes import driver
from dsprobe.probes.driver import Driver
from dsprobe.probes.elf import ElfError

MAX_KNOWN = 64
"""Files whose tables are remembered."""
MAX_READING = 2
"""How many are read at once, without those put aside."""
LATE_NS = 3_000_000_000
"""One that takes longer is put aside."""
MAX_ASIDE = 8
"""Each has a thread; while there are so many no other file is read.  A user has a share of them,
and of READS (:mod:`dsprobe.agent.shares`)."""
READS, READS_NS = 32, 60_000_000_000
"""How many new files are read per minute: each may take a tenth of a second, and anybody can make
new ones."""

Key = tuple[int, int]
"""Device and inode of a library, as fstat(2) says of the mapped file itself."""


@dataclass(frozen=True)
class Known:
    """A library file as it was at ``version``; without ``driver`` it is none, by ``error``."""

    key: Key
    version: tuple[int, int]
    driver: Driver | None
    error: str = ""


class LibraryFiles:
    """All but :attr:`reading` and :meth:`any_late` is for one thread.  ``read`` is called, on
    others, with what is to be handed to :meth:`learn`."""

    def __init__(self, vetting: Vetting, read: Callable[[Known], None]) -> None:
        self._vetting, self._done = vetting, read
        self._known: dict[Key, Known] = {}
        self._since: dict[Key, tuple[int, int]] = {}  # when, for which user
        self._aside: dict[Key, int] = {}  # for which user
        self._reads: deque[tuple[int, int]] = deque(maxlen=READS)

    @property
    def reading(self) -> bool:
        """Whether some are being read, without those put aside."""
        return bool(self._since)

    def any_late(self) -> bool:
        """Whether :meth:`put_aside` would free a place."""
        now = time.monotonic_ns()
        return any(now - since > LATE_NS for since, _ in list(self._since.values()))

    def put_aside(self) -> None:
        """Let others be read in place of those that take long."""
        now = time.monotonic_ns()
        for key in [k for k, (since, _) in self._since.items() if now - since > LATE_NS]:
            self._aside[key] = self._since.pop(key)[1]

    def is_aside(self, key: Key) -> bool:
        return key in self._aside

    def get(self, key: Key, version: tuple[int, int]) -> Known | None:
        """What was found; None where it has not been read."""
        known = self._known.get(key)
        return known if known and known.version == version else None

    def start(self, key: Key, version: tuple[int, int], fd: int, path: str, uid: int) -> None:
        """Have a file read for a user if there is a place.  Raises OSError where there is none for
        long."""
        now = time.monotonic_ns()
        if key in self._since or key in self._aside or len(self._since) >= MAX_READING:
            return
        if not room(list(self._aside.values()), uid, MAX_ASIDE):
            raise OSError(errno.EAGAIN, f"too many libraries take long to read{_of(uid)}")
        if not room([u for t, u in self._reads if now - t < READS_NS], uid, READS):
            raise OSError(errno.EAGAIN, f"too many new libraries in a minute{_of(uid)}")
        self._reads.append((now, uid))
        self._since[key] = now, uid
        args = key, version, os.dup(fd), path
        threading.Thread(target=self._read, args=args, name="read", daemon=True).start()

    def learn(self, known: Known) -> None:
        """Remember what was found; its place is free."""
        self._known[known.key] = known
        while len(self._known) > MAX_KNOWN:
            del self._known[next(iter(self._known))]
        self._since.pop(known.key, None)
        self._aside.pop(known.key, None)

    def _read(self, key: Key, version: tuple[int, int], fd: int, path: str) -> None:
        try:
            known = Known(key, version, self._vetting.places(fd, driver.read(fd, path)))
        except (ElfError, OSError) as e:
            known = Known(key, version, None, str(e))
        except Exception as e:  # anybody can map anything
            known = Known(key, version, None, f"it cannot be read: {type(e).__name__}: {e}")
        finally:
            os.close(fd)
        self._done(known)


def _of(uid: int) -> str:
    """Root has no share of its own: there are too many of all."""
    return f" of user {uid}" if uid else ""
