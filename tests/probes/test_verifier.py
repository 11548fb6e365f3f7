"""How far the verifier has to walk: all programs pass it at every start, and within its limit."""

from __future__ import annotations

import contextlib
import ctypes
import os
import re
import struct

import pytest

from dsprobe.probes import syscalls
from dsprobe.probes.probe import BpfProbe
from dsprobe.probes.registry import select
from dsprobe.probes.tracer import Tracer

pytestmark = pytest.mark.bpf

EACH = 75_000
"""The kernel allows a million, but another version may need more for the same program."""
ALL = 200_000
"""0.2 s of one CPU: about a microsecond an instruction."""
_STATS = 4  # BPF_LOG_STATS (kernel/bpf/verifier.c)


def walked(kind: int, instructions: bytes, attach_type: int) -> int:
    """Instructions that the verifier processes for a program, by its own count."""
    code = ctypes.create_string_buffer(instructions, len(instructions))
    license, log = ctypes.create_string_buffer(b"GPL"), ctypes.create_string_buffer(1 << 16)
    attr = struct.pack(
        "<IIQQIIQII16sII", kind, len(instructions) // 8, ctypes.addressof(code),
        ctypes.addressof(license), _STATS, len(log), ctypes.addressof(log), 0, 0, b"", 0,
        attach_type,
    )  # fmt: skip
    with contextlib.suppress(OSError):
        fd, _ = syscalls.bpf(syscalls.PROG_LOAD, attr)
        os.close(fd)
    found = re.search(rb"processed (\d+) insns", log.value)
    assert found, log.value
    return int(found[1])


def test_programs_are_short_walks(monkeypatch: pytest.MonkeyPatch) -> None:
    steps: dict[str, int] = {}
    load = syscalls.load_program

    def measure(kind: int, instructions: bytes, name: str, attach_type: int = 0) -> int:
        steps[f"{name} ({len(instructions) // 8})"] = walked(kind, instructions, attach_type)
        return load(kind, instructions, name, attach_type)

    monkeypatch.setattr(syscalls, "load_program", measure)
    tracer = Tracer([p for p in select(None) if isinstance(p, BpfProbe)])
    bad = [c for c in tracer.load() if c.status != "attached"]
    tracer.close()
    assert not bad
    assert len(steps) > 7
    long = {name: n for name, n in steps.items() if n > EACH}
    assert not long
    assert sum(steps.values()) < ALL, steps
