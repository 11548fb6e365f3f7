"""Where programs are attached: by descriptors, so that whatever holds them ends what they did.

Uprobes go into files, and with these into every process that maps them, now or later.  From Linux
6.6 on one link holds all places of a program in a file, and is closed in 40 ms.  Before, each place
has a link of its own, which takes 0.1 s to close; and the kernel closes one after the other, as
perf_uprobe_destroy waits for grace periods while it holds event_mutex
(kernel/trace/trace_event_perf.c).  That is done in the background then.
"""

from __future__ import annotations

import contextlib
import errno
import os
import resource
import threading
from collections.abc import Collection, Hashable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor

from dsprobe.probes import syscalls
from dsprobe.probes.probe import Map, Program, Unavailable, Uprobe

_AT_ONCE = 16
"""How many links are closed at a time."""


def uprobe_type() -> int:
    """The attach type that uprobe programs are loaded for.  Raises :class:`Unavailable`."""
    if not syscalls.has_uprobes():
        raise Unavailable("this kernel has no uprobes; one built with CONFIG_UPROBE_EVENTS does")
    if not syscalls.has_cookies():
        raise Unavailable(
            "this kernel cannot tell a uprobe where it is (bpf_get_attach_cookie); Linux 5.15 can"
        )
    return syscalls.UPROBE_MULTI if syscalls.has_uprobe_multi() else 0


def attach(program: Program, fd: int, cpus: Iterable[int], maps: Mapping[str, Map]) -> list[int]:
    """Links of a program; none yet for a uprobe.  Raises OSError whose text says why."""
    links: list[int] = []
    try:
        if program.kind == "tail":
            array, _, index = program.target.rstrip("]").partition("[")
            syscalls.put_program(maps[array].fd, int(index or 0), fd)
        elif program.late:
            pass
        elif program.kind == "raw_tracepoint":
            links.append(syscalls.open_raw_tracepoint(program.target, fd))
        else:
            period = int(program.target)
            links.extend(syscalls.open_cpu_clock(cpu, period, fd) for cpu in cpus)
    except OSError as e:
        close(links)
        if e.errno == errno.ENOENT:
            raise OSError(f"this kernel has no tracepoint {program.target}") from None
        raise OSError(f"cannot be attached: {e.strerror}") from None
    return links


def close(links: Collection[int]) -> None:
    """Detach.  Returns when nothing runs there any more."""
    if len(links) < 2:
        for fd in links:
            os.close(fd)
    elif links:
        with ThreadPoolExecutor(min(len(links), _AT_ONCE), "detach") as pool:
            list(pool.map(os.close, links))


class Libraries:
    """Uprobes in files.  ``multi``: whether one link holds many places; programs must have been
    loaded for it."""

    def __init__(self, multi: bool) -> None:
        self._multi = multi
        self._links: dict[Hashable, dict[str, list[int]]] = {}
        self._closing: list[threading.Thread] = []

    def attach(
        self, key: Hashable, file: int, programs: Mapping[str, int], uprobes: Sequence[Uprobe]
    ) -> list[tuple[Uprobe, str]]:
        """Put ``uprobes`` into the file that is open as ``file``; those that are not there, and
        why.  ``key`` names them to :meth:`detach`; ``file`` may be closed afterwards."""
        links = self._links.setdefault(key, {})
        failed = [(u, "its program is not loaded") for u in uprobes if u.function not in programs]
        kinds = dict.fromkeys((u.function, u.returns) for u in uprobes if u.function in programs)
        for function, returns in kinds:
            these = [u for u in uprobes if (u.function, u.returns) == (function, returns)]
            mine = links.setdefault(function, [])
            put = self._put if self._multi else self._put_each
            failed += put(mine, file, programs[function], these, returns)
        return failed

    def _put(
        self, links: list[int], file: int, program: int, these: Sequence[Uprobe], returns: bool
    ) -> list[tuple[Uprobe, str]]:
        """All with one link; where the kernel refuses one, the halves without it."""
        offsets, cookies = [u.offset for u in these], [u.cookie for u in these]
        try:
            links.append(syscalls.open_uprobes(program, file, offsets, cookies, returns))
        except OSError as e:
            if len(these) == 1:
                return [(these[0], f"cannot be attached: {e.strerror}")]
            half = len(these) // 2
            return [
                *self._put(links, file, program, these[:half], returns),
                *self._put(links, file, program, these[half:], returns),
            ]
        return []

    def _put_each(
        self, links: list[int], file: int, program: int, these: Sequence[Uprobe], returns: bool
    ) -> list[tuple[Uprobe, str]]:
        _, limit = resource.getrlimit(resource.RLIMIT_NOFILE)
        with contextlib.suppress(OSError, ValueError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (limit, limit))
        failed = []
        for u in these:
            try:
                links.append(syscalls.open_uprobe(program, file, u.offset, u.cookie, returns))
            except OSError as e:
                failed.append((u, f"cannot be attached: {e.strerror}"))
        return failed

    def detach(self, key: Hashable) -> None:
        """Take out what ``key`` names, if anything."""
        self._take_out(self._links.pop(key, {}).values())

    def drop(self, functions: Collection[str]) -> None:
        """Take these programs out of all files."""
        self._take_out(
            links.pop(f) for links in self._links.values() for f in functions if f in links
        )

    def _take_out(self, several: Iterable[list[int]]) -> None:
        links = [fd for some in several for fd in some]
        self._closing = [t for t in self._closing if t.is_alive()]
        if self._multi:
            close(links)
        elif links:
            thread = threading.Thread(target=close, args=(links,), name="detach")
            thread.start()
            self._closing.append(thread)

    def close(self) -> None:
        """Take out everything, and wait until it is."""
        for key in list(self._links):
            self.detach(key)
        for thread in self._closing:
            thread.join()
        self._closing.clear()
