"""Where things lie in CPython's structures, by version.

3.10 to 3.12: ``offsetof`` over the headers in Include/internal of each; no release of a minor
version moved them.  From 3.13 on the interpreter says so itself, in ``_Py_DebugOffsets`` at the
start of ``_PyRuntime`` (Include/internal/pycore_debug_offsets.h), whose own layout changes with
each minor version.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass

from dsprobe.probes.pystacks.errors import Unreadable

COOKIE = b"xdebugpy"
HEAD = 1024
"""Bytes at the start of ``_PyRuntime`` that hold the debug offsets of every known version."""

_FINAL = 0xF  # release level in the version number (PY_VERSION_HEX, Include/patchlevel.h)


@dataclass(frozen=True)
class Layout:
    """Byte offsets (and two sizes) for one version; -1 where it has no such member.

    ``interpreters`` in _PyRuntimeState; ``interpreter_*`` in PyInterpreterState; ``thread_*`` in
    PyThreadState; ``cframe_frame`` in _PyCFrame, which 3.11 and 3.12 put between thread and frame;
    ``frame_*`` in PyFrameObject (3.10) or _PyInterpreterFrame; ``code_*`` in PyCodeObject;
    ``text_*`` in PyASCIIObject, with the sizes ``ascii`` and ``compact`` of what precedes the
    characters; ``bytes_*`` in PyBytesObject.
    """

    interpreters: int
    interpreter_next: int
    interpreter_threads: int
    thread_previous: int
    thread_next: int
    thread_interpreter: int
    thread_frame: int
    thread_id: int
    cframe_frame: int
    frame_previous: int
    frame_code: int
    frame_instr: int
    frame_owner: int
    code_filename: int
    code_name: int
    code_qualname: int
    code_linetable: int
    code_first: int
    code_bytes: int
    text_length: int
    text_state: int
    ascii: int
    compact: int
    bytes_length: int = 16
    bytes_data: int = 32

    def checked(self) -> Layout:
        """Itself, if the BPF program can work with it; :class:`Unreadable` if not."""
        names = [self.code_filename, self.code_name, self.code_qualname, self.code_linetable]
        row = [n for n in names if n >= 0]
        small = (self.code_first, self.text_length, self.ascii, self.bytes_length, self.bytes_data)
        ok = (
            (self.thread_previous, self.thread_next, self.thread_interpreter) == (0, 8, 16)
            and row == list(range(row[0], row[0] + 8 * len(row), 8))
            and all(0 <= n < 256 for n in small)
            and all(0 <= n <= 0x60 and n % 8 == 0
                    for n in (self.frame_previous, self.frame_code, self.frame_instr))
            and -1 <= self.frame_owner < 0x78
            and all(0 <= n < 1 << 15 for n in (self.thread_frame, self.thread_id, row[-1]))
            and all(0 <= n < 1 << 20 for n in
                    (self.interpreters, self.interpreter_next, self.interpreter_threads))
            and 0 <= self.code_bytes < 1 << 15 and 0 <= self.compact < 256
        )  # fmt: skip
        if not ok:
            raise Unreadable("its structures are not laid out as those of its version")
        return self


_TABLES = {
    10: Layout(32, 0, 8, 0, 8, 16, 24, 176, -1, 24, 32, 96, -1, 104, 112, -1, 120, 40, 0,
               16, 32, 48, 72),
    11: Layout(40, 0, 16, 0, 8, 16, 56, 152, 8, 48, 32, 56, 69, 112, 120, 128, 136, 72, 184,
               16, 32, 48, 72),
    12: Layout(40, 0, 72, 0, 8, 16, 56, 136, 0, 8, 0, 56, 70, 112, 120, 128, 136, 68, 192,
               16, 32, 40, 56),
}  # fmt: skip

# Where _Py_DebugOffsets tells each of the above; 3.13 does not tell those of bytes.
_TOLD = {
    13: {"interpreters": 40, "interpreter_next": 64, "interpreter_threads": 72,
         "thread_previous": 160, "thread_next": 168, "thread_interpreter": 176,
         "thread_frame": 184, "thread_id": 192, "frame_previous": 232, "frame_code": 240,
         "frame_instr": 248, "frame_owner": 264, "code_filename": 280, "code_name": 288,
         "code_qualname": 296, "code_linetable": 304, "code_first": 312, "code_bytes": 344,
         "text_state": 544, "text_length": 552, "ascii": 560},
    14: {"interpreters": 40, "interpreter_next": 64, "interpreter_threads": 72,
         "thread_previous": 184, "thread_next": 192, "thread_interpreter": 200,
         "thread_frame": 208, "thread_id": 216, "frame_previous": 256, "frame_code": 264,
         "frame_instr": 272, "frame_owner": 288, "code_filename": 320, "code_name": 328,
         "code_qualname": 336, "code_linetable": 344, "code_first": 352, "code_bytes": 384,
         "bytes_length": 600, "bytes_data": 608, "text_state": 624, "text_length": 632,
         "ascii": 640},
    15: {"interpreters": 40, "interpreter_next": 64, "interpreter_threads": 72,
         "thread_previous": 184, "thread_next": 192, "thread_interpreter": 200,
         "thread_frame": 208, "thread_id": 240, "frame_previous": 320, "frame_code": 328,
         "frame_instr": 336, "frame_owner": 352, "code_filename": 384, "code_name": 392,
         "code_qualname": 400, "code_linetable": 408, "code_first": 416, "code_bytes": 448,
         "bytes_length": 696, "bytes_data": 704, "text_state": 720, "text_length": 728,
         "ascii": 736},
}  # fmt: skip

KNOWN = (*_TABLES, *_TOLD)
"""Minor versions of Python 3 that can be read."""


def minor_of(version: int) -> int:
    """From a number such as 0x030b02f0."""
    return version >> 16 & 0xFF


def name_of(version: int) -> str:
    """3.11.2 for 0x030b02f0; 3.11 where the rest of it is not known."""
    major, minor, micro, rest = version.to_bytes(4, "big")
    if not rest:
        return f"{major}.{minor}"
    level = {0xA: "a", 0xB: "b", 0xC: "rc"}.get(rest >> 4, "")
    return f"{major}.{minor}.{micro}" + (f"{level}{rest & 15}" if level else "")


def layout(head: bytes, version: int) -> tuple[int, Layout]:
    """(version, layout) of the interpreter whose ``_PyRuntime`` begins with ``head``.

    ``version`` is what its symbol Py_Version or its file name says, 0 where neither does.  Raises
    :class:`Unreadable`.
    """
    told = head.startswith(COOKIE) and len(head) == HEAD
    if told:
        version, free_threaded = struct.unpack_from("<QQ", head, 8)
        version &= 0xFFFFFFFF
        if free_threaded:
            raise Unreadable(f"Python {name_of(version)} without a GIL cannot be read yet")
    if not version:
        raise Unreadable("the version of its Python is not known")
    minor, known = minor_of(version), _TOLD if told else _TABLES
    if version >> 24 != 3 or minor not in known:
        raise Unreadable(
            f"Python {name_of(version)} is not known; those from 3.{min(KNOWN)} to 3.{max(KNOWN)}"
            " are"
        )
    if version & 0xFF and version >> 4 & 0xF != _FINAL:
        raise Unreadable(f"Python {name_of(version)} was made before the release of its version")
    if not told:
        return version, _TABLES[minor].checked()
    words = {name: struct.unpack_from("<Q", head, at)[0] for name, at in _TOLD[minor].items()}
    return version, Layout(**words, cframe_frame=-1, compact=words["ascii"] + 16).checked()
