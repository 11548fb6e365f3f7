"""Memory of another process, and the Python objects in it that name a function.

Nothing there is trusted: lengths are bounded before anything is read, and what does not look like
the object it should be is :class:`Unreadable`.
"""

from __future__ import annotations

import os
import struct
from collections.abc import Callable
from dataclasses import dataclass
from types import TracebackType

from dsprobe.probes.pystacks.errors import ENDED, Unreadable
from dsprobe.probes.pystacks.offsets import Layout

MAX_TEXT = 4096
"""Characters kept of a name."""
MAX_TABLE = 64 << 10
"""Bytes of the longest line table that is read."""

_MASK = (1 << 64) - 1
_CODECS = {1: "latin-1", 2: "utf-16-le", 4: "utf-32-le"}


class Memory:
    """Memory of process ``pid`` (/proc/PID/mem).  Raises :class:`Unreadable`."""

    def __init__(self, pid: int) -> None:
        try:
            self._fd = os.open(f"/proc/{pid}/mem", os.O_RDONLY | os.O_CLOEXEC)
        except (FileNotFoundError, ProcessLookupError):
            raise Unreadable(ENDED) from None
        except OSError as e:
            raise Unreadable(f"its memory cannot be read: {e.strerror}") from None

    def __enter__(self) -> Memory:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, e: BaseException | None, tb: TracebackType | None
    ) -> None:
        os.close(self._fd)

    def read(self, address: int, size: int) -> bytes:
        """``size`` bytes, all of them."""
        if not 0 < address < 1 << 47:
            raise Unreadable("a pointer leads out of its memory", passing=True)
        try:
            data = os.pread(self._fd, size, address)
        except OSError:
            data = b""
        if len(data) != size:
            raise Unreadable("a pointer leads out of its memory", passing=True)
        return data

    def u64(self, address: int) -> int:
        return int.from_bytes(self.read(address, 8), "little")


@dataclass(frozen=True)
class Code:
    """What a code object says of its function; ``table`` is co_linetable, None where it is longer
    than :data:`MAX_TABLE`."""

    name: str
    file: str
    first: int
    table: bytes | None


def text_in(layout: Layout, data: bytes) -> str:
    """The string object that ``data`` begins with; :class:`Unreadable` where it is not whole."""
    if len(data) < layout.ascii:
        raise Unreadable("a name was not captured")
    length, kind, ascii_ = _head(layout, data)
    begin = layout.ascii if ascii_ else layout.compact
    end = begin + length * kind
    if end > len(data):
        raise Unreadable("a name is longer than what was captured of it")
    return data[begin:end].decode("ascii" if ascii_ else _CODECS[kind], "replace")


def text_at(layout: Layout, memory: Memory, address: int) -> str:
    """A string object; what is longer than :data:`MAX_TEXT` is cut."""
    length, kind, ascii_ = _head(layout, memory.read(address, layout.ascii))
    begin = layout.ascii if ascii_ else layout.compact
    data = memory.read(address + begin, min(length, MAX_TEXT) * kind) if length else b""
    return data.decode("ascii" if ascii_ else _CODECS[kind], "replace")


def _head(layout: Layout, data: bytes) -> tuple[int, int, bool]:
    """(characters, bytes of each, whether ASCII) of a string object."""
    (length,) = struct.unpack_from("<q", data, layout.text_length)
    (state,) = struct.unpack_from("<I", data, layout.text_state)
    # kind, compact and ascii follow `interned`, which has 2, 8 or 16 bits (unicodeobject.h)
    for shift in (2, 8, 16):
        kind, compact, ascii_ = state >> shift & 7, state >> shift + 3 & 1, state >> shift + 4 & 1
        if kind in _CODECS and compact and not (ascii_ and kind != 1):
            break
    else:
        raise Unreadable("a name is no string", passing=True)
    if not 0 <= length < 1 << 24:
        raise Unreadable("a name is no string", passing=True)
    return length, kind, bool(ascii_)


def bytes_at(layout: Layout, memory: Memory, address: int) -> bytes | None:
    """A bytes object; None for one that is longer than :data:`MAX_TABLE`."""
    length = memory.u64(address + layout.bytes_length)
    if length > MAX_TABLE:
        return None
    return memory.read(address + layout.bytes_data, length) if length else b""


def signature(layout: Layout, memory: Memory, code: int) -> int:
    """As stack_signature in stacks.bpf.h: differs where another object lies there now."""
    names = struct.unpack("<4Q", memory.read(code + layout.code_filename, 32))
    table = names[3] if layout.code_qualname >= 0 else 0
    x: int = (names[0] ^ names[1] >> 3 ^ names[2] << 7 ^ table >> 5) & _MASK
    return (x ^ x >> 32) & 0xFFFFFFFF


def code_at(
    layout: Layout,
    memory: Memory,
    code: int,
    wanted: int,
    name: str | None = None,
    file: str | None = None,
    table: bytes | None = None,
) -> Code:
    """The code object at ``code`` if its signature is ``wanted``, so that it is still the same one.

    ``name``, ``file`` and ``table`` are known already where they are given.
    """

    def pointer(offset: int) -> int:
        return memory.u64(code + offset)

    named = layout.code_qualname if layout.code_qualname >= 0 else layout.code_name
    if name is None:
        name = text_at(layout, memory, pointer(named))
    if file is None:
        file = text_at(layout, memory, pointer(layout.code_filename))
    if table is None:
        table = bytes_at(layout, memory, pointer(layout.code_linetable))
    (first,) = struct.unpack("<i", memory.read(code + layout.code_first, 4))
    if signature(layout, memory, code) != wanted:
        raise Unreadable("its code object is gone")
    return Code(name, file, first, table)


def captured(
    layout: Layout, first: int, whole: int, name: bytes, file: bytes, table: bytes
) -> tuple[Code | None, str | None, str | None, bytes | None]:
    """A code object from what BPF copied of it, None where a part is missing; and its parts."""

    def tried(read: Callable[[], str]) -> str | None:
        try:
            return read()
        except Unreadable:
            return None

    name_ = tried(lambda: text_in(layout, name))
    file_ = tried(lambda: text_in(layout, file))
    table_ = table if len(table) == whole else None
    if name_ is None or file_ is None or table_ is None:
        return None, name_, file_, table_
    return Code(name_, file_, first, table_), name_, file_, table_
