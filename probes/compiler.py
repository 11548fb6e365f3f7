"""Compile BPF programs with bcc, in a process of its own.

``python -m dsprobe.probes.compiler`` reads one job (JSON) from standard input, compiles all units
as one module (maps are shared, one clang run), and writes the module to standard output.  Then it
ends, and LLVM's 100 MB with it.  A unit that does not compile is reported with its reason and the
rest goes on.

Importing this module does not import bcc: the parent uses :class:`Compiler`.
"""

from __future__ import annotations

import ctypes
import json
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

from dsprobe.probes import syscalls
from dsprobe.probes.module import MapDefinition, Module, reason, renumbered

HERE = Path(__file__).resolve().parent
COMPILE_SECONDS = 60.0
_PR_SET_PDEATHSIG = 1


class Compiler:
    """One such process.  :meth:`cancel` may be called from another thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._cancelled = False
        self.child: subprocess.Popen[bytes] | None = None

    def compile(self, job: dict[str, Any]) -> Module:
        """``job``: ``common`` (C text), ``cflags``, ``units``: [{name, text, functions}].

        Raises OSError or ValueError, which say how it ended, where it ends without a module.
        """
        with self._lock:
            if self._cancelled:
                raise OSError("told to end")
            isolated = ["-I"] if sys.flags.isolated else []
            self.child = child = subprocess.Popen(
                [sys.executable, *isolated, "-m", "dsprobe.probes.compiler"],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                cwd="/",  # -m puts the working directory, which may be anybody's, in front
                env={**os.environ, "OPENBLAS_NUM_THREADS": "1"},  # numpy's would spin meanwhile
            )
        try:
            answer, _ = child.communicate(json.dumps(job).encode(), COMPILE_SECONDS)
        except subprocess.TimeoutExpired:
            raise TimeoutError(f"it took longer than {COMPILE_SECONDS:g} s") from None
        finally:
            child.kill()
            child.communicate()
        code = child.returncode
        if code:
            how = f"was killed by signal {-code}" if code < 0 else f"ended with code {code}"
            raise OSError(f"the compiler {how}")
        return Module.unpack(answer)

    def cancel(self) -> None:
        """End it, and start none any more."""
        with self._lock:
            self._cancelled = True
            if self.child:
                self.child.kill()


class _Log:
    """What native code writes to standard error while compiling."""

    def __init__(self) -> None:
        self._fd = os.memfd_create("log")
        os.dup2(self._fd, 2)
        os.dup2(self._fd, 1)

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
            errors[unit["name"]] = "its program does not compile here: " + reason(
                log.take() or str(e)
            )
    return (_compile(job, good) if good else None), good, errors


def _maps(bpf: Any, lib: Any) -> dict[int, MapDefinition]:
    """The module's maps by descriptor."""
    module = ctypes.c_void_p(bpf.module if isinstance(bpf.module, int) else bpf.module.value)
    size = ctypes.c_size_t
    lib.bpf_num_tables.restype = size
    lib.bpf_table_name.restype = ctypes.c_char_p
    maps = {}
    for i in range(lib.bpf_num_tables(module)):
        fd = lib.bpf_table_fd_id(module, size(i))
        maps[fd] = MapDefinition(
            lib.bpf_table_name(module, size(i)).decode(), *syscalls.map_info(fd)
        )
    return maps


def run(job: dict[str, Any]) -> Module:
    log = _Log()
    try:
        from bcc import BPF  # noqa: F401
        from bcc.libbcc import lib
    except ImportError as e:
        why = f"bcc cannot be imported ({e}); install python3-bpfcc (apt) or python3-bcc (dnf)"
        return Module((), {}, {u["name"]: why for u in job["units"]})
    bpf, units, errors = _survivors(job, log)
    if bpf is None:
        return Module((), {}, errors)
    maps = _maps(bpf, lib)
    places = {fd: i for i, fd in enumerate(maps)}
    programs = {
        name: renumbered(bpf.dump_func(name), places)
        for unit in units for name in unit["functions"]
    }  # fmt: skip
    return Module(tuple(maps.values()), programs, errors)


def main() -> None:
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)  # nobody would take the answer
    job = json.load(sys.stdin)
    os.environ["BCC_KERNEL_SOURCE"] = str(HERE)
    answer = os.dup(1)  # bcc writes to 1 and 2
    with open(answer, "wb") as f:
        f.write(run(job).pack())
    os._exit(0)  # bcc's clean-up has nothing to detach, and LLVM's takes its time


if __name__ == "__main__":
    main()
