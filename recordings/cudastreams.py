"""The streams of processes that use CUDA; part of :mod:`dsprobe.recordings.streams`.

Rows name a process and a thread by numbers of the session (``meta.process``, ``meta.thread``), as
PIDs and TIDs are used again.  A stack is a number too; ``meta.stack`` lists its frames.
"""

from __future__ import annotations

from dsprobe.recordings.model import Field, Stream

MEMORY_KINDS = (
    "device", "pitch", "managed", "async", "pool", "physical", "mapped", "reserved", "host",
    "registered", "ipc",
)  # fmt: skip
"""What was allocated: cuMemAlloc, cuMemAllocPitch, cuMemAllocManaged, cuMemAllocAsync,
cuMemAllocFromPoolAsync, cuMemCreate, cuMemMap, cuMemAddressReserve, cuMemHostAlloc and
cuMemAllocHost, cuMemHostRegister, cuIpcOpenMemHandle."""

ON_DEVICE = MEMORY_KINDS[:6]
"""Kinds that take memory of a device; mapped and reserved are address space only, the rest is
memory of the host or of another process."""

ALLOC_OPS = ("alloc", "free", "release")
"""alloc and free: a call; release: memory that went with its context."""

COPIES = ("none", "HtoD", "DtoH", "DtoD", "HtoH", "peer", "any")
"""Direction of a copy; "any" is decided by the addresses, which only the driver knows."""

CALL_KINDS = ("other", "sync", "copy", "set", "graph", "module")
FRAME_KINDS = ("python", "native", "status")
"""A frame of kind status is a sentence on what is missing there."""

LAUNCH_SLOTS = 32  # as HIST_SLOTS

_T = Field("t", "<u8", "ns", "CLOCK_MONOTONIC")
_DT = Field("dt", "<u8", "ns", "length of the interval that ends at t")
_PROCESS = Field("process", "<u4", "id", "process", ref="meta.process")
_THREAD = Field("thread", "<u4", "id", "thread; 0 where it is not known", ref="meta.thread")
_STACK = Field("stack", "<u4", "id", "stack; 0 where none was taken", ref="meta.stack")
_FUNCTION = Field("function", "<u4", "id", "CUDA driver function, as exported", ref="meta.string")
_STREAM = Field("stream", "<u8", "handle", "CUstream; 0 and 1 are the legacy default stream, 2 the"
                " thread's own (a call with suffix _ptsz or _ptds says 2 for 0)")  # fmt: skip
_KIND = Field("kind", "u1", "enum", "what kind of memory", names=MEMORY_KINDS)
_RESULT = Field("result", "<i4", "CUresult", "what the call returned; 0 is success")


def _count(name: str, doc: str, type: str = "<u8") -> Field:
    return Field(name, type, "count", doc)


def _bytes(name: str, doc: str) -> Field:
    return Field(name, "<u8", "bytes", doc)


def _time(name: str, doc: str) -> Field:
    return Field(name, "<u8", "ns", doc)


def _text(name: str, doc: str) -> Field:
    return Field(name, "str", "text", doc)


GPU_ALLOC = Stream(
    "gpu.alloc",
    "Single allocations and frees, failed ones too, while they are few enough; gpu.memory has all.",
    "uprobes on the return of the allocating and freeing functions of libcuda",
    (
        _T,
        _PROCESS,
        _THREAD,
        _STACK,
        Field("op", "u1", "enum", "what was done", names=ALLOC_OPS),
        _KIND,
        _RESULT,
        _bytes("bytes", "size; of a free that of the block, 0 where that was never seen"),
        Field("address", "<u8", "address", "address, or handle of physical memory"),
        _FUNCTION,
    ),
)

GPU_MEMORY = Stream(
    "gpu.memory",
    "Memory per interval, process and kind, since probes were attached; exact. A row at each change"
    " and at least once a second, a last one with nothing live when a process ends.",
    "uprobes on libcuda, summed up in the kernel",
    (
        _T,
        _DT,
        _PROCESS,
        _KIND,
        _bytes("live", "allocated and not yet freed at t, as asked for"),
        _count("blocks", "allocations not yet freed at t"),
        _count("allocs", "allocations that succeeded in the interval"),
        _count("frees", "frees that succeeded, and blocks that went with their context or process"),
        _bytes("allocated", "bytes allocated in the interval"),
        _bytes("freed", "bytes freed in the interval"),
        _count("failed", "allocations and frees that failed"),
        _count("unknown", "frees of blocks from before the attach, or that found no place"),
        _count("shed", "calls of the interval without a row in gpu.alloc, to save cost"),
        _count("reclaimed", "of frees blocks that went with their context or process"),
        _bytes("reclaimed_bytes", "of freed those bytes"),
    ),
)

