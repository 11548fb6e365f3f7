"""Which processes use CUDA, and through which copy of the driver library.

Nearly every CUDA program ends in the driver library, libcuda.so.1, whichever runtime it uses.
Containers bring copies of their own, so a library is known by device and inode, and is opened
through /proc/PID/map_files: that is the file which is mapped, whatever lies at its path now.
Source: proc(5).
"""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

from dsprobe.probes import functions as table
from dsprobe.probes import mappedfiles
from dsprobe.probes.elf import ElfError, Function, Library
from dsprobe.probes.placement import Placement, place

_NAME = re.compile(rb"^libcuda\.so(\.[0-9.]+)?( \(deleted\))?$")
_VERSION = re.compile(r"libcuda\.so\.(\d+(?:\.\d+)+)")
MAX_LIBRARIES = 4
"""In one process."""


@dataclass(frozen=True)
class Mapped:
    """A driver library in the memory of process ``pid``: its first executable ``area``, as in
    map_files, holds what is at ``offset`` in the file."""

    pid: int
    path: str
    device: str
    inode: int
    area: str
    offset: int = 0

    @property
    def key(self) -> tuple[str, int]:
        return self.device, self.inode


@dataclass(frozen=True)
class Driver:
    """A driver library: ``version`` is "" where its name does not tell, ``functions`` are its API,
    ``entries`` the places for probes in those that are traced (x86_64; none elsewhere).
    ``text``: where in the file its code begins and ends.  ``refused``: functions without a place,
    by trial, and why."""

    path: str
    build_id: str
    machine: str
    version: str
    functions: dict[str, Function]
    entries: dict[str, Placement]
    text: tuple[int, int] = (0, 0)
    refused: dict[str, str] = field(default_factory=dict)

    @property
    def cheap(self) -> int:
        """How many entries have an emulated instruction to sit on."""
        return sum(p.emulated for p in self.entries.values())


def libraries_of(pid: int, proc: Path = Path("/proc")) -> list[Mapped]:
    """The driver libraries whose code ``pid`` maps: none or one, seldom more.

    Raises OSError where they cannot be read, as of a process that has ended.
    """
    found: dict[tuple[str, int], Mapped] = {}
    for line in mappedfiles.lines(pid, proc):
        if b"/libcuda.so" not in line:
            continue
        columns = line.split(None, 5)
        name = columns[-1].rpartition(b"/")[2]
        if len(columns) == 6 and b"x" in columns[1] and _NAME.match(name):
            area, _, offset, device, inode, path = columns
            mapped = Mapped(pid, path.decode(errors="replace"), device.decode(errors="replace"),
                            int(inode), area.decode(errors="replace"), int(offset, 16))  # fmt: skip
            found.setdefault(mapped.key, mapped)
            if len(found) == MAX_LIBRARIES:
                break
    return list(found.values())


def mapped_by(pid: int, proc: Path = Path("/proc")) -> Mapped | None:
    """The driver library that ``pid`` maps, if it maps one."""
    try:
        return next(iter(libraries_of(pid, proc)), None)
    except OSError:
        return None


def users(proc: Path = Path("/proc")) -> Iterator[Mapped]:
    """All processes that map a driver library."""
    for entry in os.listdir(proc):
        if entry.isdigit() and (mapped := mapped_by(int(entry), proc)):
            yield mapped


@contextlib.contextmanager
def opened(mapped: Mapped, proc: Path = Path("/proc")) -> Iterator[int]:
    """A descriptor of the mapped file itself.  Raises OSError once the process has gone."""
    area = "-".join(x.lstrip("0") or "0" for x in mapped.area.split("-"))
    fd = os.open(proc / str(mapped.pid) / "map_files" / area, os.O_RDONLY | os.O_CLOEXEC)
    try:
        yield fd
    finally:
        os.close(fd)


def read(fd: int, path: str, traced: Callable[[str], object] = table.of_symbol) -> Driver:
    """What the library behind ``fd`` is, with places in its ``traced`` functions: each takes a
    disassembler, and a file may have thousands.  Raises :class:`~dsprobe.probes.elf.ElfError`."""
    library = Library(fd)
    functions = library.functions("cu")
    if "cuInit" not in functions:
        raise ElfError("not a driver library: it exports no cuInit")
    entries = {}
    if library.machine == "x86_64":
        entries = {n: place(library.code(f, 64)) for n, f in functions.items() if traced(n)}
    version = _VERSION.search(path)
    return Driver(path, library.build_id(), library.machine, version[1] if version else "",
                  functions, entries, library.text(functions["cuInit"]))  # fmt: skip
