"""Give up everything but the descriptors at hand.

Runs in the child, before it reads a byte of anybody's file.  Sources: setresuid(2), prctl(2),
setrlimit(2), seccomp(2); numbers from arch/x86/entry/syscalls/syscall_64.tbl and
include/uapi/asm-generic/unistd.h.
"""

from __future__ import annotations

import ctypes
import os
import resource
import signal
import struct
from collections.abc import Sequence

NOBODY = 65534
MAX_MEMORY = 1 << 30  # address space; what is used is a hundredth
MAX_FILES = 4096
MAX_CPU_S = 3600  # then a fresh child takes over

_PR_SET_PDEATHSIG, _PR_SET_DUMPABLE, _PR_SET_SECCOMP, _PR_SET_NO_NEW_PRIVS = 1, 4, 22, 38
_SECCOMP_MODE_FILTER = 2
_ALLOW, _EPERM = 0x7FFF0000, 0x00050001  # SECCOMP_RET_ALLOW, SECCOMP_RET_ERRNO | EPERM
_LOAD, _EQUAL, _RETURN = 0x20, 0x15, 0x06  # BPF_LD|W|ABS, BPF_JMP|JEQ|K, BPF_RET|K

# read write close fstat lseek mmap mprotect munmap brk rt_sigaction rt_sigprocmask rt_sigreturn
# pread64 madvise mremap sendto recvfrom sendmsg recvmsg exit exit_group futex clock_gettime
# newfstatat getrandom poll/ppoll
_CALLS = {
    "x86_64": (0xC000003E, (0, 1, 3, 5, 8, 9, 10, 11, 12, 13, 14, 15, 17, 28, 25, 44, 45, 46, 47,
                            60, 231, 202, 228, 262, 318, 7, 271)),
    "aarch64": (0xC00000B7, (63, 64, 57, 80, 62, 222, 226, 215, 214, 134, 135, 139, 67, 233, 216,
                             206, 207, 211, 212, 93, 94, 98, 113, 79, 278, 73)),
}  # fmt: skip


class _Program(ctypes.Structure):
    _fields_ = [("length", ctypes.c_ushort), ("filter", ctypes.c_void_p)]  # struct sock_fprog


def _prctl(libc: ctypes.CDLL, *arguments: int) -> None:
    if libc.prctl(*(ctypes.c_ulong(a) for a in (*arguments, 0, 0, 0, 0)[:5])):
        raise OSError(ctypes.get_errno(), "prctl")


def enter(parent: int) -> None:
    """Become nobody, with bounded resources, unable to open, connect, run or signal anything.

    Ends with ``parent``.  Where it is not root it keeps its user.  Raises OSError.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    os.umask(0o777)
    os.chdir("/")
    for what, limit in (
        (resource.RLIMIT_NOFILE, MAX_FILES),
        (resource.RLIMIT_AS, MAX_MEMORY),
        (resource.RLIMIT_CPU, MAX_CPU_S),
        (resource.RLIMIT_FSIZE, 0),
        (resource.RLIMIT_CORE, 0),
    ):
        resource.setrlimit(what, (limit, limit))
    if os.geteuid() == 0:
        os.setgroups([])
        os.setresgid(NOBODY, NOBODY, NOBODY)
        os.setresuid(NOBODY, NOBODY, NOBODY)
    # After the change of user, which clears it.
    _prctl(libc, _PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        raise OSError("the agent has ended")
    _prctl(libc, _PR_SET_DUMPABLE, 0)
    _prctl(libc, _PR_SET_NO_NEW_PRIVS, 1)
    _allow_only(libc)


def only(architecture: int, calls: Sequence[int]) -> bytes:
    """A seccomp filter under which all but these system calls fail with EPERM."""
    # struct seccomp_data: number at 0, architecture at 4.
    program = [(_LOAD, 0, 0, 4), (_EQUAL, 1, 0, architecture), (_RETURN, 0, 0, _EPERM),
               (_LOAD, 0, 0, 0)]  # fmt: skip
    for i, call in enumerate(calls):
        program.append((_EQUAL, len(calls) - i, 0, call))
    program += [(_RETURN, 0, 0, _EPERM), (_RETURN, 0, 0, _ALLOW)]
    return b"".join(struct.pack("<HBBI", *line) for line in program)


def _allow_only(libc: ctypes.CDLL) -> None:
    if os.uname().machine not in _CALLS:
        return
    code = only(*_CALLS[os.uname().machine])
    buffer = ctypes.create_string_buffer(code, len(code))
    sock_fprog = _Program(len(code) // 8, ctypes.addressof(buffer))
    try:
        _prctl(libc, _PR_SET_SECCOMP, _SECCOMP_MODE_FILTER, ctypes.addressof(sock_fprog))
    except OSError:
        pass  # a kernel without seccomp: the user and the limits remain
