"""A thread that looks at the session, so that a source that hangs never freezes the keys."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

from dsprobe.tui.observer import Observer
from dsprobe.tui.snapshot import Snapshot


class Watcher(threading.Thread):
    """Calls ``show`` with a snapshot after each :meth:`request`, or ``fail`` with an exception and
    ends.  Both are called on this thread.  Requests made while one is in hand become one."""

    def __init__(
        self,
        observer: Observer,
        show: Callable[[Snapshot], object],
        fail: Callable[[Exception], object],
    ) -> None:
        # A daemon: leaving must not wait for a file system that gives no answer.
        super().__init__(name="dsprobe-watcher", daemon=True)
        self._observer, self._show, self._fail = observer, show, fail
        self._asked = threading.Event()
        self._stopped = False
        self._since: float | None = None

    def request(self) -> None:
        """Ask for a new snapshot, soon."""
        if self._since is None:
            self._since = time.monotonic()
        self._asked.set()

    def waiting(self) -> float:
        """Seconds for which a request has been without its snapshot."""
        since = self._since
        return 0.0 if since is None else time.monotonic() - since

    def stop(self) -> None:
        self._stopped = True
        self._asked.set()

    def run(self) -> None:
        while True:
            self._asked.wait()
            self._asked.clear()
            if self._stopped:
                return
            try:
                snapshot = self._observer.look()
            except Exception as e:  # whatever it is, the screen has to end in order
                self._fail(e)
                return
            self._since = time.monotonic() if self._asked.is_set() else None
            self._show(snapshot)
