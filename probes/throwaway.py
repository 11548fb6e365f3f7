"""A process without privileges that runs code nobody vouches for, and is thrown away.

``python -I -S throwaway.py FD``: FD is a file of machine code (a library or raw code).  It gives up
all privileges, then obeys the JSON lines on its standard input and answers each with lines on its
standard output; whatever it does to itself, its parent only sees an answer missing.  It imports
nothing but the standard library, so that it starts in 20 ms.
"""

from __future__ import annotations

import ctypes
import json
import os
import resource
import sys
import time
from typing import Any

_NOBODY = 65534
_CLONE_NEWNS, _CLONE_NEWUTS, _CLONE_NEWIPC, _CLONE_NEWNET = 1 << 17, 1 << 26, 1 << 27, 1 << 30
_PR_SET_PDEATHSIG, _PR_SET_NO_NEW_PRIVS, _PR_SET_SECCOMP = 1, 38, 22
_LIMITS = (
    (resource.RLIMIT_CPU, 5),  # seconds
    (resource.RLIMIT_AS, 1 << 30),
    (resource.RLIMIT_FSIZE, 0),
    (resource.RLIMIT_CORE, 0),
    (resource.RLIMIT_NPROC, 0),
    (resource.RLIMIT_MEMLOCK, 0),
)
_READ, _WRITE, _EXECUTE = 1, 2, 4
_PRIVATE, _ANONYMOUS, _FIXED_NOREPLACE = 0x02, 0x20, 0x100000
_libc = ctypes.CDLL(None, use_errno=True)


def _drop() -> None:
    """Give up what a process of root has.  Raises OSError: then nothing may be run."""
    _libc.prctl(_PR_SET_PDEATHSIG, 9)
    if os.geteuid() == 0:
        _libc.unshare(_CLONE_NEWNS | _CLONE_NEWUTS | _CLONE_NEWIPC | _CLONE_NEWNET)
        os.setgroups([])
        os.setresgid(_NOBODY, _NOBODY, _NOBODY)
        os.setresuid(_NOBODY, _NOBODY, _NOBODY)
    if _libc.prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0):
        raise OSError(ctypes.get_errno(), "no_new_privs")
    for what, limit in _LIMITS:
        resource.setrlimit(what, (limit, limit))


def _say(**words: Any) -> None:
    os.write(1, json.dumps(words).encode() + b"\n")


def _mmap(address: int, size: int, protection: int, flags: int, fd: int) -> int:
    call = _libc.mmap
    call.restype = ctypes.c_void_p
    call.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long]
    got = call(address or None, size, protection, flags, fd, 0)
    if got in (None, ctypes.c_void_p(-1).value) or address not in (0, got):
        raise OSError(ctypes.get_errno(), "mmap")
    return int(got)


def _scratch(address: int, size: int) -> None:
    """Memory at ``address`` that functions may read and write, so that pointers lead somewhere."""
    _mmap(address, size, _READ | _WRITE, _PRIVATE | _ANONYMOUS | _FIXED_NOREPLACE, -1)


def _call(library: ctypes.CDLL, names: list[str], arguments: list[int]) -> None:
    """Call each function with the same arguments; a line for each, before and after."""
    for name in names:
        function = getattr(library, name)
        function.argtypes = [ctypes.c_uint64] * len(arguments)
        _say(calling=name)
        _say(name=name, result=function(*arguments))


def _map(fd: int) -> int:
    """Address of the file's first page, as executable code."""
    return _mmap(0, os.fstat(fd).st_size, _READ | _EXECUTE, _PRIVATE, fd)


def _time(loop: int, function: int, times: int) -> None:
    """Have the code at ``loop`` call ``function`` that often; ns it took."""
    run = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_uint64, ctypes.c_uint64)(loop)
    begin = time.perf_counter_ns()
    run(times, function)
    _say(took=time.perf_counter_ns() - begin)


def _forbid(first: int) -> None:
    """A seccomp filter that kills this process at any system call numbered ``first`` or higher, as
    filters that list what is allowed do at calls newer than they are (seccomp(2))."""

    class Instruction(ctypes.Structure):
        _fields_ = [("code", ctypes.c_uint16), ("jt", ctypes.c_uint8), ("jf", ctypes.c_uint8),
                    ("k", ctypes.c_uint32)]  # fmt: skip

    class Program(ctypes.Structure):
        _fields_ = [("length", ctypes.c_uint16), ("filter", ctypes.POINTER(Instruction))]

    load, jump_if_at_least, give = 0x20, 0x35, 0x06
    filter = (Instruction * 4)(
        Instruction(load, 0, 0, 0),  # seccomp_data.nr
        Instruction(jump_if_at_least, 0, 1, first),
        Instruction(give, 0, 0, 0x80000000),  # SECCOMP_RET_KILL_PROCESS
        Instruction(give, 0, 0, 0x7FFF0000),  # SECCOMP_RET_ALLOW
    )
    program = Program(len(filter), filter)
    if _libc.prctl(_PR_SET_SECCOMP, 2, ctypes.byref(program), 0, 0):
        raise OSError(ctypes.get_errno(), "seccomp")


def main() -> None:
    fd = int(sys.argv[1])
    _drop()
    library: ctypes.CDLL | None = None
    base = 0
    for line in sys.stdin:
        order = json.loads(line)
        if order["do"] == "call":
            if library is None:
                library = ctypes.CDLL(f"/proc/self/fd/{fd}")
                _scratch(order["scratch"], order["size"])
            _call(library, order["names"], order["arguments"])
        elif order["do"] == "time":  # the code in FD itself
            base = base or _map(fd)
            _time(base + order["loop"], base + order["function"], order["times"])
        elif order["do"] == "repeat":  # a function of the library FD, by a loop that comes along
            library = library or ctypes.CDLL(f"/proc/self/fd/{fd}")
            if not base:
                base = _mmap(0, 4096, _READ | _WRITE | _EXECUTE, _PRIVATE | _ANONYMOUS, -1)
                code = bytes.fromhex(order["code"])
                ctypes.memmove(base, code, len(code))
            function = ctypes.cast(getattr(library, order["name"]), ctypes.c_void_p).value
            _time(base, function or 0, order["times"])
        elif order["do"] == "forbid":
            _forbid(order["first"])
        _say(done=order["do"])


if __name__ == "__main__":
    main()
