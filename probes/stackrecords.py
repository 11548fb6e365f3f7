"""What stacks.bpf.h sends: its rings' records, and the numbers it has in common with Python.

Each record's stream has the name of the one whose rows it becomes: what a ring loses is said of
that.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from dsprobe.recordings.model import Field, Rows, Stream

FRAMES = 128
"""STACK_FRAMES: Python's frames of one stack that are kept."""
STACKS = 131_072
"""Stacks of living processes that are told apart."""
COPY = 12_288
"""Bytes of native stack that are copied at most."""

REGISTERS = ("ip", "sp", "bp", "bx", "r12", "r13", "r14", "r15")
"""What an unwinder needs: those that a function gives back as they were (System V ABI, x86-64)."""

NO_ROOM, RING_FULL, FIRST = 1, 2, 3
"""Numbers of stacks that could not be kept, and the first real one."""

WHOLE, NATIVE, UNSUPPORTED, UNKNOWN, UNREADABLE, DEEP, MANY_THREADS, CHANGED, SEVERAL = range(9)
"""How a walk of Python's frames ended."""

SENTENCES = {
    UNKNOWN: "Python not looked at yet",
    UNREADABLE: "lost: memory of the interpreter was not there",
    DEEP: f"deeper than {FRAMES} Python frames",
    MANY_THREADS: "lost: the thread is not among the first 512 of its process",
    CHANGED: "lost: frames changed while they were read",
    SEVERAL: "lost: the thread runs several interpreters",
}

_T = Field("t", "<u8", "ns", "CLOCK_MONOTONIC")
_PROCESS = Field("process", "<u4", "id", "the session's number of the process")
_PID = Field("pid", "<u4", "pid", "its PID in the agent's PID namespace")

STACK_RECORD = Stream(
    "meta.stack",
    "A stack seen for the first time.",
    "stacks.bpf.h",
    (
        _T,
        Field("id", "<u4", "id", "its number"),
        _PROCESS,
        _PID,
        Field("python", "<u4", "id", "number of the facts on its interpreter; 0: none yet"),
        Field("status", "<u4", "enum", "how the walk ended"),
        Field("count", "<u4", "count", "frames"),
        Field("ret", "<u8", "address", "where the call of the driver returns to"),
        Field("hash", "<u8", "hash", "of the frames"),
        Field("native", "<u8", "bytes", "from the stack pointer to the thread's control block"),
        Field("first", "<u8", "hash", "of the frames when they were hashed"),
        Field("second", "<u8", "hash", "and when they were written here; the same, or it is lost"),
        Field("frames", "<u8", "words", "code, instruction, signature and owner", 3 * FRAMES),
    ),
)

CODE_RECORD = Stream(
    "meta.frame",
    "What names a code object.",
    "stacks.bpf.h",
    (
        _T,
        Field("code", "<u8", "address", "the object"),
        _PROCESS,
        _PID,
        Field("signature", "<u4", "hash", "differs where another object lies there"),
        Field("python", "<u4", "id", "number of the facts on its interpreter"),
        Field("first", "<i4", "line", "co_firstlineno"),
        Field("whole", "<u4", "bytes", "length of the line table"),
        Field("file_size", "<u2", "bytes", "captured of the file name, 0: it was not there"),
        Field("name_size", "<u2", "bytes", "captured of the name"),
        Field("file_wide", "<u2", "bytes", "captured beyond that, for characters of several bytes"),
        Field("name_wide", "<u2", "bytes", "the same of the name"),
        Field("table_size", "<u2", "bytes", "captured of the line table"),
        Field("pad", "<u2", "none", "", 3),
        Field("file", "u1", "bytes", "string object", 1024),
        Field("name", "u1", "bytes", "string object", 1024),
        Field("table", "u1", "bytes", "line table", 2048),
    ),
)

NATIVE_RECORD = Stream(
    "meta.stack",
    "Registers and top of the native stack of a stack seen for the first time.",
    "stacks.bpf.h",
    (
        _T,
        Field("id", "<u4", "id", "its number"),
        _PROCESS,
        _PID,
        Field("size", "<u4", "bytes", "copied"),
        *(Field(r, "<u8", "word", "") for r in REGISTERS),
        Field("copy", "<u8", "words", "from sp on", COPY // 8),
    ),
)


@dataclass(frozen=True)
class Frame:
    """One of Python's frames, as captured."""

    code: int
    instr: int
    signature: int
    owner: int


def frames_of(record: Rows) -> Iterator[Frame]:
    """Those of one record of the ring cuda_stack, innermost first."""
    count = min(int(record["count"]), FRAMES)
    words = record["frames"].reshape(FRAMES, 3)[:count].tolist()
    for code, instr, rest in words:
        yield Frame(code, instr, rest & 0xFFFFFFFF, rest >> 32)
