"""Modules as bytes, and what is made of logs."""

from __future__ import annotations

import struct

import msgpack
import pytest

from dsprobe.probes import module as modules
from dsprobe.probes.module import MapDefinition, Module, maps_of, renumbered

MAPS = (MapDefinition("a_name_longer_than_the_kernel_s", 2, 4, 312, 20, 1024),
        MapDefinition("ring", 27, 0, 0, 1 << 18, 0))  # fmt: skip
MOVE = struct.pack("<BBhi", 0xB7, 0, 0, 5)


def load_of(map: int) -> bytes:
    """The two halves of a 64-bit load of a map (source register 1)."""
    return struct.pack("<BBhi", 0x18, 0x11, 0, map) + bytes(8)


def test_a_module_is_the_same_after_a_journey() -> None:
    module = Module(MAPS, {"f": load_of(1) + MOVE + load_of(0)}, {"unit": "why"})
    assert Module.unpack(module.pack()) == module


def test_only_loads_of_maps_are_renumbered() -> None:
    number = struct.pack("<BBhi", 0x18, 0x01, 0, 7) + struct.pack("<BBhi", 0, 0x10, 0, 9)
    code = load_of(7) + number + MOVE + load_of(9)
    assert maps_of(code) == [7, 9]
    assert renumbered(code, {7: 0, 9: 1}) == load_of(0) + number + MOVE + load_of(1)
    with pytest.raises(KeyError):
        renumbered(code, {7: 0})


@pytest.mark.parametrize(
    "data",
    [
        b"", b"garbage", msgpack.packb(None), msgpack.packb([[], {}]),
        msgpack.packb([[], {"f": load_of(0)}, {}]), msgpack.packb([[], {"f": load_of(-1)}, {}]),
        msgpack.packb([[], {"f": b"12345"}, {}]), msgpack.packb([[], {"f": 5}, {}]),
        msgpack.packb([[], {5: MOVE}, {}]), msgpack.packb([[["m", 1]], {}, {}]),
        msgpack.packb([[["m", 2, 4, 4, -1, 0]], {}, {}]), msgpack.packb([[], [], {}]),
        msgpack.packb([[[5, 2, 4, 4, 1, 0]], {}, {}]), Module(MAPS, {}).pack()[:-1],
        Module(MAPS, {}).pack() + b"x",
    ],
)  # fmt: skip
def test_what_is_no_module_is_refused(data: bytes) -> None:
    with pytest.raises(ValueError, match="not a compiled module"):
        Module.unpack(data)


CLANG = """\
/virtual/main.c:12:9: warning: unused variable 'x' [-Wunused-variable]
/virtual/main.c:40:12: error: use of undeclared identifier 'skc_family'
        return skc_family;
               ^
/virtual/main.c:44:1: error: another one
2 errors generated.
"""
VERIFIER = """\
bpf: Failed to load program: Permission denied
0: R1=ctx() R10=fp0
0: (b7) r1 = 1
7: (79) r0 = *(u64 *)(r0 +0)
R0 invalid mem access 'map_value_or_null'
processed 8 insns (limit 1000000) max_states_per_insn 0 total_states 0 peak_states 0
"""


@pytest.mark.parametrize(
    ("log", "reason"),
    [
        (CLANG, "use of undeclared identifier 'skc_family'"),
        (VERIFIER, "R0 invalid mem access 'map_value_or_null'"),
        ("", "no reason given"),
        ("\n\n", "no reason given"),
        ("just this", "just this"),
        ("processed 8 insns", "no reason given"),
    ],
    ids=["clang", "verifier", "nothing", "blank", "one line", "only figures"],
)
def test_the_line_that_tells_the_most(log: str, reason: str) -> None:
    assert modules.reason(log) == reason


def test_reasons_are_short() -> None:
    assert len(modules.reason("error: " + "x" * 10_000)) <= 300
