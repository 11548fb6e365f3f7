"""Mappings in the kernel's tables, for ranges with more of them than BPF can go through."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from dsprobe.probes.hashmap import HashMap
from dsprobe.probes.memorywalk import KEY, TABLES
from dsprobe.probes.probe import Map
from dsprobe.probes.vmmledger import MAPPED, PHYSICAL, Block

GRANULARITY = 2 << 20
"""As in vmm.bpf.h."""


class MappedMemory:
    def __init__(self, maps: Mapping[str, Map]) -> None:
        self._physical, self._mapped = (
            HashMap(maps[name], KEY, TABLES[name]) for name in ("memory_physical", "memory_mapped")
        )

    def unmap(
        self, process: int, start: int, end: int, t: int, steps: int
    ) -> tuple[list[Block], int]:
        """As :class:`~dsprobe.probes.vmmledger.Mappings` has it."""
        gone: list[Block] = []
        at = start
        for _ in range(steps):
            if at >= end:
                break
            key = process, MAPPED, at
            m = self._mapped.take(key)
            if m is None:
                at += GRANULARITY
                continue
            at += int(m["bytes"])
            if m["born"] >= t:  # mapped again since
                self._mapped.put(key, tuple(m))
                continue
            gone.append(_block(m))
            gone += self._drop(process, int(m["handle"]))
        return gone, at

    def _drop(self, process: int, handle: int) -> list[Block]:
        """A mapping of this physical memory less."""
        key = process, PHYSICAL, handle
        p = self._physical.take(key)
        if p is None:
            return []
        p["maps"] -= min(int(p["maps"]), 1)
        if p["maps"] or p["handles"]:
            self._physical.put(key, tuple(p))
            return []
        return [_block(p)]


def _block(b: Any) -> Block:
    size, born, stack, context, kind = (
        int(b[n]) for n in ("bytes", "born", "stack", "context", "kind")
    )
    return Block(size, born, stack, context, kind, 0, 0, 0)
