"""Addresses of processes to frames, one question at a time, with the help of the child.

Runs on a thread of its own (:mod:`dsprobe.probes.native.symbolizer`), as opening a file or reading
a process's mappings may block.
"""

from __future__ import annotations

import os
import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

from dsprobe.probes.native import maps as mapped
from dsprobe.probes.native.child import MAX_ASKED
from dsprobe.probes.native.frames import NativeFrame, Registers
from dsprobe.probes.native.link import ChildLost, Link
from dsprobe.probes.native.maps import VDSO, Gone, Maps, Process, Range
from dsprobe.probes.native.sandbox import MAX_CPU_S

MAX_TARGETS = 512
MAX_FILES = 3500  # open in the child
MAX_BAD = 256
MAX_KNOWN = 20_000  # answers of the child that are kept
REREAD_NS = 250_000_000  # mappings are read at most so often, unless an address is not found
TRIES = 3
_WORD = (1 << 64) - 1
_Result = TypeVar("_Result")
_FileKey = tuple[int, int, int, int]


@dataclass
class _File:
    """A file that the child has, or one that it must not have again (``bad``)."""

    number: int
    bad: bool = False
    users: set[int] = field(default_factory=set)
    known: dict[int, tuple[str, int, str]] = field(default_factory=dict)
    """By offset, what the child said: name, address in the file, build id."""


@dataclass
class _Target:
    process: Process | None  # None once it has ended, or is another program
    maps: Maps
    read: int  # when the mappings were read
    files: dict[Range, _File] = field(default_factory=dict)
    told: bool = False  # whether the child has the mappings