GPU_STACK = Stream(
    "gpu.stack",
    "Memory by the stack that allocated it. A row for each stack that changed once a second, for"
    " every live one every ten seconds: those of the last ten tell the state.",
    "uprobes on libcuda, summed up in the kernel",
    (
        _T,
        _DT,
        _PROCESS,
        _STACK,
        _KIND,
        _bytes("live", "allocated and not yet freed at t"),
        _count("blocks", "allocations not yet freed at t"),
        _count("allocs", "allocations in the interval"),
        _count("frees", "frees of them in the interval"),
        _bytes("allocated", "bytes allocated in the interval"),
        _bytes("freed", "bytes freed in the interval"),
        _time("born", "mean time of allocation of what is live; 0 where nothing is"),
    ),
)

GPU_AGE = Stream(
    "gpu.age",
    "Live memory by age, every ten seconds.",
    "the kernel's table of live allocations",
    (
        _T,
        _DT,
        _PROCESS,
        _KIND,
        Field("age", "u1", "log2 s", "n: allocated 2**n to 2**(n+1) s ago, 0 also less than that"),
        _bytes("live", "bytes of that age"),
        _count("blocks", "allocations of that age"),
    ),
)

CUDA_CALLS = Stream(
    "cuda.calls",
    "Calls per interval, process and function; exact. Calls that libcuda makes of itself are not"
    " counted. No row for a function that was not called.",
    "uprobes on libcuda, summed up in the kernel",
    (
        _T,
        _DT,
        _PROCESS,
        _FUNCTION,
        Field("kind", "u1", "enum", "what kind of call", names=CALL_KINDS),
        Field("copy", "u1", "enum", "direction", names=COPIES),
        _count("count", "calls begun"),
        _count("failed", "calls that returned an error"),
        _time(
            "busy",
            "time inside calls, of those that go on since long up to t; 0 where returns"
            " are not traced",
        ),
        _bytes("bytes", "bytes copied, set or allocated by calls that returned 0"),
        Field("hist", "<u4", "count", "log2 histogram of durations (ns)", LAUNCH_SLOTS),
    ),
)

CUDA_CALL = Stream(
    "cuda.call",
    "Single calls that can block: the slow ones, and others while they are few enough.",
    "uprobes on entry and return",
    (
        _T,
        _time("duration", "how long the call took; it returned at t"),
        _PROCESS,
        _THREAD,
        _STACK,
        _FUNCTION,
        Field("kind", "u1", "enum", "what kind of call", names=CALL_KINDS),
        Field("copy", "u1", "enum", "direction", names=COPIES),
        _RESULT,
        _STREAM,
        _bytes("bytes", "bytes copied or set"),
    ),
)

CUDA_OPEN = Stream(
    "cuda.open",
    "Calls that had been going on for 0.1 s or more at t, once a second until they return.",
    "uprobes on entry",
    (_T, _PROCESS, _THREAD, _FUNCTION, _time("since", "when the call began")),
)

CUDA_LAUNCH = Stream(
    "cuda.launch",
    "Single launches, while they are few enough; cuda.thread counts all.",
    "uprobes on entry of the launching functions of libcuda",
    (
        _T,
        _PROCESS,
        _THREAD,
        _FUNCTION,
        Field("kernel", "<u4", "id", "kernel; 0 for a graph", ref="meta.kernel"),
        _STREAM,
        Field("grid", "<u4", "blocks", "grid dimensions x, y, z; 0 for a graph", 3),
        Field("block", "<u4", "threads", "block dimensions x, y, z", 3),
        Field("shared", "<u4", "bytes", "dynamic shared memory"),
    ),
)

CUDA_THREAD = Stream(
    "cuda.thread",
    "Launches per interval and thread; exact. No row for a thread that launched nothing.",
    "uprobes on entry, summed up in the kernel",
    (
        _T,
        _DT,
        _PROCESS,
        _THREAD,
        _count("count", "launches"),
        _count("shed", "launches without a row in cuda.launch, to save cost"),
        Field("hist", "<u4", "count", "log2 histogram of the time since the launch before (ns)",
              LAUNCH_SLOTS),
        _time("longest", "longest such time that ended in the interval"),
        _time("longest_end", "when that one ended"),
        Field("within", "<u4", "id", "function in which it spent most of that time, 0: in none",
              ref="meta.string"),
        _time("within_time", "how much of it was spent in that call"),
    ),
)  # fmt: skip

