"""Run a loaded BPF program by hand, on a CPU of choice (BPF_PROG_TEST_RUN, bpf(2))."""

from __future__ import annotations

import ctypes
import platform

_CALL = {"x86_64": 321, "aarch64": 280}[platform.machine()]
_TEST_RUN = 10
_ON_CPU = 1  # BPF_F_TEST_RUN_ON_CPU, for raw tracepoints since Linux 5.10
_libc = ctypes.CDLL(None, use_errno=True)


class _Attr(ctypes.Structure):
    """The ``test`` member of union bpf_attr (include/uapi/linux/bpf.h)."""

    _fields_ = [
        ("prog_fd", ctypes.c_uint32), ("retval", ctypes.c_uint32),
        ("data_size_in", ctypes.c_uint32), ("data_size_out", ctypes.c_uint32),
        ("data_in", ctypes.c_uint64), ("data_out", ctypes.c_uint64),
        ("repeat", ctypes.c_uint32), ("duration", ctypes.c_uint32),
        ("ctx_size_in", ctypes.c_uint32), ("ctx_size_out", ctypes.c_uint32),
        ("ctx_in", ctypes.c_uint64), ("ctx_out", ctypes.c_uint64),
        ("flags", ctypes.c_uint32), ("cpu", ctypes.c_uint32),
        ("batch_size", ctypes.c_uint32), ("pad", ctypes.c_uint32),
    ]  # fmt: skip


def run_raw_tracepoint(fd: int, cpu: int, *args: int) -> None:
    """Run the raw tracepoint program ``fd`` once on ``cpu`` with the tracepoint's ``args``."""
    words = (ctypes.c_uint64 * len(args))(*args)
    attr = _Attr(
        prog_fd=fd, ctx_size_in=ctypes.sizeof(words), ctx_in=ctypes.addressof(words),
        flags=_ON_CPU, cpu=cpu,
    )  # fmt: skip
    if _libc.syscall(_CALL, _TEST_RUN, ctypes.byref(attr), ctypes.sizeof(attr)) < 0:
        raise OSError(ctypes.get_errno(), "BPF_PROG_TEST_RUN")
