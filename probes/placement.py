"""Where in a function's entry a uprobe is cheap and still sees all its arguments.

A uprobe replaces an instruction.  The kernel emulates a few kinds (arch/x86/kernel/uprobes.c:
pushes, calls, jumps, conditional jumps, nops) at the cost of one trap; any other is stepped out of
line at the cost of two, which in a virtual machine is 16 us instead of half a microsecond.  Every
entry of NVIDIA's driver library begins with a compare that must be stepped, and goes on with a
conditional jump that is emulated; so a probe one instruction later costs a thirtieth.

What lies in between must leave the arguments, the stack pointer and the return address as the
caller set them, and must always be passed: so no write to an argument register, to the stack
pointer or to memory, and no branch.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Any

MAX_PROLOGUE, MAX_SKIPPED = 64, 16
"""Bytes and instructions looked at; an entry that needs more is probed at its first instruction."""

_ARGUMENTS = ("rdi", "rsi", "rdx", "rcx", "r8", "r9", "rsp")


@dataclass(frozen=True)
class Placement:
    """``offset`` from the start of the function; ``emulated``: cheap.  ``instruction`` is what the
    probe sits on, ``skipped`` what runs before it, ``why`` the reason where it is not cheap."""

    offset: int
    emulated: bool
    instruction: str
    skipped: tuple[str, ...] = ()
    why: str = ""


def emulated(code: bytes) -> bool:
    """Whether the kernel emulates the x86_64 instruction at the start of ``code``.

    By the tables of arch/x86/kernel/uprobes.c.  A prefix of operand size makes it step a branch.
    """
    if not code:
        return False
    op = code[0]
    if op in (0xE8, 0xE9, 0xEB, 0x90) or 0x70 <= op <= 0x7F or 0x50 <= op <= 0x57:
        return True
    if op == 0x41 and len(code) > 1:  # push of r8 to r15
        return 0x50 <= code[1] <= 0x57
    return op == 0x0F and len(code) > 1 and 0x80 <= code[1] <= 0x8F


def place(code: bytes) -> Placement:
    """The cheapest safe place in a function that begins with ``code`` (x86_64)."""
    skipped: list[str] = []
    at = 0
    first = ""
    why = "no emulated instruction in its first bytes"
    for insn in _disassembler().disasm(code[:MAX_PROLOGUE], 0, MAX_SKIPPED):
        text = f"{insn.mnemonic} {insn.op_str}".strip()
        first = first or text
        if emulated(bytes(insn.bytes)):
            return Placement(at, True, text, tuple(skipped))
        reason = _disturbs(insn)
        if reason:
            why = f"{text} {reason}"
            break
        skipped.append(text)
        at += insn.size
    return Placement(0, False, first or "undecodable", (), why)


def _disturbs(insn: Any) -> str:
    """Why a probe must not come after this instruction; "" where it may."""
    import capstone
    from capstone import x86

    if insn.group(capstone.CS_GRP_JUMP) or insn.group(capstone.CS_GRP_RET):
        return "leaves the straight path"
    if insn.group(capstone.CS_GRP_CALL) or insn.group(capstone.CS_GRP_INT):
        return "leaves the straight path"
    for operand in insn.operands:
        if operand.type == x86.X86_OP_MEM and operand.access & capstone.CS_AC_WRITE:
            return "writes memory"
    _, written = insn.regs_access()
    for register in written:
        wide = _wide(insn.reg_name(register))
        if wide in _ARGUMENTS:
            return f"writes {wide}"
    return ""


def _wide(register: str) -> str:
    """The 64-bit register that an x86 register is part of."""
    if register[-1:] in "dwb" and register[:1] == "r" and register[1:-1].isdigit():
        return register[:-1]
    stem = register.removeprefix("e").removeprefix("r")
    if stem.endswith("l") and len(stem) == 3:  # dil, sil, spl
        stem = stem[:-1]
    if len(stem) == 2 and stem[1] in "hlx" and stem[0] in "abcd":
        stem = stem[0] + "x"
    return f"r{stem}" if stem in ("ax", "bx", "cx", "dx", "si", "di", "sp", "bp") else register


@cache
def _disassembler() -> Any:
    import capstone

    md = capstone.Cs(capstone.CS_ARCH_X86, capstone.CS_MODE_64)
    md.detail = True
    return md
