"""The smallest probe that discovery can serve: counts entries and returns of every function."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path

import numpy as np

from dsprobe.probes.btf import Btf
from dsprobe.probes.driver import Driver
from dsprobe.probes.hashmap import HashMap
from dsprobe.probes.maps import MappedArray
from dsprobe.probes.probe import Batch, BpfProbe, Map, Program, Uprobe, need_btf
from dsprobe.recordings.cudastreams import META_PLACEMENT
from dsprobe.recordings.model import Rows

_HITS = np.dtype([("entries", "<u8"), ("returns", "<u8")])


class Counter(BpfProbe):
    """``functions`` are counted (default: all that the library exports)."""

    name = "counter"
    doc = "made by a test"
    streams = ()
    source = str(Path(__file__).with_name("counter.bpf.c"))
    module = "counter"
    programs = (
        Program("counter_enter", "uprobe"),
        Program("counter_leave", "uretprobe"),
        Program("counter_fork", "raw_tracepoint", "sched_process_fork"),
    )

    def __init__(self, *functions: str) -> None:
        self.functions = functions
        self.numbers: dict[str, int] = {}
        self.seen: list[tuple[int, Driver]] = []
        self.attached: list[Driver] = []
        self.returns: list[bool] = []
        self.forgotten: list[set[int]] = []

    def defines(self, btf: Btf | None) -> Mapping[str, int]:
        return {"TASK_TGID": need_btf(btf).offset("task_struct", "tgid")}

    def open(self, maps: Mapping[str, Map]) -> None:
        self._hits = MappedArray(maps["counter_hits"], _HITS).live
        self._filter = MappedArray(maps["counter_filter"], np.dtype("<u8")).live
        self._wanted = HashMap(maps["counter_wanted"], "<u4", "<u4")

    def collect(self, now: int) -> list[Batch]:
        return []

    def want(self, pids: Iterable[int]) -> None:
        for pid in pids:
            self._wanted.put(pid, 1)
        self._filter[0] = 1

    def wants(self, pid: int) -> bool:
        return not self._filter[0] or self._wanted.get(pid) is not None

    def strangers(self) -> set[int]:
        return set()

    def look_at(self, pid: int) -> None:
        pass

    def process_seen(self, pid: int, driver: Driver) -> None:
        self.seen.append((pid, driver))

    def library(self, driver: Driver, returns: bool) -> tuple[list[Uprobe], Rows]:
        self.attached.append(driver)
        self.returns.append(returns)
        names = [n for n in driver.entries if not self.functions or n in self.functions]
        uprobes = []
        for name in names:
            number = self.numbers.setdefault(name, len(self.numbers))
            at = driver.functions[name].offset + driver.entries[name].offset
            uprobes.append(Uprobe("counter_enter", at, number))
            if returns:
                uprobes.append(Uprobe("counter_leave", at, number, returns=True))
        rows = META_PLACEMENT.rows(
            library=[driver.path] * len(names), build_id=driver.build_id, function=names,
            attached=1, cheap=[driver.entries[n].emulated for n in names],
        ) if names else META_PLACEMENT.empty()  # fmt: skip
        return uprobes, rows

    def forget(self, uprobes: Iterable[Uprobe]) -> None:
        self.forgotten.append({u.cookie for u in uprobes})

    def counts(self, what: str = "entries") -> dict[str, int]:
        """Hits so far of every function that had any."""
        hits = {name: int(self._hits[i][what]) for name, i in self.numbers.items()}
        return {name: n for name, n in hits.items() if n}
