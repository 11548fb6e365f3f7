"""From the C text of probes to loaded programs and maps.

Probes are grouped into modules (:func:`dsprobe.probes.units.module`), which are made at the same
time.  Compiling happens in a process each (:mod:`dsprobe.probes.compiler`), unless that was done
before (:mod:`dsprobe.probes.compilecache`); loading here.
"""

from __future__ import annotations

import platform
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from dsprobe.probes import attach, compilecache, syscalls, units
from dsprobe.probes.btf import Btf, BtfError
from dsprobe.probes.compiler import Compiler
from dsprobe.probes.module import Loaded, load
from dsprobe.probes.probe import BpfProbe, Unavailable, possible_cpus

HERE = Path(__file__).resolve().parent


@dataclass
class Made:
    """What became of each probe, by name: its module, or why it has none."""

    loaded: dict[str, Loaded] = field(default_factory=dict)
    missing: dict[str, str] = field(default_factory=dict)

    def close(self) -> None:
        for module in {id(m): m for m in self.loaded.values()}.values():
            module.close()
        self.loaded.clear()


class Loader:
    """Loads ``probes``.  ``multi``: whether one link shall hold many uprobes; None asks the
    kernel."""

    def __init__(self, probes: Sequence[BpfProbe], multi: bool | None = None) -> None:
        self._probes = probes
        self._cache = compilecache.Cache()
        self._uprobe_type = None if multi is None else multi * syscalls.UPROBE_MULTI
        self._compilers = {name: Compiler() for name in {units.module(type(p)) for p in probes}}

    @property
    def multi(self) -> bool:
        """Whether one link holds many uprobes of the programs loaded."""
        return self._uprobe_type == syscalls.UPROBE_MULTI

    def load(self) -> Made:
        made = Made()
        btf: Btf | None
        try:
            btf = Btf.running()
        except BtfError:
            btf = None
        texts: dict[str, dict[str, str]] = {name: {} for name in self._compilers}
        for probe in self._probes:
            try:
                if self._uprobe_type is None and any(p.late for p in probe.programs):
                    self._uprobe_type = attach.uprobe_type()
                text = units.text(probe, self._probes, btf)
                texts[units.module(type(probe))][probe.name] = text
            except (Unavailable, BtfError) as e:
                made.missing[probe.name] = str(e)
        modules = [m for m in texts if texts[m]]
        with ThreadPoolExecutor(max(len(modules), 1), "load") as pool:
            list(pool.map(lambda m: self._make(self._compilers[m], texts[m], made), modules))
        return made

    def _make(self, compiler: Compiler, texts: dict[str, str], made: Made) -> None:
        probes = [p for p in self._probes if p.name in texts]
        job = _job(probes, texts)
        key = compilecache.key(job)
        module = self._cache.get(key)
        if module is None:
            try:
                module = compiler.compile(job)
            except (OSError, ValueError) as e:
                made.missing |= dict.fromkeys(texts, f"BPF programs could not be compiled: {e}")
                return
            if not module.errors:  # another time they may not be there: memory, a package
                self._cache.put(key, module)
        kinds = {p.function: p.kind for probe in probes for p in probe.programs}
        loaded = load(module, kinds, self._uprobe_type or 0)
        for name in texts:
            if name in module.errors:
                made.missing[name] = module.errors[name]
            made.loaded[name] = loaded

    def cancel(self) -> None:
        """End compilations that go on in another thread, and start none any more."""
        for compiler in self._compilers.values():
            compiler.cancel()


def _job(probes: Sequence[BpfProbe], texts: dict[str, str]) -> dict[str, Any]:
    version = [int(x) for x in platform.release().split("-")[0].split(".")[:3] if x.isdigit()]
    major, minor, patch = (*version, 0, 0, 0)[:3]
    code = (major << 16) + (minor << 8) + min(patch, 255)
    return {
        "common": (HERE / "common.bpf.h").read_text(),
        "cflags": [f"-DNCPU={possible_cpus()}", f"-DLINUX_VERSION_CODE={code}", "-w", "-g0"],
        "units": [
            {"name": p.name, "text": texts[p.name], "functions": [q.function for q in p.programs]}
            for p in probes
        ],
    }