class Resolver:
    """``avoid`` are files (device, inode as in maps) that must not be opened.

    ``cancelled`` ends a wait for the next try to start a child.
    """

    def __init__(
        self,
        wall_s: float,
        cpu_s: float,
        avoid: set[tuple[str, int]],
        pause: Callable[[float], None] = time.sleep,
    ) -> None:
        self._wall_s, self._cpu_s, self._avoid, self._pause = wall_s, cpu_s, avoid, pause
        self._link: Link | None = None
        self._targets: OrderedDict[int, _Target] = OrderedDict()
        self._files: dict[_FileKey, _File] = {}
        self._vdso = _File(1)
        self._known = 0
        self._numbers = 1  # 0: no file
        self._lost: list[float] = []  # when children were lost lately
        self.opening: tuple[str, int] | None = None
        """What is being opened or read now; device "" are the mappings of process inode."""
        self.opening_since = 0

    @property
    def child(self) -> int:
        """PID of the child, 0 while there is none."""
        link = self._link
        return 0 if link is None else link.pid

    def close(self) -> None:
        link, self._link = self._link, None
        if link is not None:
            link.end()
        for number in list(self._targets):
            self.gone(number)

    def kill(self) -> None:
        """End the child; also from another thread."""
        if self._link is not None:
            self._link.kill()

    def seen(self, process: int, pid: int, t: int) -> None:
        """Open what the process maps."""

        def look() -> None:
            self._child()
            self._target(process, pid, t, ())

        try:
            self._retried(look)
        except (Gone, ChildLost):
            pass

    def gone(self, process: int) -> None:
        """Forget a process, and the files that only it had."""
        target = self._targets.pop(process, None)
        if target is None:
            return
        if target.process is not None:
            target.process.close()
        dropped = []
        for file in target.files.values():
            file.users.discard(process)
            if not file.users and not file.bad:
                dropped.append(file.number)
        numbers = set(dropped)
        self._files = {k: f for k, f in self._files.items() if f.number not in numbers}
        try:
            if self._link is not None:
                self._link.tell("forget", process)
                if dropped:
                    self._link.tell("drop", dropped)
        except ChildLost as e:
            self._after_loss(e)

    def names(
        self, process: int, pid: int, t: int, addresses: Sequence[tuple[int, int]]
    ) -> tuple[list[NativeFrame], str]:
        """A frame for each (address, how far before it the instruction is), and what went wrong."""
        try:
            return self._retried(lambda: self._names(process, pid, t, addresses)), ""
        except Gone as e:
            return [NativeFrame("", "", address, "") for address, _ in addresses], str(e)
        except ChildLost as e:
            return self._unnamed(process, addresses), f"symbols cannot be read: {e}"

    def unwind(
        self, process: int, pid: int, t: int, registers: Registers, copy: bytes
    ) -> tuple[list[NativeFrame], str]:
        """The stack's frames, innermost first, and why they end early."""
        r = registers
        try:
            found, note = self._retried(lambda: self._unwind(process, pid, t, registers, copy))
        except Gone as e:
            found, note = [(r.ip, 1)], str(e)
        except ChildLost as e:
            found, note = [(r.ip, 1)], f"the stack cannot be unwound: {e}"
        frames, problem = self.names(process, pid, t, found)
        return frames, note or problem

    def _retried(self, action: Callable[[], _Result]) -> _Result:
        """``action``, again after a file that killed the child was put aside."""
        if self._link is not None and self._link.cpu() > MAX_CPU_S / 2:
            # Before its limit ends it in the middle of a file that has nothing to do with it.
            self._link.end()
            self._after_loss(ChildLost("it is renewed", 0))
        for _ in range(TRIES - 1):
            try:
                return action()
            except ChildLost as e:
                self._after_loss(e)
        try:
            return action()
        except ChildLost as e:
            self._after_loss(e)
            raise

    def _child(self) -> Link:
        if self._link is not None:
            return self._link
        recent = [t for t in self._lost if time.monotonic() - t < 60]
        self._lost = recent[-10:]
        if recent:
            self._pause(min(30.0, 0.05 * 2 ** len(recent)))
        try:
            self._link = link = Link(self._wall_s, self._cpu_s)
        except OSError as e:
            raise ChildLost(f"no process can be started ({e})", 0) from None
        image = mapped.vdso()
        if image:
            fd = os.memfd_create("vdso", os.MFD_CLOEXEC)
            try:
                os.write(fd, image)
                link.files([(self._vdso.number, fd)])
            finally:
                os.close(fd)
        return link

    def _after_loss(self, lost: ChildLost) -> None:
        """All files went with the child; those of living processes are opened again."""
        self._lost.append(time.monotonic())
        self._link = None
        self._files = {k: f for k, f in self._files.items() if f.bad or f.number == lost.file}
        for f in self._files.values():
            f.bad = True
        while len(self._files) > MAX_BAD:
            self._files.pop(next(iter(self._files)))
        for target in self._targets.values():
            target.files = {r: f for r, f in target.files.items() if f.bad}
            target.read, target.told = 0, False

    def _target(self, process: int, pid: int, t: int, addresses: Sequence[int]) -> _Target:
        """Its mappings, as they were after ``t`` where it still lives.  Raises Gone."""
        target = self._targets.get(process)
        if target is None:
            target = _Target(Process(pid, t), Maps(()), 0)
            self._targets[process] = target
            if len(self._targets) > MAX_TARGETS:
                self.gone(next(iter(self._targets)))
        self._targets.move_to_end(process)
        now = time.monotonic_ns()
        if target.process is not None and target.read <= t:
            missing = not all(target.maps.find(a) for a in addresses)
            if missing or now - target.read > REREAD_NS:
                self._look(process, pid, target)
        if not target.maps.ranges:
            raise Gone("the process ended before its memory could be read")
        return target

    def _look(self, process: int, pid: int, target: _Target) -> None:
        """Read the mappings and hand the files that the child has not got over to it."""
        assert target.process is not None
        now = time.monotonic_ns()
        try:
            maps = self._watched(("", pid), target.process.maps)
            if target.maps.ranges and maps.vdso != target.maps.vdso:
                raise Gone("it runs another program by now")
        except Gone:
            target.process.close()
            target.process = None
            return
        files: dict[Range, _File] = {}
        same: dict[tuple[str, int], _File | None] = {}
        fresh: list[tuple[int, int]] = []
        try:
            for r in maps.ranges:
                file = target.files.get(r)
                if file is None and r.inode:
                    if (r.device, r.inode) not in same:
                        same[r.device, r.inode] = self._open(target.process, r, fresh)
                    file = same[r.device, r.inode]
                if file is not None:
                    file.users.add(process)
                    files[r] = file
                if len(fresh) >= 64:
                    self._hand_over(fresh)
            self._hand_over(fresh)
        finally:
            for _, fd in fresh:
                os.close(fd)
        target.maps, target.files, target.read, target.told = maps, files, now, False

    def _hand_over(self, fresh: list[tuple[int, int]]) -> None:
        if fresh:
            self._child().files(fresh)
        while fresh:
            os.close(fresh.pop()[1])

    def _open(self, process: Process, r: Range, fresh: list[tuple[int, int]]) -> _File | None:
        """The file of ``r``, None where it cannot be opened; one new to the child is in ``fresh``.

        A file is known by what fstat says, as maps may show two file systems' files alike.
        """
        if (r.device, r.inode) in self._avoid or len(self._files) >= MAX_FILES:
            return None
        try:
            fd, s = self._watched((r.device, r.inode), lambda: process.open(r))
        except OSError:
            return None
        key = (s.st_dev, s.st_ino, s.st_size, s.st_mtime_ns)
        file = self._files.get(key)
        if file is not None:
            os.close(fd)
            return file
        self._numbers += 1
        file = self._files[key] = _File(self._numbers)
        fresh.append((file.number, fd))
        return file

    def _watched(self, what: tuple[str, int], action: Callable[[], _Result]) -> _Result:
        self.opening_since, self.opening = time.monotonic_ns(), what
        try:
            return action()
        finally:
            self.opening = None

    def _file(self, target: _Target, r: Range) -> _File | None:
        """The file that ``r`` maps, where the child has it."""
        if r.path == VDSO and not r.inode:
            return self._vdso if r.low >> 32 else None  # that of a 32-bit process is another one
        file = target.files.get(r)
        return None if file is None or file.bad else file

    def _names(
        self, process: int, pid: int, t: int, addresses: Sequence[tuple[int, int]]
    ) -> list[NativeFrame]:
        link = self._child()
        if self._known > MAX_KNOWN:
            self._known = 0
            for known in (self._vdso, *self._files.values()):
                known.known = {}
        target = self._target(process, pid, t, [a - back for a, back in addresses])
        frames = self._unnamed(process, addresses)
        asked: dict[int, tuple[_File, set[int]]] = {}
        places: list[tuple[int, _File, int]] = []
        for i, (address, back) in enumerate(addresses):
            r = target.maps.find(address - back)
            file = None if r is None else self._file(target, r)
            if r is not None and file is not None:
                offset = r.offset + address - back - r.low
                places.append((i, file, offset))
                if offset not in file.known:
                    asked.setdefault(file.number, (file, set()))[1].add(offset)
        for file, offsets in asked.values():
            self._learn(link, file, sorted(offsets))
        for i, file, offset in places:
            name, at, build_id = file.known[offset]
            back = addresses[i][1]
            frames[i] = NativeFrame(name, frames[i].module, at + back & _WORD, build_id)
        return frames

    def _learn(self, link: Link, file: _File, offsets: list[int]) -> None:
        for first in range(0, len(offsets), MAX_ASKED):
            part = offsets[first : first + MAX_ASKED]
            build_id, names = _checked_names(link.ask("names", file.number, part), part)
            for offset, (at, name) in zip(part, names, strict=True):
                file.known[offset] = name, at, build_id
        self._known += len(offsets)

    def _unnamed(self, process: int, addresses: Sequence[tuple[int, int]]) -> list[NativeFrame]:
        """Frames as far as the mappings alone tell: file and offset in it."""
        target = self._targets.get(process)
        frames = []
        for address, back in addresses:
            r = target.maps.find(address - back) if target is not None else None
            if r is None or not r.path:
                frames.append(NativeFrame("", "", address, ""))
            else:
                frames.append(NativeFrame("", r.path, r.offset + address - r.low, ""))
        return frames

    def _unwind(
        self, process: int, pid: int, t: int, registers: Registers, copy: bytes
    ) -> tuple[list[tuple[int, int]], str]:
        r = registers
        link = self._child()
        target = self._target(process, pid, t, (r.ip - 1,))
        if not target.told:
            ranges = []
            for x in target.maps.ranges:
                file = self._file(target, x)
                ranges.append((x.low, x.high, x.offset, file.number if file is not None else 0))
            link.tell("maps", process, ranges)
            target.told = True
        preserved = (r.bx, r.bp, r.r12, r.r13, r.r14, r.r15)
        return _checked_walk(link.ask("unwind", process, r.ip, r.sp, preserved, copy))


def _checked_names(answer: Any, asked: list[int]) -> tuple[str, list[tuple[int, str]]]:
    """What the child says, which may be in the hands of whoever wrote the file."""
    try:
        build_id, names = answer
        found = [(int(address) & _WORD, str(name)[:1024]) for address, name in names]
        if len(found) == len(asked):
            return str(build_id)[:128], found
    except (TypeError, ValueError):
        pass
    return "", [(offset, "") for offset in asked]


def _checked_walk(answer: Any) -> tuple[list[tuple[int, int]], str]:
    try:
        found, note = answer
        return [(int(a) & _WORD, int(back) & 1) for a, back in found][:256], str(note)[:256]
    except (TypeError, ValueError):
        return [], "the stack cannot be unwound"
