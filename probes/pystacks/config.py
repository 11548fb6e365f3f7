"""What is known of the Python of a process, and how the BPF program is told (struct python)."""

from __future__ import annotations

import ctypes
import struct
from dataclasses import dataclass

from dsprobe.probes import syscalls
from dsprobe.probes.probe import Map
from dsprobe.probes.pystacks import interpreter
from dsprobe.probes.pystacks.errors import Unreadable
from dsprobe.probes.pystacks.interpreter import Interpreter

READABLE, NO_PYTHON, UNSUPPORTED = range(3)  # STACK_WHOLE, STACK_NATIVE, STACK_UNSUPPORTED

_STRUCT = struct.Struct("<QIIII4H8BHxx4BQQ")
_TRIES = 5
_UPDATE, _DELETE, _POP = 2, 3, 21  # enum bpf_cmd; the last is BPF_MAP_LOOKUP_AND_DELETE_ELEM


@dataclass(frozen=True)
class Looked:
    """What a look at a process found: its interpreter, or ``reason`` why that cannot be read; with
    neither it has none.  ``passing``: another look may find more."""

    interpreter: Interpreter | None = None
    reason: str = ""
    passing: bool = False

    @property
    def sentence(self) -> str:
        """As meta.process has it."""
        return self.interpreter.name if self.interpreter else self.reason


def look(pid: int) -> Looked:
    """Look at process ``pid``; again at once where it changed under our eyes."""
    for left in reversed(range(_TRIES)):
        try:
            return Looked(interpreter.find(pid))
        except Unreadable as e:
            if not left or not e.passing:
                return Looked(None, str(e), e.passing)
    raise AssertionError


def packed(looked: Looked, number: int) -> bytes:
    """``struct python`` of stacks.bpf.h."""
    it = looked.interpreter
    if it is None:
        state = UNSUPPORTED if looked.reason else NO_PYTHON
        return _STRUCT.pack(0, number, state, *[0] * (_STRUCT_FIELDS - 3))
    o = it.layout
    owner = o.frame_owner if o.frame_owner >= 0 else 0x7F  # past what is read: always 0
    named = o.code_name if o.code_qualname < 0 else o.code_qualname
    last = max(o.frame_code, o.frame_previous, o.frame_instr, o.frame_owner)
    return _STRUCT.pack(
        it.runtime + o.interpreters, number, READABLE, o.interpreter_next, o.interpreter_threads,
        o.thread_next, o.thread_id, o.thread_frame,
        o.cframe_frame if o.cframe_frame >= 0 else 0xFFFF,
        o.frame_code, o.frame_previous, o.frame_instr, owner, (last | 7) + 1,
        o.code_first, (named - o.code_filename) // 8, (o.code_linetable - o.code_filename) // 8,
        o.code_filename, o.text_length, o.ascii, o.bytes_length, o.bytes_data,
        (1 << 32) - 1 if it.minor == 10 else (1 << 64) - 1,
        0 if o.code_qualname < 0 else (1 << 64) - 1,
    )  # fmt: skip


_STRUCT_FIELDS = 24


class Table:
    """A BPF hash, array or queue; its keys and values are bytes.  Raises OSError."""

    def __init__(self, map: Map) -> None:
        self._map = map

    def set(self, key: bytes, value: bytes) -> None:
        if len(value) != self._map.leaf_size:
            raise ValueError(f"its values have {self._map.leaf_size} bytes")
        k, v = self._key(key), ctypes.create_string_buffer(value, len(value))
        attr = struct.pack("<IxxxxQQQ", self._map.fd, ctypes.addressof(k), ctypes.addressof(v), 0)
        syscalls.bpf(_UPDATE, attr)

    def remove(self, key: bytes) -> None:
        k = self._key(key)
        try:
            syscalls.bpf(_DELETE, struct.pack("<IxxxxQQQ", self._map.fd, ctypes.addressof(k), 0, 0))
        except FileNotFoundError:
            pass

    def pop(self) -> bytes | None:
        """The first of a queue, taken out; None where it is empty."""
        v = ctypes.create_string_buffer(self._map.leaf_size)
        try:
            syscalls.bpf(_POP, struct.pack("<IxxxxQQQ", self._map.fd, 0, ctypes.addressof(v), 0))
        except FileNotFoundError:
            return None
        return v.raw

    def _key(self, key: bytes) -> ctypes.Array[ctypes.c_char]:
        if len(key) != self._map.key_size:
            raise ValueError(f"its keys have {self._map.key_size} bytes")
        return ctypes.create_string_buffer(key, len(key))
