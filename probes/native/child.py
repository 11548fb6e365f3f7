"""The process that reads ELF files: without privileges, small, and told what to do by a socket.

``python -m dsprobe.probes.native.child SOCKET PAGE PARENT``: two inherited descriptors and the
agent's PID.  It opens nothing: files come as descriptors.  Before it touches one it notes the
file's number in PAGE, so that the agent knows which one killed or hung it.  Each message is one
packet of msgpack, ``[what, ...]``:

- ``files, [number]`` with as many descriptors; ``drop, [number]``
- ``maps, process, [[low, high, offset, number]]``; ``forget, process``
- ``names, number, [offset]``: answered by ``[build id, [[address, name]]]``
- ``unwind, process, ip, sp, [rbx, rbp, r12, r13, r14, r15], copy``: answered by
  ``[[[address, 1 where it is a return address]], why it ends]``

The agent's side is :mod:`dsprobe.probes.native.link`.  Imports no numpy.
"""

from __future__ import annotations

import array
import ctypes
import gc
import mmap
import os
import signal
import socket
import sys
from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import msgpack

from dsprobe.probes.native import demangle, sandbox
from dsprobe.probes.native.ehframe import RSP, Row, UnwindTable
from dsprobe.probes.native.elffile import ElfError, ElfFile
from dsprobe.probes.native.symbols import Symbols
from dsprobe.probes.native.walk import PRESERVED, Ranges, walk

MAX_MESSAGE = 400 << 10  # what two sockets pass at once where net.core.wmem_max is the usual one
MAX_FDS = 200
MAX_ASKED = 128  # names in one answer
MAX_KEPT_SYMBOLS = 500_000  # 21 bytes each
MAX_KEPT_ROWS = 20_000
IDLE_S = 30.0


class _File:
    def __init__(self, fd: int) -> None:
        self.fd = fd
        self.elf: ElfFile | None = None
        self.build_id = ""
        self.bad = False
        self.symbols: Symbols | None = None
        self.table: UnwindTable | None = None
        self.rows: dict[int, Row | None] = {}

    def open(self) -> ElfFile | None:
        """The file's headers, None where it is not an ELF file that can be read."""
        if self.elf is None and not self.bad:
            try:
                self.elf = ElfFile(self.fd)
                self.build_id = self.elf.build_id()
            except (ElfError, OSError):
                self.bad = True
        return self.elf

    def forget(self) -> None:
        """What can be read again."""
        self.symbols, self.table, self.rows = None, None, {}


class Reader:
    """Answers the questions; ``mark`` is called with the number of a file before it is read."""

    def __init__(self, mark: Callable[[int], None], demangled: Callable[[str], str]) -> None:
        self._mark, self._demangled = mark, demangled
        self._files: dict[int, _File] = {}
        self._maps: dict[int, Ranges] = {}
        self._recent: OrderedDict[int, _File] = OrderedDict()  # those with symbols, oldest first
        self._rows = 0

    def take(self, numbers: list[int], fds: list[int]) -> None:
        for number, fd in zip(numbers, fds, strict=True):
            self._files[number] = _File(fd)

    def drop(self, numbers: list[int]) -> None:
        for number in numbers:
            file = self._files.pop(number, None)
            self._recent.pop(number, None)
            if file is not None:
                os.close(file.fd)

    def maps(self, process: int, ranges: list[tuple[int, int, int, int]]) -> None:
        self._maps[process] = Ranges(ranges)

    def forget(self, process: int) -> None:
        self._maps.pop(process, None)

    def idle(self) -> None:
        """Give memory back."""
        for file in self._files.values():
            file.forget()
        self._recent.clear()
        self._rows = 0
        gc.collect()
        trim = getattr(ctypes.CDLL(None), "malloc_trim", None)  # glibc only
        if trim is not None:
            trim(0)

    def names(self, number: int, offsets: list[int]) -> tuple[str, list[tuple[int, str]]]:
        self._mark(number)
        file = self._files.get(number)
        elf = file.open() if file is not None else None
        if file is None or elf is None:
            return "", [(offset, "") for offset in offsets]
        symbols = self._symbols(number, file, elf)
        found = []
        for offset in offsets:
            try:
                address = elf.address(offset)
                name = symbols.name(address) if symbols is not None else ""
            except (ElfError, OSError):
                address, name = offset, ""
            found.append((address, self._demangled(name)))
        return file.build_id, found

    def _symbols(self, number: int, file: _File, elf: ElfFile) -> Symbols | None:
        if file.symbols is None:
            try:
                file.symbols = Symbols(elf)
            except (ElfError, OSError):
                return None
        self._recent[number] = file
        self._recent.move_to_end(number)
        while len(self._recent) > 1:
            if sum(len(f.symbols or ()) for f in self._recent.values()) <= MAX_KEPT_SYMBOLS:
                break
            self._recent.popitem(last=False)[1].symbols = None
        return file.symbols

    def unwind(
        self, process: int, ip: int, sp: int, preserved: list[int], copy: bytes
    ) -> tuple[list[tuple[int, int]], str]:
        ranges = self._maps.get(process)
        if ranges is None:
            return [], "the process is not known"
        registers = {RSP: sp, **dict(zip(PRESERVED, preserved, strict=True))}
        return walk(ranges, self._row, ip, registers, sp, copy)

    def _row(self, number: int, offset: int) -> Row | None:
        file = self._files.get(number)
        if file is None:
            return None
        if offset in file.rows:
            return file.rows[offset]
        self._mark(number)
        elf = file.open()
        if elf is None:
            return None
        if self._rows >= MAX_KEPT_ROWS:
            self._rows = 0
            for other in self._files.values():
                other.rows = {}
        try:
            if file.table is None:
                file.table = UnwindTable(elf)
            row = file.table.row(elf.address(offset))
        except OSError:
            row = None
        file.rows[offset] = row
        self._rows += 1
        return row


def serve(sock: socket.socket, reader: Reader) -> None:
    """Until the agent closes its end."""
    fd_size = array.array("i").itemsize
    silent: dict[str, Callable[..., None]] = {
        "drop": reader.drop,
        "maps": reader.maps,
        "forget": reader.forget,
    }
    answered: dict[str, Callable[..., Any]] = {"names": reader.names, "unwind": reader.unwind}
    used = False
    while True:
        try:
            # Close-on-exec by flag: the system call that sets it later is not allowed.
            data, ancillary, _, _ = sock.recvmsg(
                MAX_MESSAGE, socket.CMSG_SPACE(MAX_FDS * fd_size), socket.MSG_CMSG_CLOEXEC
            )
        except TimeoutError:
            if used:
                reader.idle()
                used = False
            continue
        if not data:
            return
        fds = array.array("i")
        for level, kind, raw in ancillary:
            if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
                fds.frombytes(raw[: len(raw) // fd_size * fd_size])
        what, *arguments = msgpack.unpackb(data)
        if what == "files":
            reader.take(arguments[0], fds.tolist())
        elif what in silent:
            silent[what](*arguments)
        else:
            used = True
            sock.sendall(msgpack.packb(answered[what](*arguments)))


def main() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a terminal sends it to the agent's group
    sock = socket.socket(fileno=int(sys.argv[1]))
    sock.settimeout(IDLE_S)
    page = mmap.mmap(int(sys.argv[2]), mmap.PAGESIZE)
    os.close(int(sys.argv[2]))
    demangled = demangle.load()
    gc.freeze()
    sandbox.enter(int(sys.argv[3]))

    def mark(number: int) -> None:
        page[:8] = number.to_bytes(8, "little")

    serve(sock, Reader(mark, demangled))


if __name__ == "__main__":
    main()
