"""The driver API from Python by ctypes: what the Python workloads and the tests call.

Standard library only, and any Python from 3.10 on: it runs inside targets.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import Any

U64 = ctypes.c_uint64
OUT_OF_MEMORY, NOT_READY = 2, 600

_CALLBACK = ctypes.CFUNCTYPE(None, ctypes.c_uint32, ctypes.c_uint64, ctypes.POINTER(U64))


class Out:
    """An argument that the call fills: pass one, read ``value``."""

    def __init__(self) -> None:
        self.cell = U64(0)

    @property
    def value(self) -> int:
        return self.cell.value


class IpcHandle(ctypes.Structure):
    """CUipcMemHandle: 64 bytes, passed by value."""

    _fields_ = [("bytes", ctypes.c_char * 64)]


class CudaError(Exception):
    """A call returned ``code``."""

    def __init__(self, name: str, code: int) -> None:
        super().__init__(f"{name} returned {code}")
        self.code = code


def on_device(device: int = 0) -> ctypes.Array[ctypes.c_int]:
    """CUmemAllocationProp of pinned memory on a device, large enough for CUmemPoolProps."""
    return (ctypes.c_int * 32)(1, 0, 1, device)


class Driver:
    """``libcuda.so.1`` as the loader finds it, or the one at ``path``."""

    def __init__(self, path: str = "libcuda.so.1") -> None:
        self.lib = ctypes.CDLL(path)
        self._keep: Any = None

    def call(self, name: str, *args: Any) -> int:
        """Result of ``name(*args)``: integers are passed in 64 bits, :class:`Out` by reference."""
        return int(getattr(self.lib, name)(*map(_word, args)))

    def ok(self, name: str, *args: Any) -> None:
        """:meth:`call`, or CudaError."""
        code = self.call(name, *args)
        if code:
            raise CudaError(name, code)

    def get(self, name: str, *args: Any) -> int:
        """:meth:`ok` with an :class:`Out` before ``args``; its value."""
        out = Out()
        self.ok(name, out, *args)
        return out.value

    def start(self, device: int = 0) -> int:
        """Initialise and make the primary context current in this thread; the context."""
        self.ok("cuInit", 0)
        ctx = self.get("cuDevicePrimaryCtxRetain", device)
        self.ok("cuCtxSetCurrent", ctx)
        return ctx

    def kernel(self, name: str) -> int:
        """A CUfunction of a module of its own."""
        module = self.get("cuModuleLoadData", b"image")
        return self.get("cuModuleGetFunction", module, name.encode())

    def launch(self, function: int, stream: int = 0, grid: int = 1, block: int = 32) -> None:
        self.ok("cuLaunchKernel", function, grid, 1, 1, block, 1, 1, 0, stream, 0, 0)

    def on_call(self, f: Callable[[str, int, list[int]], None]) -> None:
        """Have ``f(symbol, begun, first six arguments)`` called inside each call that allocates,
        frees or can block, in the calling thread.  Simulated driver only."""

        def told(symbol: int, begun: int, args: Any) -> None:
            f(self.lib.simgpu_symbol(symbol).decode(), begun, args)

        self.lib.simgpu_symbol.restype = ctypes.c_char_p
        self._keep = _CALLBACK(told)
        self.lib.simgpu_on_call(self._keep)


def _word(arg: Any) -> Any:
    if isinstance(arg, Out):
        return ctypes.byref(arg.cell)
    if isinstance(arg, int):
        return U64(arg & 0xFFFFFFFFFFFFFFFF)
    return arg  # bytes, arrays and structs go as ctypes passes them
