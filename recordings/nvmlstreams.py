"""The streams of what NVML tells of devices; part of :mod:`dsprobe.recordings.streams`.

A value that a device or its driver does not tell is NaN, never 0.  Rows name a device by a number
of the session (``meta.gpu``), which stays the same for a UUID when the driver comes back.
"""

from __future__ import annotations

from dsprobe.recordings.model import Field, Stream

THROTTLE_REASONS = (
    "gpu_idle", "applications_clocks_setting", "sw_power_cap", "hw_slowdown", "sync_boost",
    "sw_thermal_slowdown", "hw_thermal_slowdown", "hw_power_brake_slowdown",
    "display_clock_setting", "board_limit", "reliability",
)  # fmt: skip
"""Names of the bits of ``nvml.device.throttle``, the lowest first (nvml.h,
nvmlClocksEventReason*)."""

BENIGN = ("gpu_idle", "applications_clocks_setting", "sync_boost", "display_clock_setting")
"""Reasons that say nothing of a device that is slower than it should be: it has nothing to do, or
somebody chose its clocks."""

LOSING = sum(1 << bit for bit, name in enumerate(THROTTLE_REASONS) if name not in BENIGN)
"""Bits of the other reasons."""

GPU_STATES = ("ok", "lost", "gone")
"""lost: the driver has lost it, or wants it reset; gone: the driver does not list it any more."""

PROCESS_KINDS = ("compute", "graphics", "MPS")

_T = Field("t", "<u8", "ns", "CLOCK_MONOTONIC")
_DT = Field("dt", "<u8", "ns", "length of the interval that ends at t")
_GPU = Field("gpu", "<u4", "id", "device", ref="meta.gpu")


def _number(name: str, unit: str, doc: str) -> Field:
    return Field(name, "<f4", unit, doc)


def _large(name: str, unit: str, doc: str) -> Field:
    return Field(name, "<f8", unit, doc)


def _text(name: str, doc: str) -> Field:
    return Field(name, "str", "text", doc)


NVML_DEVICE = Stream(
    "nvml.device",
    "State of each device and MIG device: up to ten rows a second while utilisation, memory,"
    " clocks, throttling or power change, else one. What is not told is NaN; meta.gpu says why.",
    "NVML (libnvidia-ml.so.1); PCIe, temperature, ECC and what follows once a second",
    (
        _T,
        _DT,
        _GPU,
        Field("mig", "u1", "bool", "1 for a MIG device: what it has is also its parent's"),
        Field("throttle_known", "u1", "bool", "whether throttle is told"),
        Field("throttle", "<u8", "bits", "why clocks are not higher: bit n is the nth of gpu_idle,"
              " applications_clocks_setting, sw_power_cap, hw_slowdown, sync_boost,"
              " sw_thermal_slowdown, hw_thermal_slowdown, hw_power_brake_slowdown,"
              " display_clock_setting, board_limit, reliability"),
        _number("sm", "%", "time in which a kernel ran, over the driver's last sample period"),
        _number("memory", "%", "time in which device memory was read or written, likewise"),
        _large("mem_used", "bytes", "memory in use"),
        _large("mem_total", "bytes", "memory there is"),
        _number("sm_clock", "MHz", "SM clock"),
        _number("sm_clock_max", "MHz", "its maximum"),
        _number("mem_clock", "MHz", "memory clock"),
        _number("mem_clock_max", "MHz", "its maximum"),
        _number("power", "W", "power drawn"),
        _number("power_limit", "W", "power limit that is enforced"),
        _number("temperature", "°C", "temperature of the GPU"),
        _number("temp_slowdown", "°C", "temperature at which hardware slows down"),
        _number("temp_shutdown", "°C", "temperature at which it shuts down"),
        _number("pcie_rx", "bytes/s", "PCIe bytes received, by a sample of 20 ms"),
        _number("pcie_tx", "bytes/s", "PCIe bytes sent, likewise"),
        _number("pcie_gen", "count", "PCIe generation the link runs at"),
        _number("pcie_width", "count", "PCIe lanes in use"),
        _number("nvlink_rx", "bytes/s", "NVLink payload received over all links"),
        _number("nvlink_tx", "bytes/s", "NVLink payload sent over all links"),
        _large("ecc_corrected", "count", "corrected memory errors since the driver was loaded"),
        _large("ecc_uncorrected", "count", "uncorrected memory errors since then"),
        _number("remapped_corrected", "count", "rows remapped for corrected errors"),
        _number("remapped_uncorrected", "count", "rows remapped for uncorrected errors"),
        _number("remap_pending", "bool", "1 where remapped rows wait for a reset"),
        _number("remap_failed", "bool", "1 where a row could not be remapped"),
    ),
)  # fmt: skip

NVML_PROCESS = Stream(
    "nvml.process",
    "Processes that NVML lists, once a second.",
    "NVML, and /proc/PID",
    (
        _T,
        _DT,
        _GPU,
        Field("pid", "<u4", "pid", "PID as the driver tells it"),
        Field("known", "u1", "bool", "whether /proc has that PID; where not, it is of another PID"
              " namespace, has just ended, or the driver tells wrong ones"),
        Field("kind", "u1", "enum", "what it has on the device", names=PROCESS_KINDS),
        Field("comm", "S16", "text", "its name, where /proc has it"),
        _large("mem_used", "bytes", "device memory it uses; NaN where not told"),
        _number("sm", "%", "share of the time in which its kernels ran; NaN where not told"),
    ),
)  # fmt: skip

NVML_XID = Stream(
    "nvml.xid",
    "Xid errors that the driver reported since the agent runs.",
    "NVML events (nvmlEventTypeXidCriticalError)",
    (
        _T,
        _GPU,
        Field("xid", "<u4", "xid", "number of the error"),
        _text("meaning", "what it means, as NVIDIA's list of Xid errors says"),
    ),
)

META_GPU = Stream(
    "meta.gpu",
    "Devices. The last row of an id holds.",
    "NVML",
    (
        _T,
        Field("id", "<u4", "id", "number other streams use; never used again"),
        Field("index", "<u4", "id", "NVML index; of a MIG device that within its parent"),
        Field("simulated", "u1", "bool", "1 where it is a stand-in for tests, not a GPU"),
        Field("state", "u1", "enum", "whether it can be used", names=GPU_STATES),
        _text("uuid", "UUID"),
        _text("name", "product name"),
        _text("pci", "PCI bus id; of a MIG device its parent's"),
        _text("parent", "UUID of the device that a MIG device is part of"),
        _text("driver", "version of the driver"),
        _text("untold", "what is not told of it and why, as reason: field, field; reason: field"),
    ),
)

NVML_STREAMS = (NVML_DEVICE, NVML_PROCESS, NVML_XID, META_GPU)
