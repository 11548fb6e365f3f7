"""The system calls for programs and maps, by number: bpf(2), perf_event_open(2).

libbpf would bring these, but as part of bcc it comes with LLVM: loading it costs the agent 70 MB
that it needs only while compiling, which happens in a process of its own.
"""

from __future__ import annotations

import ctypes
import errno
import os
import platform
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

_NR = {"x86_64": (321, 298), "aarch64": (280, 241)}  # bpf, perf_event_open
_libc = ctypes.CDLL(None, use_errno=True)

MAP_CREATE = 0
MAP_UPDATE_ELEM = 2
PROG_LOAD = 5
OBJ_GET_INFO_BY_FD = 15
RAW_TRACEPOINT_OPEN = 17
LINK_CREATE = 28
ENABLE_STATS = 32

PERF_EVENT = 41
UPROBE_MULTI = 48
"""Attach types (enum bpf_attach_type)."""
KPROBE = 2  # enum bpf_prog_type: uprobes are of this type too
UPROBE_EVENTS = "/sys/bus/event_source/devices/uprobe/type"

PERF_TYPE_SOFTWARE = 1
PERF_COUNT_SW_CPU_CLOCK = 0
PERF_COUNT_SW_DUMMY = 9
PERF_EVENT_IOC_ENABLE, PERF_EVENT_IOC_SET_BPF = 0x2400, 0x40042408
_PERF_FLAG_FD_CLOEXEC = 8
_PERF_ATTR = 128  # bytes of struct perf_event_attr

_LOG_SIZE = 4 << 20
_RETURN_0 = bytes.fromhex("b700000000000000 9500000000000000")
_COOKIE = bytes.fromhex("85000000ae000000")  # call 174


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


def bpf_in_place(command: int, attr: ctypes.Array[ctypes.c_char]) -> int:
    """bpf(2) on an attr that tells more than the result does; errno, 0 where it worked."""
    nr = _NR[platform.machine()][0]
    result = _libc.syscall(nr, ctypes.c_int(command), attr, ctypes.c_uint(len(attr)))
    return ctypes.get_errno() if result < 0 else 0


class Refused(OSError):
    """A program that is not loaded; ``log`` is what the verifier says, if it says anything."""

    def __init__(self, code: int, log: str) -> None:
        super().__init__(code, os.strerror(code))
        self.log = log


def create_map(
    kind: int, key_size: int, value_size: int, entries: int, flags: int, name: str
) -> int:
    """Descriptor of a new map; ``name`` up to 15 characters."""
    attr = struct.pack(
        "<IIIIIII16s", kind, key_size, value_size, entries, flags, 0, 0, name.encode()
    )
    fd, _ = bpf(MAP_CREATE, attr)
    os.set_inheritable(fd, False)
    return fd


def put_program(array: int, place: int, program: int) -> None:
    """Make ``program`` what programs go on with that call ``place`` of a BPF_PROG_ARRAY."""
    key, value = ctypes.c_uint32(place), ctypes.c_uint32(program)
    where = ctypes.addressof(key), ctypes.addressof(value)
    bpf(MAP_UPDATE_ELEM, struct.pack("<IIQQQ", array, 0, *where, 0))


def map_info(fd: int) -> tuple[int, int, int, int, int]:
    """Type, key size, value size, entries, flags (struct bpf_map_info)."""
    info = ctypes.create_string_buffer(80)
    bpf(OBJ_GET_INFO_BY_FD, struct.pack("<IIQ", fd, len(info), ctypes.addressof(info)))
    kind, _, key_size, value_size, entries, flags = struct.unpack_from("<6I", info.raw)
    return kind, key_size, value_size, entries, flags


def load_program(kind: int, instructions: bytes, name: str, attach_type: int = 0) -> int:
    """Descriptor of a loaded program; ``name`` up to 15 characters.  Raises :class:`Refused`."""
    code = ctypes.create_string_buffer(instructions, len(instructions))
    license = ctypes.create_string_buffer(b"GPL")

    def load(log: Any) -> int:
        attr = struct.pack(
            "<IIQQIIQII16sII",
            kind, len(instructions) // 8, ctypes.addressof(code), ctypes.addressof(license),
            1 if log else 0, len(log) if log else 0, ctypes.addressof(log) if log else 0,
            0, 0, name.encode(), 0, attach_type,
        )  # fmt: skip
        fd, _ = bpf(PROG_LOAD, attr)
        os.set_inheritable(fd, False)
        return fd

    try:
        return load(None)
    except OSError as e:
        code_of_first = e.errno or 0
    # Loading takes a few times as long when it tells why, so only what failed is asked to.
    log = ctypes.create_string_buffer(_LOG_SIZE)
    try:
        return load(log)
    except OSError:
        raise Refused(code_of_first, log.value.decode(errors="replace")) from None


