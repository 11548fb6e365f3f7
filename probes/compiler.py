"""Compile and load BPF programs with bcc, in a process of its own.

``python -m dsprobe.probes.compiler FD`` reads one job (JSON) from the socket FD, compiles all units
as one module (maps are shared, one clang run), loads each program, and sends the descriptors of
programs and maps back.  Then it ends, and LLVM's 100 MB with it.  A unit that does not compile, or
a program that the verifier refuses, is reported with its reason and the rest goes on.

Importing this module does not import bcc: the parent uses :func:`send_job` and
:func:`receive_result`.
"""

from __future__ import annotations

import ctypes
import json
import os
import re
import signal
import socket
import sys
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
_FDS_PER_MESSAGE = 100
_MESSAGE = 1 << 20
_PR_SET_PDEATHSIG = 1

# bcc's names of the program types (BPF.RAW_TRACEPOINT ...) for each kind of attachment.
_TYPES = {"raw_tracepoint": "RAW_TRACEPOINT", "cpu_clock": "PERF_EVENT"}


def send_job(sock: socket.socket, job: dict[str, Any]) -> None:
    """``common`` (C text), ``cflags``, ``units``: [{probe, text, programs: [[name, kind]]}]."""
    sock.sendall(json.dumps(job).encode())
    sock.shutdown(socket.SHUT_WR)


def receive_result(sock: socket.socket) -> dict[str, Any]:
    """The compiler's answer, with ``fd`` in place in each program and map.

    ``errors`` {probe: reason}, ``programs`` {name: {fd} or {error}}, ``maps`` {name: {fd, key_size,
    leaf_size, entries}}.  Raises OSError or EOFError when the compiler ends without one.
    """
    fds: list[int] = []
    try:
        return _receive(sock, fds)
    except BaseException:
        for fd in fds:
            os.close(fd)
        raise


def _receive(sock: socket.socket, fds: list[int]) -> dict[str, Any]:
    """Appends to ``fds`` what comes, whatever happens then."""
    while True:
        data, more, _, _ = socket.recv_fds(sock, _MESSAGE, _FDS_PER_MESSAGE)
        fds += more
        for fd in more:
            os.set_inheritable(fd, False)
        if not data:
            raise EOFError("the compiler ended without an answer")
        if data != b"+":
            break
    while not data.endswith(b"\n"):
        rest = sock.recv(_MESSAGE)
        if not rest:
            raise EOFError("the compiler's answer was cut short")
        data += rest
    result: dict[str, Any] = json.loads(data)
    for entry in (*result["programs"].values(), *result["maps"].values()):
        if "fd" in entry:
            entry["fd"] = fds[entry["fd"]]
    return result


def _reason(log: str) -> str:
    """The line of a clang or verifier log that tells the most."""
    for pattern in (r".*\berror: (.*)", r"^(?!processed|verification|libbpf)(.*\S)\s*\Z"):
        found = re.findall(pattern, log.strip(), re.MULTILINE)
        if found:
            return str(found[-1] if "Z" in pattern else found[0]).strip()[:300]
    lines = [x for x in log.splitlines() if x and not x.startswith(("processed", "verification"))]
    return lines[-1][:300] if lines else "no reason given"


class _Log:
    """What native code writes to standard error while compiling and loading."""

    def __init__(self) -> None:
        self._fd = os.memfd_create("log")
        os.dup2(self._fd, 2)

    def take(self) -> str:
        size = os.fstat(self._fd).st_size
        text = os.pread(self._fd, min(size, 1 << 20), max(0, size - (1 << 20)))
        os.ftruncate(self._fd, 0)
        os.lseek(self._fd, 0, os.SEEK_SET)
        return text.decode(errors="replace")


def _compile(job: dict[str, Any], units: list[dict[str, Any]]) -> Any:
    from bcc import BPF

    text = job["common"] + "".join(u["text"] for u in units)
    return BPF(text=text, cflags=job["cflags"])


def _survivors(job: dict[str, Any], log: _Log) -> tuple[Any, list[dict[str, Any]], dict[str, str]]:
    """The module of all units that compile, those units, and why the others do not."""
    errors: dict[str, str] = {}
    units = job["units"]
    try:
        return _compile(job, units), units, errors
    except Exception:  # bcc raises Exception itself
        log.take()
    good = []
    for unit in units:
        try:
            _compile(job, [unit])
            good.append(unit)
        except Exception as e:
            errors[unit["probe"]] = "its program does not compile here: " + _reason(
                log.take() or str(e)
            )
    return (_compile(job, good) if good else None), good, errors


def _maps(bpf: Any, lib: Any) -> dict[str, tuple[int, dict[str, int]]]:
    module = ctypes.c_void_p(bpf.module if isinstance(bpf.module, int) else bpf.module.value)
    size = ctypes.c_size_t
    for name in ("bpf_table_key_size_id", "bpf_table_leaf_size_id", "bpf_num_tables",
                 "bpf_table_max_entries_id"):  # fmt: skip
        getattr(lib, name).restype = size
    lib.bpf_table_name.restype = ctypes.c_char_p
    maps = {}
    for i in range(lib.bpf_num_tables(module)):
        i_ = size(i)
        maps[lib.bpf_table_name(module, i_).decode()] = (
            lib.bpf_table_fd_id(module, i_),
            {
                "key_size": lib.bpf_table_key_size_id(module, i_),
                "leaf_size": lib.bpf_table_leaf_size_id(module, i_),
                "entries": lib.bpf_table_max_entries_id(module, i_),
            },
        )
    return maps


def run(job: dict[str, Any]) -> tuple[dict[str, Any], list[int]]:
    """Compile and load; (result with ``fd`` as an index, descriptors)."""
    log = _Log()
    try:
        from bcc import BPF
        from bcc.libbcc import lib
    except ImportError as e:
        reason = f"bcc cannot be imported ({e}); install python3-bpfcc (apt) or python3-bcc (dnf)"
        return {"errors": {u["probe"]: reason for u in job["units"]},
                "programs": {}, "maps": {}}, []  # fmt: skip
    bpf, units, errors = _survivors(job, log)
    fds: list[int] = []
    programs: dict[str, dict[str, Any]] = {}
    for unit in units:
        for name, kind in unit["programs"]:
            try:
                fd = bpf.load_func(name, getattr(BPF, _TYPES[kind])).fd
            except Exception as e:
                programs[name] = {"error": _reason(log.take() or str(e))}
                continue
            programs[name] = {"fd": len(fds)}
            fds.append(fd)
    maps: dict[str, dict[str, Any]] = {}
    for name, (fd, shape) in (_maps(bpf, lib) if bpf is not None else {}).items():
        maps[name] = {"fd": len(fds), **shape}
        fds.append(fd)
    return {"errors": errors, "programs": programs, "maps": maps}, fds


def main() -> None:
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)  # nobody would take the answer
    sock = socket.socket(fileno=int(sys.argv[1]))
    job = json.loads(b"".join(iter(lambda: sock.recv(_MESSAGE), b"")))
    os.environ["BCC_KERNEL_SOURCE"] = str(HERE)
    result, fds = run(job)
    for i in range(0, len(fds), _FDS_PER_MESSAGE):
        socket.send_fds(sock, [b"+"], fds[i : i + _FDS_PER_MESSAGE])
        # Descriptors queue only while the receiver takes them; one byte back keeps the pace.
    sock.sendall(json.dumps(result).encode() + b"\n")
    sock.close()
    os._exit(0)  # bcc's clean-up has nothing to detach, and LLVM's takes its time


if __name__ == "__main__":
    main()
