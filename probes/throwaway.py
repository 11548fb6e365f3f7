"""A process without privileges that runs code nobody vouches for, and is thrown away.

``python -I -S throwaway.py FD PARENT FILTER``: FD is a file of machine code (a library or raw
code), PARENT the process that it must not outlive, FILTER a seccomp program in hexadecimal ("" for
code of our own).  It shuts itself in: no other process, network or file is in reach, no privilege
is left.  Then it obeys the JSON lines on its standard input and answers each with lines on its
standard output; whatever the code does, its parent only sees an answer missing.

It imports nothing but the standard library, so that it starts in 20 ms.
"""

from __future__ import annotations

import ctypes
import json
import os
import resource
import signal
import sys
import time
from typing import Any

_NOBODY = 65534
_CLONE_NEWNS, _CLONE_NEWUTS, _CLONE_NEWIPC = 1 << 17, 1 << 26, 1 << 27
_CLONE_NEWPID, _CLONE_NEWNET = 1 << 29, 1 << 30
_MS_NOSUID, _MS_NODEV, _MS_NOEXEC, _MS_REC, _MS_PRIVATE = 2, 4, 8, 1 << 14, 1 << 18
_PR_SET_PDEATHSIG, _PR_SET_DUMPABLE, _PR_SET_SECCOMP, _PR_SET_NO_NEW_PRIVS = 1, 4, 22, 38
_SECCOMP_MODE_FILTER = 2
_LIMITS = (
    (resource.RLIMIT_CPU, 5),  # seconds
    (resource.RLIMIT_AS, 1 << 30),
    (resource.RLIMIT_FSIZE, 0),
    (resource.RLIMIT_CORE, 0),
    (resource.RLIMIT_NPROC, 0),
    (resource.RLIMIT_MEMLOCK, 0),
)
_NEEDED = ("libm.so.6", "libdl.so.2", "libpthread.so.0", "librt.so.1")
"""What driver libraries are linked with; loaded before the files are out of reach."""
_READ, _WRITE, _EXECUTE = 1, 2, 4
_PRIVATE, _ANONYMOUS, _FIXED_NOREPLACE = 0x02, 0x20, 0x100000
_libc = ctypes.CDLL(None, use_errno=True)


def _must(result: int, what: str) -> None:
    if result:
        raise OSError(ctypes.get_errno(), f"{what}: {os.strerror(ctypes.get_errno())}")


def _mount(kind: bytes, at: bytes, flags: int, options: bytes | None = None) -> None:
    _must(_libc.mount(kind, at, kind, ctypes.c_ulong(flags), options), "mount")


def _shut_in(parent: int) -> None:
    """Go on in a child that is alone in the world, under an empty root; this process only waits.

    Raises OSError: then nothing may be run.
    """
    for name in _NEEDED:
        try:
            ctypes.CDLL(name)
        except OSError:
            pass  # part of libc itself in later versions, or not needed
    _must(_libc.unshare(_CLONE_NEWNS | _CLONE_NEWUTS | _CLONE_NEWIPC | _CLONE_NEWNET
                        | _CLONE_NEWPID), "unshare")  # fmt: skip
    _must(_libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0), "prctl")
    if os.getppid() != parent:
        raise OSError("the parent has ended")
    child = os.fork()
    if child:
        os.waitpid(child, 0)
        os._exit(0)
    _must(_libc.mount(None, b"/", None, ctypes.c_ulong(_MS_REC | _MS_PRIVATE), None), "mount")
    _mount(b"tmpfs", b"/tmp", _MS_NOSUID | _MS_NODEV | _MS_NOEXEC, b"size=64k,mode=755")
    os.mkdir("/tmp/proc")
    # Only to be able to name FD; of the kernel it shows nothing but processes (Linux 5.8).
    _mount(b"proc", b"/tmp/proc", _MS_NOSUID | _MS_NODEV | _MS_NOEXEC, b"subset=pid")
    os.chroot("/tmp")
    os.chdir("/")


def _drop(filter: bytes) -> None:
    """Give up what root has, and all system calls but those that ``filter`` allows."""
    os.setgroups([])
    os.setresgid(_NOBODY, _NOBODY, _NOBODY)
    os.setresuid(_NOBODY, _NOBODY, _NOBODY)
    # After the change of user, which clears it.
    _must(_libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0), "prctl")
    _must(_libc.prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0), "prctl")
    for what, limit in _LIMITS:
        resource.setrlimit(what, (limit, limit))
    if filter:
        _filter(filter)


class _Program(ctypes.Structure):
    _fields_ = [("length", ctypes.c_ushort), ("filter", ctypes.c_void_p)]  # struct sock_fprog


def _filter(code: bytes) -> None:
    """Install a seccomp program (seccomp(2)); it stays."""
    buffer = ctypes.create_string_buffer(code, len(code))
    program = _Program(len(code) // 8, ctypes.addressof(buffer))
    result = _libc.prctl(_PR_SET_SECCOMP, _SECCOMP_MODE_FILTER, ctypes.byref(program), 0, 0)
    _must(result, "seccomp")


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


def main() -> None:
    fd, parent, filter = int(sys.argv[1]), int(sys.argv[2]), bytes.fromhex(sys.argv[3])
    _shut_in(parent)
    _drop(filter)
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
            _filter(bytes.fromhex(order["filter"]))
        _say(done=order["do"])


if __name__ == "__main__":
    main()