def open_raw_tracepoint(name: str, program: int) -> int:
    """Attach a program to a raw tracepoint; closing the returned descriptor detaches it."""
    text = ctypes.create_string_buffer(name.encode())
    fd, _ = bpf(RAW_TRACEPOINT_OPEN, struct.pack("<QII", ctypes.addressof(text), program, 0))
    os.set_inheritable(fd, False)
    return fd


def _perf_event(attr: bytes, cpu: int) -> int:
    """perf_event_open(2) of every process on ``cpu``; ``attr`` is filled up with zeros."""
    return _call(
        1,
        ctypes.create_string_buffer(attr.ljust(_PERF_ATTR, b"\0"), _PERF_ATTR),
        ctypes.c_int(-1),
        ctypes.c_int(cpu),
        ctypes.c_int(-1),
        ctypes.c_ulong(_PERF_FLAG_FD_CLOEXEC),
    )


def open_cpu_clock(cpu: int, period: int, program: int) -> int:
    """Run a program on ``cpu`` every ``period`` ns; closing the descriptor ends it."""
    attr = struct.pack("<IIQQ", PERF_TYPE_SOFTWARE, _PERF_ATTR, PERF_COUNT_SW_CPU_CLOCK, period)
    fd = _perf_event(attr, cpu)
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


def open_uprobes(
    program: int, file: int, offsets: Sequence[int], cookies: Sequence[int], returns: bool
) -> int:
    """Run a program at each of ``offsets`` in a file, in every process that maps it (Linux 6.6).

    The program was loaded with attach type UPROBE_MULTI.  Closing the descriptor detaches it; that
    takes one grace period, however many places there are.
    """
    n = len(offsets)
    path = ctypes.create_string_buffer(_path(file))
    at, told = (ctypes.c_uint64 * n)(*offsets), (ctypes.c_uint64 * n)(*cookies)
    attr = struct.pack(
        "<IIIIQQQQIIII",
        program, 0, UPROBE_MULTI, 0, ctypes.addressof(path), ctypes.addressof(at), 0,
        ctypes.addressof(told), n, int(returns), 0, 0,
    )  # fmt: skip
    fd, _ = bpf(LINK_CREATE, attr)
    os.set_inheritable(fd, False)
    return fd


def open_uprobe(program: int, file: int, offset: int, cookie: int, returns: bool) -> int:
    """The same for one place, before Linux 6.6: a link on a perf event (5.15)."""
    with open(UPROBE_EVENTS) as f:
        kind = int(f.read())
    path = ctypes.create_string_buffer(_path(file))
    # config 1: on return (/sys/bus/event_source/devices/uprobe/format/retprobe); from byte 56 on
    # config1, the path, and config2, the offset.
    attr = struct.pack("<IIQ", kind, _PERF_ATTR, int(returns)).ljust(56, b"\0")
    event = _perf_event(attr + struct.pack("<QQ", ctypes.addressof(path), offset), 0)
    try:
        link = struct.pack("<IIIIQQQ", program, event, PERF_EVENT, 0, cookie, 0, 0)
        fd, _ = bpf(LINK_CREATE, link)
    finally:
        os.close(event)  # the link holds it
    os.set_inheritable(fd, False)
    return fd


def open_mark(file: int, offset: int) -> int:
    """Have a breakpoint sit at ``offset`` in a file, in every process that maps it; nothing runs
    there.  Closing the descriptor takes it away."""
    with open(UPROBE_EVENTS) as f:
        kind = int(f.read())
    path = ctypes.create_string_buffer(_path(file))
    # As in open_uprobe; bit 0 of the flags: disabled.  The breakpoint sits there all the same.
    attr = struct.pack("<IIQ", kind, _PERF_ATTR, 0).ljust(40, b"\0") + struct.pack("<QQ", 1, 0)
    return _perf_event(attr + struct.pack("<QQ", ctypes.addressof(path), offset), 0)


def _path(file: int) -> bytes:
    """A path that leads to the very file which a descriptor is open on, wherever it lies."""
    return f"/proc/self/fd/{file}".encode()


def has_uprobes() -> bool:
    """Whether this kernel has uprobes (CONFIG_UPROBE_EVENTS)."""
    return os.path.exists(UPROBE_EVENTS)


def has_cookies() -> bool:
    """Whether programs can be told where they run (bpf_get_attach_cookie, Linux 5.15)."""
    try:
        os.close(load_program(KPROBE, _COOKIE + _RETURN_0, "try"))
    except OSError:
        return False
    return True


def has_uprobe_multi() -> bool:
    """Whether :func:`open_uprobes` works: the kernel gets as far as to refuse a folder as file."""
    try:
        program = load_program(KPROBE, _RETURN_0, "try", UPROBE_MULTI)
    except OSError:
        return False
    folder = os.open("/", os.O_PATH | os.O_DIRECTORY)
    try:
        os.close(open_uprobes(program, folder, [0], [0], returns=False))
    except OSError as e:
        return e.errno == errno.EBADF
    finally:
        os.close(folder)
        os.close(program)
    return False


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
