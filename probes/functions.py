"""Functions of the CUDA driver API that are traced, and what their arguments are.

A function has entries by version (``_v2``: since CUDA 3.2 mostly, when sizes and addresses became
64 bits) and by default stream (``_ptsz``, ``_ptds``: stream 0 is the thread's own).  A library
exports those it has, and programs call those they were built for, so every one is looked up by
:func:`of_symbol`.  One whose layout is not known is not traced; :func:`unknown` names it.

Source: cuda.h and cudaTypedefs.h of CUDA 4 to 13; exports of the drivers.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass, replace
from enum import IntEnum, IntFlag

from dsprobe.recordings.cudastreams import CALL_KINDS, COPIES, MEMORY_KINDS


class Class(IntEnum):
    """As ``enum cuda_class`` in cuda.bpf.h: which programs serve it."""

    NONE = 0
    LAUNCH = 1
    CALL = 2
    ALLOC = 3
    FREE = 4
    CONTEXT = 5
    NAME = 6


class Form(IntEnum):
    """As ``enum cuda_form`` in cuda.bpf.h: how to read the arguments, within a class."""

    PLAIN = 0
    # launches
    KERNEL = 1  # f, grid x y z, block x y z, shared, stream
    CONFIG = 2  # CUlaunchConfig *, f
    MULTI = 3  # CUDA_LAUNCH_PARAMS *, count: each is a launch; the first one is told
    GRAPH = 4  # exec, stream
    OLD = 5  # f; the rest was set before
    # copies
    BOX2 = 6  # CUDA_MEMCPY2D *
    BOX3 = 7  # CUDA_MEMCPY3D *
    BATCH = 8  # ..., sizes, count
    BATCH3 = 9  # count, CUDA_MEMCPY3D_BATCH_OP *
    # memory
    PITCH = 10  # the pitch is put where argument 2 points
    RETAIN = 11  # another hold on what is at the address in argument 2
    IMPORT = 12  # memory of another process
    # contexts
    CREATE = 13
    DESTROY = 14
    PRIMARY_RETAIN = 15  # of the device in argument 2
    PRIMARY_RELEASE = 16
    PRIMARY_RESET = 17
    SET = 18
    PUSH = 19
    POP = 20
    # names
    NAMED = 21  # handle is put where argument 1 points, argument 3 is the name
    ALIAS = 22  # handle is put where argument 1 points, of the kernel in argument 2
    TOLD = 23  # name is put where argument 1 points, of the handle in argument 2
    GRID = 24  # f, grid x y, maybe a stream: a launch of old


class Flag(IntFlag):
    """As ``enum cuda_flag`` in cuda.bpf.h."""

    PER_THREAD = 1
    ENTRY_ONLY = 2
    UNCOUNTED = 4
    NARROW = 8


NO_FLAG = Flag(0)


@dataclass(frozen=True)
class Function:
    """``out`` ... ``stream`` are 1-based arguments, 0 for none: ``out`` points to where an address
    or handle is put, ``address`` is one; size is ``bytes`` times ``times`` << ``shift``."""

    name: str
    cls: Class
    form: Form = Form.PLAIN
    kind: str = "other"
    copy: str = "none"
    memory: str = "device"
    out: int = 0
    address: int = 0
    bytes: int = 0
    times: int = 0
    shift: int = 0
    stream: int = 0
    flags: Flag = NO_FLAG

    @property
    def codes(self) -> tuple[int, int, int]:
        """Numbers of kind, copy and memory in the streams."""
        return CALL_KINDS.index(self.kind), COPIES.index(self.copy), MEMORY_KINDS.index(self.memory)


_ONLY = ("",)
_BOTH = ("", "_v2")
_SPLIT = re.compile(r"(cu[A-Z]\w*?)(_v\d+)?(_ptsz|_ptds)?")
_TABLE: dict[str, Function] = {}


def _add(f: Function, versions: tuple[str, ...] = _ONLY, *, narrow: bool = False) -> None:
    """``versions`` share the layout; ``narrow``: the one without a suffix has 32-bit sizes."""
    for version in versions:
        old = narrow and not version
        _TABLE[f.name + version] = replace(f, flags=Flag.NARROW) if old else f


def _launch(name: str, form: Form, stream: int = 0) -> None:
    _add(Function(name, Class.LAUNCH, form, stream=stream))


def _call(name: str, kind: str = "other", versions: tuple[str, ...] = _ONLY,
          stream: int = 0) -> None:  # fmt: skip
    _add(Function(name, Class.CALL, kind=kind, stream=stream), versions)


def _copies(name: str, copy: str, bytes: int, *, wide: bool = False, both: bool = True) -> None:
    """A copy and its asynchronous sister, whose stream comes after the size.  ``wide``: newer than
    32-bit sizes, there is one version."""
    versions = _ONLY if wide else _BOTH
    base = Function(name, Class.CALL, kind="copy", copy=copy, bytes=bytes)
    _add(base, versions, narrow=not wide)
    if both:
        _add(replace(base, name=f"{name}Async", stream=bytes + 1), versions, narrow=not wide)


def _boxes(name: str, form: Form, versions: tuple[str, ...], copy: str = "any") -> None:
    base = Function(name, Class.CALL, form, kind="copy", copy=copy)
    _add(base, versions, narrow=len(versions) > 1)
    _add(replace(base, name=f"{name}Async", stream=2), versions, narrow=len(versions) > 1)


def _sets(name: str, shift: int, bytes: int, times: int = 0) -> None:
    """A memset; asynchronous ones came with 64-bit sizes."""
    base = Function(name, Class.CALL, kind="set", bytes=bytes, times=times, shift=shift)
    _add(base, _BOTH, narrow=True)
    _add(replace(base, name=f"{name}Async", stream=max(bytes, times) + 1))


def _alloc(name: str, memory: str, *, out: int = 1, address: int = 0, bytes: int = 2,
           stream: int = 0, form: Form = Form.PLAIN, times: int = 0,
           versions: tuple[str, ...] = _ONLY, narrow: bool = False) -> None:  # fmt: skip
    f = Function(name, Class.ALLOC, form, memory=memory, out=out, address=address, bytes=bytes,
                 times=times, stream=stream)  # fmt: skip
    _add(f, versions, narrow=narrow)


def _free(name: str, memory: str, *, bytes: int = 0, stream: int = 0,
          versions: tuple[str, ...] = _ONLY, narrow: bool = False) -> None:  # fmt: skip
    f = Function(name, Class.FREE, memory=memory, address=1, bytes=bytes, stream=stream)
    _add(f, versions, narrow=narrow)


def _context(name: str, form: Form, versions: tuple[str, ...] = _ONLY, *, out: int = 0,
             address: int = 0) -> None:  # fmt: skip
    _add(Function(name, Class.CONTEXT, form, out=out, address=address), versions)


# -- launches --------------------------------------------------------------------------------------
_launch("cuLaunchKernel", Form.KERNEL, 9)
_launch("cuLaunchCooperativeKernel", Form.KERNEL, 9)
_launch("cuLaunchKernelEx", Form.CONFIG)
_launch("cuLaunchCooperativeKernelMultiDevice", Form.MULTI)
_launch("cuGraphLaunch", Form.GRAPH, 2)
_launch("cuLaunch", Form.OLD)
_launch("cuLaunchGrid", Form.GRID)
_launch("cuLaunchGridAsync", Form.GRID, 4)

# -- calls that can block --------------------------------------------------------------------------
_call("cuInit")
_call("cuCtxSynchronize", "sync", _BOTH)
_call("cuStreamSynchronize", "sync", stream=1)
_call("cuEventSynchronize", "sync")

_copies("cuMemcpy", "any", 3, wide=True)
_copies("cuMemcpyPeer", "peer", 5, wide=True)
_copies("cuMemcpyHtoD", "HtoD", 3)
_copies("cuMemcpyDtoH", "DtoH", 3)
_copies("cuMemcpyDtoD", "DtoD", 3)
_copies("cuMemcpyHtoA", "HtoD", 4)
_copies("cuMemcpyAtoH", "DtoH", 4)
_copies("cuMemcpyDtoA", "DtoD", 4, both=False)
_copies("cuMemcpyAtoD", "DtoD", 4, both=False)
_copies("cuMemcpyAtoA", "DtoD", 5, both=False)
_boxes("cuMemcpy2D", Form.BOX2, _BOTH)
_add(Function("cuMemcpy2DUnaligned", Class.CALL, Form.BOX2, "copy", "any"), _BOTH, narrow=True)
_boxes("cuMemcpy3D", Form.BOX3, _BOTH)
_boxes("cuMemcpy3DPeer", Form.BOX3, _ONLY, "peer")
_batch = Function("cuMemcpyBatchAsync", Class.CALL, Form.BATCH, "copy", "any", bytes=3, times=4)
_add(replace(_batch, stream=9))
_add(replace(_batch, stream=8), ("_v2",))
_batch = Function("cuMemcpy3DBatchAsync", Class.CALL, Form.BATCH3, "copy", "any", bytes=2, times=1)
_add(replace(_batch, stream=5))
_add(replace(_batch, stream=4), ("_v2",))
_prefetch = Function("cuMemPrefetchAsync", Class.CALL, kind="copy", copy="any", bytes=2)
_add(replace(_prefetch, stream=4))
_add(replace(_prefetch, stream=5), ("_v2",))

for _bits in (8, 16, 32):
    _sets(f"cuMemsetD{_bits}", _bits // 16, 3)
    _sets(f"cuMemsetD2D{_bits}", _bits // 16, 4, 5)

_call("cuGraphInstantiate", "graph", _BOTH)
_call("cuGraphInstantiateWithFlags", "graph")
_call("cuGraphInstantiateWithParams", "graph")
_call("cuGraphUpload", "graph", stream=2)
_call("cuGraphExecUpdate", "graph", _BOTH)
for _name in ("cuModuleLoad", "cuModuleLoadData", "cuModuleLoadDataEx", "cuModuleLoadFatBinary",
              "cuModuleUnload", "cuLibraryLoadData", "cuLibraryLoadFromFile", "cuLibraryUnload",
              "cuLibraryGetModule", "cuLinkComplete", "cuFuncLoad"):  # fmt: skip
    _call(_name, "module")
_call("cuLinkAddData", "module", _BOTH)
_call("cuLinkAddFile", "module", _BOTH)

# -- memory ----------------------------------------------------------------------------------------
_alloc("cuMemAlloc", "device", versions=_BOTH, narrow=True)
_alloc("cuMemAllocPitch", "pitch", bytes=3, times=4, form=Form.PITCH, versions=_BOTH, narrow=True)
_alloc("cuMemAllocManaged", "managed")
_alloc("cuMemAllocAsync", "async", stream=3)
_alloc("cuMemAllocFromPoolAsync", "pool", stream=4)
_alloc("cuMemAllocHost", "host", versions=_BOTH, narrow=True)
_alloc("cuMemHostAlloc", "host")
_alloc("cuMemHostRegister", "registered", out=0, address=1, versions=_BOTH)
_alloc("cuMemAddressReserve", "reserved")
_alloc("cuMemCreate", "physical")
_alloc("cuMemMap", "mapped", out=0, address=1)
_alloc("cuMemRetainAllocationHandle", "physical", address=2, bytes=0, form=Form.RETAIN)
_alloc("cuMemImportFromShareableHandle", "physical", bytes=0, form=Form.IMPORT)
_alloc("cuIpcOpenMemHandle", "ipc", bytes=0, form=Form.IMPORT, versions=_BOTH)
_alloc("cuMemPoolImportPointer", "ipc", bytes=0, form=Form.IMPORT)
_free("cuMemFree", "device", versions=_BOTH, narrow=True)
_free("cuMemFreeAsync", "async", stream=2)
_free("cuMemFreeHost", "host")
_free("cuMemHostUnregister", "registered")
_free("cuMemAddressFree", "reserved", bytes=2)
_free("cuMemRelease", "physical")
_free("cuMemUnmap", "mapped", bytes=2)
_free("cuIpcCloseMemHandle", "ipc")

# -- contexts: memory goes with them ---------------------------------------------------------------
_context("cuCtxCreate", Form.CREATE, ("", "_v2", "_v3", "_v4"), out=1)
_context("cuCtxDestroy", Form.DESTROY, _BOTH, address=1)
_context("cuCtxDetach", Form.DESTROY, address=1)
_context("cuDevicePrimaryCtxRetain", Form.PRIMARY_RETAIN, out=1, address=2)
_context("cuDevicePrimaryCtxRelease", Form.PRIMARY_RELEASE, _BOTH, address=1)
_context("cuDevicePrimaryCtxReset", Form.PRIMARY_RESET, _BOTH, address=1)
_context("cuCtxSetCurrent", Form.SET, address=1)
_context("cuCtxPushCurrent", Form.PUSH, _BOTH, address=1)
_context("cuCtxPopCurrent", Form.POP, _BOTH, out=1)

# -- names of kernels ------------------------------------------------------------------------------
_add(Function("cuModuleGetFunction", Class.NAME, Form.NAMED, "module", out=1, address=3))
_add(Function("cuLibraryGetKernel", Class.NAME, Form.NAMED, "module", out=1, address=3))
_add(Function("cuKernelGetFunction", Class.NAME, Form.ALIAS, "module", out=1, address=2))
_add(Function("cuFuncGetName", Class.NAME, Form.TOLD, out=1, address=2))
_add(Function("cuKernelGetName", Class.NAME, Form.TOLD, out=1, address=2))


def of_symbol(symbol: str) -> Function | None:
    """What an exported ``symbol`` is; None where it is not traced, or its layout is not known."""
    match = _SPLIT.fullmatch(symbol)
    found = _TABLE.get(match[1] + (match[2] or "")) if match else None
    if found is None or match is None:
        return None
    flags = found.flags | (Flag.PER_THREAD if match[3] else NO_FLAG)
    return replace(found, name=symbol, flags=flags)


def services(symbol: str) -> list[Function]:
    """``symbol`` as each class of programs has it: the launch of a graph can block, too."""
    f = of_symbol(symbol)
    if f is None:
        return []
    if f.form == Form.GRAPH:
        return [f, replace(f, cls=Class.CALL, form=Form.PLAIN, kind="graph")]
    return [f]


def unknown(symbols: Iterable[str]) -> list[str]:
    """Those that are newer versions of traced functions, with a layout that is not known."""
    found = []
    for symbol in symbols:
        match = _SPLIT.fullmatch(symbol)
        if match and match[2] and match[1] in _BASES and of_symbol(symbol) is None:
            found.append(symbol)
    return sorted(found)


_BASES = {f.name for f in _TABLE.values()}
