"""Find the interpreter of a process, and verify that it is laid out as is thought.

Every file that a process maps may be hostile, and so may its memory: the one is read by
:mod:`dsprobe.probes.elf`, the other by :class:`~dsprobe.probes.pystacks.objects.Memory`, which
bound what they read.
"""

from __future__ import annotations

import os
import re
import stat
from collections.abc import Iterator
from dataclasses import dataclass

from dsprobe.probes import mappedfiles
from dsprobe.probes.elf import ElfError, Library
from dsprobe.probes.pystacks import offsets
from dsprobe.probes.pystacks.errors import ENDED, Unreadable
from dsprobe.probes.pystacks.objects import Memory
from dsprobe.probes.pystacks.offsets import Layout

_CANDIDATES = 4  # each may take a fifth of a second if it is made to
_SYMBOLS = ("_PyRuntime", "Py_Version", "PyCode_Type")
_THREADS, _WALKED, _FRAMES = 1024, 64, 50
"""What the check goes through at most: threads, those whose frames it looks at, frames of each."""
_NAME = re.compile(rb"python(?:3\.(\d{1,3}))?", re.IGNORECASE)
_SHIM = 3  # owner of a frame that is no Python function's (FRAME_OWNED_BY_CSTACK and above)


@dataclass(frozen=True)
class Interpreter:
    """``runtime`` is the address of _PyRuntime, ``code_type`` that of PyCode_Type; ``path`` is the
    file that holds them as the process sees it."""

    version: int
    layout: Layout
    runtime: int
    code_type: int
    path: str

    @property
    def name(self) -> str:
        return offsets.name_of(self.version)

    @property
    def minor(self) -> int:
        return offsets.minor_of(self.version)


@dataclass(frozen=True)
class _File:
    path: bytes
    start: int
    end: int
    offset: int


def find(pid: int) -> Interpreter | None:
    """The interpreter of process ``pid``, checked; None where it maps none.

    Raises :class:`Unreadable`.
    """
    hidden = False
    for file in _candidates(pid):
        try:
            symbols, bias = _symbols(pid, file)
        except (OSError, ElfError):
            continue
        if "_PyRuntime" not in symbols:
            hidden |= _NAME.search(os.path.basename(file.path)) is not None
            continue
        if "PyCode_Type" not in symbols:
            raise Unreadable("its Python does not export PyCode_Type")
        with Memory(pid) as memory:
            runtime = bias + symbols["_PyRuntime"]
            version = _version(memory, bias + symbols["Py_Version"] if "Py_Version" in symbols
                               else 0, file.path)  # fmt: skip
            head = memory.read(runtime, offsets.HEAD)
            version, layout = offsets.layout(head, version)
            path = file.path.decode(errors="replace")
            found = Interpreter(version, layout, runtime, bias + symbols["PyCode_Type"], path)
            check(found, memory)
        return found
    if hidden:
        raise Unreadable("its Python exports no _PyRuntime")
    return None


def _version(memory: Memory, address: int, path: bytes) -> int:
    """PY_VERSION_HEX; 0 where it is not known."""
    if address:
        return memory.u64(address) & 0xFFFFFFFF
    named = _NAME.search(os.path.basename(path))
    return 3 << 24 | int(named[1]) << 16 if named and named[1] and int(named[1]) < 256 else 0


def _candidates(pid: int) -> Iterator[_File]:
    """Mapped files that may hold an interpreter: libpython, then the program, then what else is
    called python (the program too, where it was started through the dynamic loader)."""
    try:
        lines = list(mappedfiles.lines(pid))
        program = os.readlink(os.fsencode(f"/proc/{pid}/exe"))
    except (FileNotFoundError, ProcessLookupError):
        raise Unreadable(ENDED) from None
    except OSError as e:
        raise Unreadable(f"its mappings cannot be read: {e.strerror}") from None
    files: dict[tuple[bytes, bytes], _File] = {}
    for line in lines:
        words = line.split(None, 5)
        if len(words) == 6 and words[5].startswith(b"/"):
            start, _, end = words[0].partition(b"-")
            try:
                file = _File(words[5], int(start, 16), int(end, 16), int(words[2], 16))
            except ValueError:
                continue
            files.setdefault((words[3], words[4]), file)

    def rank(file: _File) -> int:
        name = os.path.basename(file.path)
        if b"libpython" in name:
            return 0
        return 1 if file.path == program else 2 if b"python" in name and b".so" not in name else 3

    found = sorted((f for f in files.values() if rank(f) < 3), key=rank)
    yield from found[:_CANDIDATES]


def _symbols(pid: int, file: _File) -> tuple[dict[str, int], int]:
    """Addresses as in the file, and what to add to them."""
    # By what is mapped, not by name: another mount namespace, a deleted or replaced file.
    path = f"/proc/{pid}/map_files/{file.start:x}-{file.end:x}"
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOCTTY)
    try:
        if not stat.S_ISREG(os.fstat(fd).st_mode):
            raise ElfError("not a regular file")
        library = Library(fd)
        return library.addresses(*_SYMBOLS), file.start - library.address_of(file.offset)
    finally:
        os.close(fd)


def check(it: Interpreter, memory: Memory) -> None:
    """Raises :class:`Unreadable` unless each thread state points back at its interpreter and at the
    one before it, one is that of a live thread, and what frames call their code is code."""
    o, threads, codes = it.layout, 0, 0
    interpreter = memory.u64(it.runtime + o.interpreters)
    previous, thread = 0, memory.u64(interpreter + o.interpreter_threads) if interpreter else 0
    for n in range(_THREADS):
        if not interpreter:
            break
        if not thread:
            interpreter, previous = memory.u64(interpreter + o.interpreter_next), 0
            thread = memory.u64(interpreter + o.interpreter_threads) if interpreter else 0
            continue
        if (
            memory.u64(thread + o.thread_interpreter) != interpreter
            or memory.u64(thread + o.thread_previous) != previous
        ):
            raise Unreadable("its list of threads is not where it should be", passing=True)
        threads += _is_thread(memory, memory.u64(thread + o.thread_id))
        codes += _check_frames(it, memory, thread) if n < _WALKED else 0
        previous, thread = thread, memory.u64(thread + o.thread_next)
    if not threads or not codes:
        raise Unreadable("its Python does not run yet", passing=True)


def _is_thread(memory: Memory, address: int) -> bool:
    """Whether the first word there points at itself, as that of a thread's control block does
    (x86-64 psABI, thread-local storage); the state of one that ended may still be listed."""
    try:
        return memory.u64(address) == address
    except Unreadable:
        return False


def _check_frames(it: Interpreter, memory: Memory, thread: int) -> int:
    """How many frames have a code object."""
    o, codes = it.layout, 0
    frame = memory.u64(thread + o.thread_frame)
    if o.cframe_frame >= 0 and frame:
        frame = memory.u64(frame + o.cframe_frame)
    for _ in range(_FRAMES):
        if not frame:
            break
        owner = memory.read(frame + o.frame_owner, 1)[0] if o.frame_owner >= 0 else 0
        if not is_shim(owner, it.minor):
            code = memory.u64(frame + o.frame_code) & ~7
            if memory.u64(code + 8) != it.code_type:
                raise Unreadable("what its frames run is no code object", passing=True)
            codes += 1
        frame = memory.u64(frame + o.frame_previous)
    return codes


def is_shim(owner: int, minor: int) -> bool:
    """Whether a frame is the interpreter's own, where C calls into Python (3.12 on)."""
    return minor >= 12 and owner >= _SHIM
