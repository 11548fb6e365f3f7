"""The system calls that attach programs and read maps, by number: bpf(2), perf_event_open(2).

libbpf would bring these, but as part of bcc it comes with LLVM: loading it costs the agent 70 MB
that it needs only while compiling, which happens in a process of its own.
"""

from __future__ import annotations

import ctypes
import os
import platform
import struct
from dataclasses import dataclass

_NR = {"x86_64": (321, 298), "aarch64": (280, 241)}  # bpf, perf_event_open
_libc = ctypes.CDLL(None, use_errno=True)

OBJ_GET_INFO_BY_FD = 15
RAW_TRACEPOINT_OPEN = 17
ENABLE_STATS = 32

PERF_TYPE_SOFTWARE = 1
PERF_COUNT_SW_CPU_CLOCK = 0
PERF_COUNT_SW_DUMMY = 9
PERF_EVENT_IOC_ENABLE, PERF_EVENT_IOC_SET_BPF = 0x2400, 0x40042408
_PERF_FLAG_FD_CLOEXEC = 8


def supported() -> bool:
    """Whether this machine is one whose system-call numbers are known."""
    return platform.machine() in _NR


def may_trace() -> bool:
    """Whether this process has the capabilities to load and attach programs.

    CAP_SYS_ADMIN (21) covers CAP_PERFMON (38) and CAP_BPF (39): capabilities(7).
    """
    with open("/proc/self/status") as f:
        effective = next(int(line.split()[1], 16) for line in f if line.startswith("CapEff"))
    return bool(effective >> 21 & 1 or (effective >> 38 & effective >> 39 & 1))


def _call(which: int, *args: object) -> int:
    result: int = _libc.syscall(_NR[platform.machine()][which], *args)
    if result < 0:
        e = ctypes.get_errno()
        raise OSError(e, os.strerror(e))
    return result


def bpf(command: int, attr: bytes) -> tuple[int, bytes]:
    """bpf(2): (result, attr as the kernel left it).  Raises OSError."""
    buffer = ctypes.create_string_buffer(attr, len(attr))
    result = _call(0, ctypes.c_int(command), buffer, ctypes.c_uint(len(attr)))
    return result, buffer.raw


def open_raw_tracepoint(name: str, program: int) -> int:
    """Attach a program to a raw tracepoint; closing the returned descriptor detaches it."""
    text = ctypes.create_string_buffer(name.encode())
    fd, _ = bpf(RAW_TRACEPOINT_OPEN, struct.pack("<QII", ctypes.addressof(text), program, 0))
    os.set_inheritable(fd, False)
    return fd


def open_cpu_clock(cpu: int, period: int, program: int) -> int:
    """Run a program on ``cpu`` every ``period`` ns; closing the descriptor ends it."""
    attr = struct.pack("<IIQQ", PERF_TYPE_SOFTWARE, 128, PERF_COUNT_SW_CPU_CLOCK, period)
    attr = attr.ljust(128, b"\0")
    fd = _call(
        1,
        ctypes.create_string_buffer(attr, 128),
        ctypes.c_int(-1),
        ctypes.c_int(cpu),
        ctypes.c_int(-1),
        ctypes.c_ulong(_PERF_FLAG_FD_CLOEXEC),
    )
    try:
        for request, value in ((PERF_EVENT_IOC_SET_BPF, program), (PERF_EVENT_IOC_ENABLE, 0)):
            if _libc.ioctl(fd, ctypes.c_ulong(request), ctypes.c_int(value)) < 0:
                e = ctypes.get_errno()
                raise OSError(e, os.strerror(e))
    except OSError:
        os.close(fd)
        raise
    return fd


def open_mapping_events(cpu: int, wakeup: int) -> int:
    """Have every executable mapping made on ``cpu`` recorded in a ring, which the caller maps over
    the descriptor; it polls readable each time ``wakeup`` bytes more are in it.

    Source: struct perf_event_attr (include/uapi/linux/perf_event.h): bit 8 mmap, 14 watermark,
    23 mmap2.
    """
    attr = bytearray(128)
    struct.pack_into("<IIQ", attr, 0, PERF_TYPE_SOFTWARE, 128, PERF_COUNT_SW_DUMMY)
    struct.pack_into("<QI", attr, 40, 1 << 8 | 1 << 14 | 1 << 23, wakeup)
    return _call(
        1,
        ctypes.create_string_buffer(bytes(attr), 128),
        ctypes.c_int(-1),
        ctypes.c_int(cpu),
        ctypes.c_int(-1),
        ctypes.c_ulong(_PERF_FLAG_FD_CLOEXEC),
    )


def enable_stats() -> int:
    """Make the kernel time every BPF program until the returned descriptor is closed (5.8)."""
    fd, _ = bpf(ENABLE_STATS, struct.pack("<I", 0))
    return fd


@dataclass(frozen=True)
class ProgramInfo:
    """``run_time`` (ns) and ``runs`` grow only while statistics are enabled; ``misses`` always."""

    id: int
    run_time: int
    runs: int
    misses: int


def program_info(fd: int) -> ProgramInfo:
    """struct bpf_prog_info (include/uapi/linux/bpf.h)."""
    info = ctypes.create_string_buffer(232)
    bpf(OBJ_GET_INFO_BY_FD, struct.pack("<IIQ", fd, len(info), ctypes.addressof(info)))
    (number,) = struct.unpack_from("<I", info.raw, 4)
    run_time, runs, misses = struct.unpack_from("<QQQ", info.raw, 192)
    return ProgramInfo(number, run_time, runs, misses)