CUDA_STREAM = Stream(
    "cuda.stream",
    "Launches per interval and CUDA stream; exact. No row for a stream without a launch.",
    "uprobes on entry, summed up in the kernel",
    (
        _T,
        _DT,
        _PROCESS,
        Field("thread", "<u4", "id", "thread, for a thread's own default stream; else 0",
              ref="meta.thread"),
        _STREAM,
        _count("count", "launches"),
        Field("hist", "<u4", "count", "log2 histogram of the time since the launch before (ns)",
              LAUNCH_SLOTS),
        _time("longest", "longest such time that ended in the interval"),
    ),
)  # fmt: skip

META_PROCESS = Stream(
    "meta.process",
    "Processes that use CUDA. The last row of an id holds.",
    "/proc/PID, uprobes on libcuda",
    (
        _T,
        Field("id", "<u4", "id", "number other streams use; never used again"),
        Field("pid", "<u4", "pid", "PID on the host"),
        Field("ns_pid", "<u4", "pid", "PID in its own PID namespace"),
        Field("parent", "<u4", "pid", "PID of its parent"),
        Field("uid", "<u4", "uid", "its user"),
        _time("ended", "when it ended or became another program; 0 while it lives"),
        _text("comm", "name of its main thread"),
        _text("command", "command line"),
        _text("cgroup", "its control group"),
        _text("container", "id of its container, where the control group tells"),
        _text("pod", "UID of its Kubernetes pod, where the control group tells"),
        _text("library", "driver library it maps"),
        _text("driver", "version of that library"),
        _text("python", "version of its Python, or why its Python stacks cannot be read"),
        _time("late", "when it was first seen, if it used CUDA before; 0: seen from cuInit on"),
        _time("seen", "when its first traced call was seen"),
    ),
)

META_THREAD = Stream(
    "meta.thread",
    "Threads that called CUDA. The last row of an id holds.",
    "uprobes on libcuda",
    (
        _T,
        Field("id", "<u4", "id", "number other streams use; never used again"),
        _PROCESS,
        Field("tid", "<u4", "pid", "TID on the host"),
        Field("ns_tid", "<u4", "pid", "TID in its own PID namespace"),
        _text("comm", "its name"),
    ),
)

META_KERNEL = Stream(
    "meta.kernel",
    "Kernels by the handles that launches name. The last row of an id holds.",
    "cuModuleGetFunction, cuLibraryGetKernel, cuKernelGetFunction",
    (
        _T,
        Field("id", "<u4", "id", "number other streams use; never used again"),
        _PROCESS,
        Field("handle", "<u8", "handle", "CUfunction or CUkernel"),
        _text("name", "its name; empty where the handle was given before probes were attached"),
    ),
)

META_STACK = Stream(
    "meta.stack",
    "Stacks: a row for each frame.",
    "Python's frames and the stack pointer, read by BPF; code and symbols of the process",
    (
        _T,
        Field("id", "<u4", "id", "number other streams use; never used again"),
        Field("depth", "<u2", "count", "0 for the innermost frame"),
        Field("frame", "<u4", "id", "the frame", ref="meta.frame"),
    ),
)

META_FRAME = Stream(
    "meta.frame",
    "Frames of stacks.",
    "code objects and line tables of Python; symbol tables of ELF files",
    (
        _T,
        Field("id", "<u4", "id", "number other streams use; never used again"),
        Field("kind", "u1", "enum", "whose frame", names=FRAME_KINDS),
        _text("function", "qualified name, symbol or sentence; empty where the symbol is unknown"),
        _text("file", "source file of a Python frame"),
        Field("line", "<u4", "line", "line in it; 0 where there is none"),
        _text("module", "file of a native frame"),
        Field("offset", "<u8", "bytes", "address of a native frame as in that file"),
        _text("build_id", "build id of that file"),
    ),
)

META_PLACEMENT = Stream(
    "meta.placement",
    "Where in each function of each driver library the probes sit. The last row holds.",
    "the library's code",
    (
        _T,
        _text("library", "path of the library as its process sees it"),
        _text("build_id", "its build id"),
        _text("function", "exported function"),
        Field("offset", "<u4", "bytes", "distance of the probe from the function's start"),
        Field("attached", "u1", "bool", "whether a probe is there"),
        Field("cheap", "u1", "bool", "whether the kernel emulates the instruction there"),
        _text("instruction", "the instruction it sits on"),
        _text("why", "why it is not cheap, or not attached"),
    ),
)

CUDA_STREAMS = (
    GPU_ALLOC, GPU_MEMORY, GPU_STACK, GPU_AGE, CUDA_CALLS, CUDA_CALL, CUDA_OPEN, CUDA_LAUNCH,
    CUDA_THREAD, CUDA_STREAM, META_PROCESS, META_THREAD, META_KERNEL, META_STACK, META_FRAME,
    META_PLACEMENT,
)  # fmt: skip
