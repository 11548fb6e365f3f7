"""The executable memory of a process, and the files it comes from.

A process is held by its directory in /proc, which goes on naming that process and no other: a PID
that is used again cannot mix two.  Files are opened through map_files: what is mapped, whatever
lies at its path now, in whatever mount namespace.  Source: proc(5).
"""

from __future__ import annotations

import os
import re
import stat
import time
from bisect import bisect_right
from collections.abc import Iterator
from dataclasses import dataclass

MAX_MAPS = 16 << 20  # bytes; a process may have 65,530 mappings by default (vm.max_map_count)
MAX_RANGES = 8192
MAX_TASKS = 64
VDSO = "[vdso]"
_SHARED = "/dev/zero (deleted)"  # MAP_ANONYMOUS | MAP_SHARED
_LINE = re.compile(
    rb"^([0-9a-f]+)-([0-9a-f]+) ..x. ([0-9a-f]+) ([0-9a-f]+:[0-9a-f]+) (\d+) *(.*)$", re.MULTILINE
)
_TICKS = os.sysconf("SC_CLK_TCK")
_TICK_NS = 10**9 // _TICKS


class Gone(OSError):
    """The process has ended, or the PID is another one's by now."""


@dataclass(frozen=True)
class Range:
    """``path`` as the process sees it; inode 0: no file, and ``path`` is "" or "[vdso]"."""

    low: int
    high: int
    offset: int
    device: str
    inode: int
    path: str


@dataclass(frozen=True)
class Maps:
    """Executable ranges, sorted by address."""

    ranges: tuple[Range, ...]

    @classmethod
    def parse(cls, text: bytes) -> Maps:
        """From the text of /proc/PID/maps; the first :data:`MAX_RANGES` that are executable."""
        ranges = []
        for m in _LINE.finditer(text):
            low, high, offset = int(m[1], 16), int(m[2], 16), int(m[3], 16)
            inode, path = int(m[5]), m[6].decode("utf-8", "replace")
            if path == _SHARED:
                inode, path = 0, ""
            elif inode:
                path = path.removesuffix(" (deleted)")
            elif path != VDSO:
                path = ""
            ranges.append(Range(low, high, offset, m[4].decode(), inode, path))
            if len(ranges) == MAX_RANGES:
                break
        return cls(tuple(ranges))

    def find(self, address: int) -> Range | None:
        i = bisect_right(self.ranges, address, key=lambda r: r.low) - 1
        if i < 0 or address >= self.ranges[i].high:
            return None
        return self.ranges[i]

    @property
    def vdso(self) -> int:
        """Where the vDSO lies, which differs from program to program; 0 where there is none."""
        return next((r.low for r in self.ranges if r.path == VDSO), 0)


def boottime(t: int) -> int:
    """A time of CLOCK_MONOTONIC on CLOCK_BOOTTIME, which start times of processes are on."""
    return t + time.clock_gettime_ns(time.CLOCK_BOOTTIME) - time.monotonic_ns()


class Process:
    """Process ``pid`` as it was at ``t`` (CLOCK_MONOTONIC ns).  Raises :class:`Gone`."""

    def __init__(self, pid: int, t: int) -> None:
        self._fd = _directory(str(pid))
        try:
            if self._started() > boottime(t) + _TICK_NS:
                raise Gone(f"process {pid} began later")
        except BaseException:
            self.close()
            raise
        self._pid = pid

    def close(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def _read(self, name: str, limit: int) -> bytes:
        try:
            fd = os.open(name, os.O_RDONLY | os.O_CLOEXEC, dir_fd=self._fd)
            with open(fd, "rb", buffering=0) as f:
                pieces = []
                while limit > 0 and (piece := f.read(min(limit, 1 << 20))):
                    pieces.append(piece)
                    limit -= len(piece)
                return b"".join(pieces)
        except OSError as e:
            raise Gone(f"the process cannot be read: {e}") from None

    def _started(self) -> int:
        # The name in parentheses may hold anything; field 22 is the 20th after it.
        fields = self._read("stat", 4096).rpartition(b")")[2].split()
        try:
            return int(fields[19]) * _TICK_NS
        except (IndexError, ValueError):
            raise Gone("the process cannot be read") from None

    def maps(self) -> Maps:
        """What is mapped now.  Raises :class:`Gone`."""
        maps = Maps.parse(self._read("maps", MAX_MAPS))
        if not maps.ranges:
            # The first thread has ended, and its memory with it, where others go on.
            for other in self._tasks():
                previous, self._fd = self._fd, other
                os.close(previous)
                maps = Maps.parse(self._read("maps", MAX_MAPS))
                if maps.ranges:
                    break
        if not maps.ranges:
            raise Gone("the process has no memory any more")
        return maps

    def _tasks(self) -> Iterator[int]:
        """Directories of its other threads, as those in task/ have no map_files."""
        try:
            fd = os.open("task", os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC, dir_fd=self._fd)
        except OSError:
            return
        try:
            names = os.listdir(fd)
        except OSError:
            names = []
        finally:
            os.close(fd)
        for tid in names[:MAX_TASKS]:
            if tid != str(self._pid):
                try:
                    yield _directory(tid)
                except Gone:
                    continue

    def open(self, r: Range) -> tuple[int, os.stat_result]:
        """A descriptor of the file that ``r`` maps, and what fstat(2) says of it.  Raises OSError;
        may block, on a slow disk or on a file system of the process's own making."""
        # O_PATH first: opening a device that calls itself a library would have effects.
        entry = os.open(f"map_files/{r.low:x}-{r.high:x}", os.O_PATH | os.O_CLOEXEC,
                        dir_fd=self._fd)  # fmt: skip
        try:
            status = os.fstat(entry)
            if not stat.S_ISREG(status.st_mode):
                raise OSError("not a regular file")
            flags = os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK
            return os.open(f"/proc/self/fd/{entry}", flags), status
        finally:
            os.close(entry)


def _directory(name: str) -> int:
    try:
        return os.open(f"/proc/{name}", os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    except OSError as e:
        raise Gone(f"the process has ended: {e}") from None


def vdso() -> bytes:
    """The vDSO of this kernel, as every 64-bit process has it; empty where there is none."""
    try:
        with open("/proc/self/maps", "rb") as f:
            found = next((r for r in Maps.parse(f.read()).ranges if r.path == VDSO), None)
        if found is None:
            return b""
        with open("/proc/self/mem", "rb", buffering=0) as memory:
            memory.seek(found.low)
            return memory.read(found.high - found.low)
    except OSError:
        return b""
