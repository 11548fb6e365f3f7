"""What NVML tells of one device, through nvidia-ml-py.  Loaded in the child of the probe alone
(:mod:`dsprobe.probes.nvmlreader`), as any call may hang.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pynvml as nvml

LOST = (nvml.NVML_ERROR_GPU_IS_LOST, nvml.NVML_ERROR_RESET_REQUIRED, nvml.NVML_ERROR_GPU_NOT_FOUND)
"""Errors that speak of the whole device."""
GONE = (nvml.NVML_ERROR_UNINITIALIZED, nvml.NVML_ERROR_DRIVER_NOT_LOADED,
        nvml.NVML_ERROR_LIB_RM_VERSION_MISMATCH)  # fmt: skip
"""Errors that speak of the driver: the library must be loaded anew."""

ALL_LINKS = 0xFFFFFFFF
MAX_PROCESSES = 1024
SIMULATED = "simulated"
"""A stand-in has this word in its product name."""

FAST = ("sm", "memory", "mem_used", "sm_clock", "mem_clock", "power", "throttle")
KINDS = ("compute", "graphics", "MPS")  # as nvmlstreams has them, without numpy


@dataclass
class Device:
    """``handle`` is NVML's.  ``parent`` is the UUID of the device that a MIG device is part of."""

    handle: Any
    id: int
    index: int
    uuid: str
    name: str
    pci: str
    parent: str = ""
    state: str = "ok"
    values: dict[str, float] = field(default_factory=dict)
    untold: dict[str, str] = field(default_factory=dict)
    """What is not told, and why."""
    told: int = 0
    """``t`` of the last row of nvml.device."""
    before: tuple[float, ...] = ()
    """What it said of what is read ten times a second."""
    links: tuple[int, int, int] | None = None
    """When NVLink's counters were read, and what they were (KiB received, sent)."""

    @property
    def mig(self) -> bool:
        return bool(self.parent)

    def ask(self, names: tuple[str, ...], call: Callable[..., Any], *args: Any) -> None:
        """Take what ``call(*args)`` gives, a number or several, as values ``names``; where it fails
        they are NaN, and ``untold`` says why.

        Raises NVMLError where the device or the driver is gone.
        """
        try:
            got = call(*args)
        except nvml.NVMLError as e:
            if e.value in LOST or e.value in GONE:
                raise
            got = (math.nan,) * len(names)
            self.untold.update(dict.fromkeys(names, reason(e)))
        else:
            for name in names:
                self.untold.pop(name, None)
        several = got if isinstance(got, (tuple, list)) else (got,)
        self.values.update(zip(names, map(float, several), strict=True))

    def fast(self) -> None:
        """What may change ten times a second."""
        h = self.handle
        self.ask(("sm", "memory"), _rates, h)
        self.ask(("mem_used", "mem_total"), _memory, h)
        self.ask(("sm_clock",), nvml.nvmlDeviceGetClockInfo, h, nvml.NVML_CLOCK_SM)
        self.ask(("mem_clock",), nvml.nvmlDeviceGetClockInfo, h, nvml.NVML_CLOCK_MEM)
        self.ask(("power",), lambda: nvml.nvmlDeviceGetPowerUsage(h) / 1e3)
        self.ask(("throttle",), _reasons, h)

    def slow(self, now: int) -> None:
        """What once a second is enough for; ``now`` in ns."""
        h = self.handle
        self.ask(("sm_clock_max",), nvml.nvmlDeviceGetMaxClockInfo, h, nvml.NVML_CLOCK_SM)
        self.ask(("mem_clock_max",), nvml.nvmlDeviceGetMaxClockInfo, h, nvml.NVML_CLOCK_MEM)
        self.ask(("power_limit",), lambda: nvml.nvmlDeviceGetEnforcedPowerLimit(h) / 1e3)
        self.ask(("temperature",), _temperature, h)
        threshold = nvml.nvmlDeviceGetTemperatureThreshold
        self.ask(("temp_slowdown",), threshold, h, nvml.NVML_TEMPERATURE_THRESHOLD_SLOWDOWN)
        self.ask(("temp_shutdown",), threshold, h, nvml.NVML_TEMPERATURE_THRESHOLD_SHUTDOWN)
        self.ask(("pcie_gen",), nvml.nvmlDeviceGetCurrPcieLinkGeneration, h)
        self.ask(("pcie_width",), nvml.nvmlDeviceGetCurrPcieLinkWidth, h)
        self.ask(("nvlink_rx", "nvlink_tx"), self._links, now)
        errors, since_load = nvml.nvmlDeviceGetTotalEccErrors, nvml.NVML_VOLATILE_ECC
        corrected = nvml.NVML_MEMORY_ERROR_TYPE_CORRECTED
        uncorrected = nvml.NVML_MEMORY_ERROR_TYPE_UNCORRECTED
        self.ask(("ecc_corrected",), errors, h, corrected, since_load)
        self.ask(("ecc_uncorrected",), errors, h, uncorrected, since_load)
        rows = ("remapped_corrected", "remapped_uncorrected", "remap_pending", "remap_failed")
        self.ask(rows, nvml.nvmlDeviceGetRemappedRows, h)

    def pcie(self) -> None:
        """PCIe throughput: each of the two calls measures for 20 ms (nvml.h)."""
        through, h = nvml.nvmlDeviceGetPcieThroughput, self.handle
        self.ask(("pcie_rx",), lambda: through(h, nvml.NVML_PCIE_UTIL_RX_BYTES) * 1024)
        self.ask(("pcie_tx",), lambda: through(h, nvml.NVML_PCIE_UTIL_TX_BYTES) * 1024)

    @property
    def lively(self) -> tuple[float, ...]:
        """What :meth:`fast` read, to tell whether it changed: NaN is -1 there."""
        found = (self.values.get(name, math.nan) for name in FAST)
        return tuple(-1.0 if math.isnan(v) else v for v in found)

    def row(self, t: int, dt: int) -> dict[str, Any]:
        """A row of nvml.device but for what is not told."""
        values = dict(self.values)
        bits = values.pop("throttle", math.nan)
        known = not math.isnan(bits)
        return {"t": t, "dt": dt, "gpu": self.id, "mig": int(self.mig), **values,
                "throttle_known": int(known), "throttle": int(bits) if known else 0}  # fmt: skip

    @property
    def said(self) -> dict[str, Any]:
        """A row of meta.gpu but for ``t`` and the driver."""
        by_reason: dict[str, list[str]] = {}
        for name, why in sorted(self.untold.items()):
            by_reason.setdefault(why, []).append(name)
        untold = "; ".join(f"{why}: {', '.join(names)}" for why, names in by_reason.items())
        return {"id": self.id, "index": self.index, "state": self.state, "uuid": self.uuid,
                "simulated": int(SIMULATED in self.name.lower()), "name": self.name,
                "pci": self.pci, "parent": self.parent, "untold": untold}  # fmt: skip

    def _links(self, now: int) -> tuple[float, float]:
        """Bytes per second received and sent over NVLink since the last call."""
        wanted = (nvml.NVML_FI_DEV_NVLINK_THROUGHPUT_DATA_RX,
                  nvml.NVML_FI_DEV_NVLINK_THROUGHPUT_DATA_TX)  # fmt: skip
        got = nvml.nvmlDeviceGetFieldValues(self.handle, [(f, ALL_LINKS) for f in wanted])
        before, self.links = self.links, None
        for value in got:
            if value.nvmlReturn != nvml.NVML_SUCCESS:
                raise nvml.NVMLError(value.nvmlReturn)
        received, sent = (int(value.value.ullVal) for value in got)
        self.links = (now, received, sent)
        if before is None or now <= before[0] or received < before[1] or sent < before[2]:
            return math.nan, math.nan
        per = 1024e9 / (now - before[0])
        return (received - before[1]) * per, (sent - before[2]) * per

    def processes(self, since: int) -> list[dict[str, Any]]:
        """Each process that the driver lists: pid, kind, mem_used, sm; utilisation is the last
        sample after ``since`` (microseconds of the wall clock)."""
        found: dict[int, dict[str, Any]] = {}
        calls = (nvml.nvmlDeviceGetComputeRunningProcesses_v3,
                 nvml.nvmlDeviceGetGraphicsRunningProcesses_v3,
                 nvml.nvmlDeviceGetMPSComputeRunningProcesses_v3)  # fmt: skip
        for kind, call in zip(KINDS, calls, strict=True):
            try:
                listed = call(self.handle)
            except nvml.NVMLError as e:
                if e.value in LOST or e.value in GONE:
                    raise
                if kind == KINDS[0]:
                    self.untold["processes"] = reason(e)
                continue
            if kind == KINDS[0]:
                self.untold.pop("processes", None)
            for p in listed[:MAX_PROCESSES]:
                used = math.nan if p.usedGpuMemory is None else float(p.usedGpuMemory)
                found.setdefault(
                    p.pid, {"pid": p.pid, "kind": kind, "mem_used": used, "sm": math.nan}
                )
        for pid, sm in self._shares(since).items() if found else ():
            if pid in found:
                found[pid]["sm"] = sm
        return list(found.values())

    def _shares(self, since: int) -> dict[int, float]:
        try:
            samples = nvml.nvmlDeviceGetProcessUtilization(self.handle, since)
        except nvml.NVMLError as e:
            if e.value in LOST or e.value in GONE:
                raise
            if e.value == nvml.NVML_ERROR_NOT_FOUND:  # told, but nobody ran since then
                self.untold.pop("processes.sm", None)
            else:
                self.untold["processes.sm"] = reason(e)
            return {}
        self.untold.pop("processes.sm", None)
        latest = sorted(samples, key=lambda s: int(s.timeStamp))
        return {int(s.pid): float(s.smUtil) for s in latest if s.smUtil <= 100}


