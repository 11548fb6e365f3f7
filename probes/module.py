"""A compiled BPF module, and loading it into the kernel.

A module holds instructions in which maps are named by their place in a list, and what each map is
like; so it can be kept, and loaded later or elsewhere with nothing but bpf(2).  Source: bpf(2),
Documentation/bpf/standardization/instruction-set.rst (64-bit immediate instructions).
"""

from __future__ import annotations

import contextlib
import os
import re
import resource
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import astuple, dataclass, field
from typing import Any

import msgpack
import numpy as np
import numpy.typing as npt

from dsprobe.probes import syscalls
from dsprobe.probes.probe import Map

_INSTRUCTION = np.dtype([("code", "u1"), ("registers", "u1"), ("offset", "<i2"), ("imm", "<i4")])
_LOAD_IMM64 = 0x18
_PSEUDO_MAP_FD = 1  # as source register: the immediate is a map's descriptor

_NAME = 15  # what fits BPF_OBJ_NAME_LEN with a NUL

_TYPES = {
    "uprobe": 2,
    "uretprobe": 2,
    "tail": 2,
    "cpu_clock": 7,
    "raw_tracepoint": 17,
}  # enum bpf_prog_type


@dataclass(frozen=True)
class MapDefinition:
    """As struct bpf_map_info has it, but with the whole name."""

    name: str
    type: int
    key_size: int
    value_size: int
    entries: int
    flags: int


@dataclass(frozen=True)
class Module:
    """``programs`` {name: instructions}; ``errors`` {unit: why it did not compile}."""

    maps: tuple[MapDefinition, ...]
    programs: Mapping[str, bytes]
    errors: Mapping[str, str] = field(default_factory=dict)

    def pack(self) -> bytes:
        maps = [astuple(m) for m in self.maps]
        packed: bytes = msgpack.packb([maps, dict(self.programs), dict(self.errors)])
        return packed

    @classmethod
    def unpack(cls, data: bytes) -> Module:
        """Raises ValueError where ``data`` is no module."""
        try:
            maps, programs, errors = msgpack.unpackb(data)
            made = tuple(_definition(*m) for m in maps)
            for name, code in programs.items():
                _check(name, code, len(made))
            return cls(made, programs, {str(k): str(v) for k, v in errors.items()})
        except (ValueError, TypeError, AttributeError, msgpack.UnpackException) as e:
            raise ValueError(f"not a compiled module: {e}") from None


def _definition(name: str, *numbers: int) -> MapDefinition:
    if not isinstance(name, str) or any(not 0 <= n < 1 << 32 for n in numbers):
        raise ValueError("a map is malformed")
    return MapDefinition(name, *numbers)


def _check(name: str, code: bytes, maps: int) -> None:
    if not isinstance(name, str) or not isinstance(code, bytes):
        raise ValueError("a program is malformed")
    if any(not 0 <= i < maps for i in maps_of(code)):
        raise ValueError(f"{name} uses a map that does not exist")


def _map_loads(instructions: npt.NDArray[Any]) -> npt.NDArray[np.bool_]:
    """Which instructions load a map; the second half of a 64-bit one has the code 0."""
    source = instructions["registers"] >> 4
    loads: npt.NDArray[np.bool_] = instructions["code"] == _LOAD_IMM64
    loads &= source == _PSEUDO_MAP_FD
    return loads


def maps_of(code: bytes) -> list[int]:
    """Numbers of the maps that a program loads: places in the list, or descriptors."""
    instructions = np.frombuffer(code, _INSTRUCTION)
    return sorted(set(instructions["imm"][_map_loads(instructions)].tolist()))


def renumbered(code: bytes, to: Mapping[int, int]) -> bytes:
    """``code`` with each map's number replaced by what ``to`` has for it; KeyError if nothing."""
    instructions = np.frombuffer(code, _INSTRUCTION).copy()
    for i in np.flatnonzero(_map_loads(instructions)):
        instructions["imm"][i] = to[int(instructions["imm"][i])]
    return instructions.tobytes()


@dataclass
class Loaded:
    """Descriptors of programs and maps by name; ``errors``: why other programs are not there, and
    ``broken``: why maps are not, by their place in the module."""

    programs: dict[str, int] = field(default_factory=dict)
    errors: dict[str, str] = field(default_factory=dict)
    maps: dict[str, Map] = field(default_factory=dict)
    broken: dict[int, str] = field(default_factory=dict)

    def close(self) -> None:
        for fd in (*self.programs.values(), *(m.fd for m in self.maps.values())):
            os.close(fd)
        self.programs.clear()
        self.maps.clear()


def load(module: Module, kinds: Mapping[str, str], uprobes: int = 0) -> Loaded:
    """Make the maps and load the programs named in ``kinds`` {name: kind of attachment}.

    ``uprobes`` is the attach type of uprobe programs, 0 where the kernel wants none.  What cannot
    be made or loaded is among the errors, and the rest goes on.
    """
    with contextlib.suppress(OSError, ValueError):  # before Linux 5.11 maps count as locked memory
        resource.setrlimit(resource.RLIMIT_MEMLOCK, (resource.RLIM_INFINITY,) * 2)
    loaded = Loaded()
    places = {}
    for i, m in enumerate(module.maps):
        try:
            fd = syscalls.create_map(
                m.type, m.key_size, m.value_size, m.entries, m.flags, m.name[:_NAME]
            )
        except OSError as e:
            loaded.broken[i] = f"its map {m.name} cannot be made: {e.strerror}"
        else:
            places[i] = fd
            loaded.maps[m.name] = Map(fd, m.key_size, m.value_size, m.entries)

    def program(name: str) -> None:
        code, kind = module.programs[name], kinds[name]
        missing = [loaded.broken[i] for i in maps_of(code) if i in loaded.broken]
        if missing:
            loaded.errors[name] = missing[0]
            return
        attach_type = uprobes if _TYPES[kind] == syscalls.KPROBE else 0
        try:
            loaded.programs[name] = syscalls.load_program(
                _TYPES[kind], renumbered(code, places), name[:_NAME], attach_type
            )
        except syscalls.Refused as e:
            loaded.errors[name] = reason(e.log) if e.log else str(e.strerror)

    # The verifier takes a second for the largest together, and runs on as many CPUs as it is given.
    names = [name for name in kinds if name in module.programs]
    names.sort(key=lambda name: len(module.programs[name]), reverse=True)
    with ThreadPoolExecutor(os.cpu_count() or 1, "verify") as pool:
        list(pool.map(program, names))
    return loaded


def reason(log: str) -> str:
    """The line of a clang or verifier log that tells the most."""
    for pattern in (r".*\berror: (.*)", r"^(?!processed|verification|libbpf)(.*\S)\s*\Z"):
        found = re.findall(pattern, log.strip(), re.MULTILINE)
        if found:
            return str(found[-1] if "Z" in pattern else found[0]).strip()[:300]
    lines = [x for x in log.splitlines() if x and not x.startswith(("processed", "verification"))]
    return lines[-1][:300] if lines else "no reason given"
