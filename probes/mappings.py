"""Who maps a file just now: executable mappings as the kernel makes them, on the whole host.

A software event on each CPU records every executable mapping (PERF_RECORD_MMAP2), whichever
namespace the process lives in.  A ring of records is first searched for the bytes of the name, so
that a host which starts many programs costs next to nothing.  Where a ring was full, or a CPU was
not watched for a moment, the caller is told to look for itself.
Source: perf_event_open(2).
"""

from __future__ import annotations

import mmap
import os
import struct
from dataclasses import dataclass

from dsprobe.probes import syscalls
from dsprobe.probes.probe import online_cpus

PAGES = 16
"""Of a ring, a power of two: room for some 500 mappings or 2000 forks."""

_HEAD, _TAIL = 1024, 1032  # struct perf_event_mmap_page
_HEADER = struct.Struct("<IHH")  # type, misc, size
_MMAP2 = struct.Struct("<IIQQQIIQQII")  # pid, tid, addr, len, pgoff, dev, inode ... and the name
_LOST, _LOST_SIZE, _MMAP2_TYPE = 2, 24, 10
_LOST_HEADER = _HEADER.pack(_LOST, 0, _LOST_SIZE)
MAX_NAME = 4096
_LARGEST = _HEADER.size + _MMAP2.size + MAX_NAME


@dataclass(frozen=True)
class Mapping:
    """Process ``pid`` mapped ``path``, as it sees it."""

    pid: int
    path: bytes


@dataclass(frozen=True)
class Seen:
    """``mappings`` since the last call; ``lost``: records that found no room."""

    mappings: list[Mapping]
    lost: int


def parse(data: bytes, name: bytes) -> Seen:
    """The mappings of files with ``name`` in their path among the records of a ring.

    A record that is none ends it, and counts as one lost.
    """
    found: list[Mapping] = []
    lost = 0
    if name not in data and _LOST_HEADER not in data:
        return Seen(found, lost)
    at = 0
    while at < len(data):
        if at + _HEADER.size > len(data):
            return Seen(found, lost + 1)
        kind, _, size = _HEADER.unpack_from(data, at)
        if size < _HEADER.size or size % 8 or at + size > len(data):
            return Seen(found, lost + 1)
        body = data[at + _HEADER.size : at + size]
        if kind == _LOST and size >= _LOST_SIZE:
            lost += int.from_bytes(body[8:16], "little")
        elif kind == _MMAP2_TYPE and size > _HEADER.size + _MMAP2.size and name in body:
            path = body[_MMAP2.size :].split(b"\0", 1)[0][:MAX_NAME]
            if name in path:
                found.append(Mapping(_MMAP2.unpack_from(body)[0], path))
        at += size
    return Seen(found, lost)


class _Ring:
    """The ring of one CPU."""

    def __init__(self, cpu: int) -> None:
        self.size = PAGES * mmap.PAGESIZE
        self.fd = syscalls.open_mapping_events(cpu, self.size // 2)
        try:
            self._memory = mmap.mmap(self.fd, mmap.PAGESIZE + self.size)
        except OSError:
            os.close(self.fd)
            raise

    def take(self) -> tuple[bytes, bool]:
        """Whole records, and whether some may have found no room.

        The kernel says how many were lost only with the next one that finds room, which may be
        long in coming: a ring without room for the largest is taken for one that lost some.
        """
        head, tail = struct.unpack_from("<QQ", self._memory, _HEAD)
        length, data = head - tail, b""
        if 0 < length <= self.size:
            start = mmap.PAGESIZE + tail % self.size
            end = mmap.PAGESIZE + self.size
            data = self._memory[start : min(start + length, end)]
            data += self._memory[mmap.PAGESIZE : mmap.PAGESIZE + length - len(data)]
        if length:
            struct.pack_into("<Q", self._memory, _TAIL, head)
        return data, not 0 <= length <= self.size - _LARGEST

    def close(self) -> None:
        self._memory.close()
        os.close(self.fd)


class Mappings:
    """Watches mappings of files whose path holds ``name``.  Raises OSError where it may not.

    :meth:`take` as often as you like: a ring that is half full makes its descriptor readable, and
    ``fds`` are those of now.
    """

    def __init__(self, name: bytes) -> None:
        self._name = name
        self._rings: dict[int, _Ring] = {}
        self._missed = 0
        try:
            self.follow_cpus()
        except OSError:
            self.close()
            raise
        if not self._rings:
            raise OSError(0, "no CPU can be watched")
        self._missed = 0

    @property
    def fds(self) -> list[int]:
        return [ring.fd for ring in self._rings.values()]

    def follow_cpus(self) -> bool:
        """Watch the CPUs that are online now; whether those are others than before.

        What a CPU ran before it was watched is unseen, and counts as lost.
        """
        online = online_cpus()
        gone, new = self._rings.keys() - online, online - self._rings.keys()
        for cpu in gone:
            self._rings.pop(cpu).close()
            self._missed += 1  # what its ring still held
        for cpu in new:
            try:
                self._rings[cpu] = _Ring(cpu)
            except OSError:
                if cpu in online_cpus():
                    raise
            self._missed += 1
        return bool(gone or new)

    def take(self) -> Seen:
        """What the rings hold now.  Never waits."""
        found: list[Mapping] = []
        lost, self._missed = self._missed, 0
        for ring in self._rings.values():
            data, full = ring.take()
            seen = parse(data, self._name)
            found += seen.mappings
            lost += seen.lost or full
        return Seen(found, lost)

    def close(self) -> None:
        for ring in self._rings.values():
            ring.close()
        self._rings.clear()