def reason(error: Any) -> str:
    """NVML's own words for ``error``, in lower case."""
    return str(error).strip().lower() or f"error {error.value}"


def text(value: Any) -> str:
    """Text as NVML gives it, in bytes before nvidia-ml-py 12."""
    return value.decode(errors="replace") if isinstance(value, bytes) else str(value)


def name_of(pid: int, proc: Path) -> bytes | None:
    """Name of process ``pid``; None where ``proc`` has none of that number."""
    try:
        return (proc / str(pid) / "comm").read_bytes().rstrip(b"\n")[:16]
    except OSError:
        return None


def _rates(handle: Any) -> tuple[float, float]:
    rates = nvml.nvmlDeviceGetUtilizationRates(handle)
    return rates.gpu, rates.memory


def _memory(handle: Any) -> tuple[float, float]:
    """Bytes used and in all; version 2 does not count what the driver reserves as used."""
    try:
        info = nvml.nvmlDeviceGetMemoryInfo(handle, version=nvml.nvmlMemory_v2)
    except nvml.NVMLError:
        info = nvml.nvmlDeviceGetMemoryInfo(handle)
    return info.used, info.total


def _reasons(handle: Any) -> float:
    """Bits of nvml.device.throttle."""
    try:
        return nvml.nvmlDeviceGetCurrentClocksEventReasons(handle)  # type: ignore[no-any-return]
    except nvml.NVMLError as e:
        if e.value != nvml.NVML_ERROR_FUNCTION_NOT_FOUND:
            raise
        # The name it had in drivers before 535.
        return nvml.nvmlDeviceGetCurrentClocksThrottleReasons(handle)  # type: ignore[no-any-return]


def _temperature(handle: Any) -> float:
    """°C; drivers before 570 have the older function alone, later ones will not."""
    try:
        return nvml.nvmlDeviceGetTemperatureV(handle, nvml.NVML_TEMPERATURE_GPU)  # type: ignore[no-any-return]
    except nvml.NVMLError:
        return nvml.nvmlDeviceGetTemperature(handle, nvml.NVML_TEMPERATURE_GPU)  # type: ignore[no-any-return]
