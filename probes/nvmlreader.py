"""The process that calls NVML, so that a driver that hangs, or a library that crashes, takes
nothing of ours along.

``python -m dsprobe.probes.nvmlreader JOB``, JSON: ``library`` (path; empty: as the linker finds
it), ``known`` (numbers of devices by key), ``proc`` (the folder /proc), ``slow`` (every so many ns
is read what changes slowly), ``parent`` (the agent's PID).  It writes msgpack to standard output:

- ``["rows", stream, [row]]``, a row as a map; what it lacks is not told;
- ``["beat"]`` every ``slow`` ns, after all devices have answered;
- ``["again"]`` where NVML should be loaded anew; ``["end", why]`` where there is nothing to read.

The agent's side is :mod:`dsprobe.probes.nvml`.  Imports no numpy.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgpack

PERIOD_S = 0.1
SECOND = 10**9
RELOAD_NS = 30 * SECOND
"""A lost device comes back only in an NVML that was loaded after it did."""
MAX_DT = 1_500_000_000
"""A row speaks for so long at most: what was before, while the driver hung, nobody knows."""
EVENT_WAIT_MS = 1000
_PR_SET_PDEATHSIG = 1

Send = Callable[[list[Any]], None]


class Reader:
    """Reads all devices; ``known`` numbers them by key: UUID, or place where there is none."""

    def __init__(self, send: Send, known: dict[str, int], proc: Path, slow: int = SECOND) -> None:
        # Not at the top: without nvidia-ml-py there must be a process that can say so.
        import pynvml

        from dsprobe.probes import nvmldevice

        self._nvml, self._of = pynvml, nvmldevice
        self._send, self._known, self._proc = send, known, proc
        self._devices: dict[str, nvmldevice.Device] = {}
        self._announced: dict[int, dict[str, Any]] = {}
        self._events: Any = None
        self._handles: dict[int | None, int] = {}
        self._turn = 0
        self._every = slow
        self._slow = self._since = 0
        self._lost_since = 0
        pynvml.nvmlInit()
        self._driver = nvmldevice.text(pynvml.nvmlSystemGetDriverVersion())

    def step(self, now: int) -> None:
        """Read what is due at ``now`` (CLOCK_MONOTONIC ns).  Raises NVMLError where the driver is
        gone, :class:`_Again` where NVML is to be loaded anew."""
        slow = now - self._slow >= self._every
        if slow:
            self._enumerate()
        rows = [row for d in list(self._devices.values()) if (row := self._read(d, now, slow))]
        whole = [d for d in self._devices.values() if not d.mig and d.state == "ok"]
        if whole:
            self._turn += 1
            device = whole[self._turn % len(whole)]
            self._try(device, device.pcie)
        if slow:
            listed = self._processes(now)
            self._announce(now)
            self._slow = now
        if rows:
            self._send(["rows", "nvml.device", rows])
        if slow:
            if listed:
                self._send(["rows", "nvml.process", listed])
            self._send(["beat"])
            lost = any(d.state == "lost" for d in self._devices.values())
            self._lost_since = (self._lost_since or now) if lost else 0
            if lost and now - self._lost_since > RELOAD_NS:
                raise _Again

    # -- devices -----------------------------------------------------------------------------------

    def _enumerate(self) -> None:
        """Which devices there are now, with their MIG devices."""
        nvml, found = self._nvml, set()
        for index in range(nvml.nvmlDeviceGetCount()):
            place = f"place {index}"
            try:
                handle = nvml.nvmlDeviceGetHandleByIndex(index)
                uuid = self._of.text(nvml.nvmlDeviceGetUUID(handle))
                device = self._take(uuid, handle, index, "")
                found |= {uuid, *self._parts(device)}
            except nvml.NVMLError as e:
                if e.value in self._of.GONE:
                    raise
                there = [k for k, d in self._devices.items() if d.index == index and not d.mig]
                if not there:  # it was lost before we came
                    self._devices[place] = self._of.Device(
                        None, self._number(place), index, "", "GPU", ""
                    )
                for key in there or [place]:
                    self._devices[key].state = "lost"
                    self._devices[key].untold = {"all": self._of.reason(e)}
                    found.add(key)
        for key in [k for k in self._devices if k not in found]:
            self._devices.pop(key).state = "gone"

    def _take(self, uuid: str, handle: Any, index: int, parent: str, pci: str = "") -> Any:
        nvml, text = self._nvml, self._of.text
        device = self._devices.get(uuid)
        if device is None:
            name = text(nvml.nvmlDeviceGetName(handle))
            with contextlib.suppress(nvml.NVMLError):
                pci = pci or text(nvml.nvmlDeviceGetPciInfo(handle).busId)
            number = self._number(uuid)
            device = self._of.Device(handle, number, index, uuid, name, pci, parent)
            self._devices[uuid] = device
            if not parent:
                self._register(device)
        if device.state == "lost":
            device.untold.clear()
        device.handle, device.index, device.state = handle, index, "ok"
        return device

    def _parts(self, device: Any) -> list[str]:
        """UUIDs of its MIG devices."""
        nvml, found = self._nvml, []
        try:
            on = nvml.nvmlDeviceGetMigMode(device.handle)[0]
            count = nvml.nvmlDeviceGetMaxMigDeviceCount(device.handle) if on else 0
        except nvml.NVMLError as e:
            if e.value in self._of.LOST or e.value in self._of.GONE:
                raise
            return []  # a device that has no such mode
        for index in range(count):
            try:
                handle = nvml.nvmlDeviceGetMigDeviceHandleByIndex(device.handle, index)
                uuid = self._of.text(nvml.nvmlDeviceGetUUID(handle))
                self._take(uuid, handle, index, device.uuid, device.pci)
            except nvml.NVMLError as e:
                if e.value in self._of.LOST or e.value in self._of.GONE:
                    raise
                continue  # no instance in this place
            found.append(uuid)
        return found

    def _number(self, key: str) -> int:
        return self._known.setdefault(key, max(self._known.values(), default=0) + 1)

    def _try(self, device: Any, call: Callable[..., Any], *args: Any) -> Any:
        """``call(*args)``; None where it finds the device lost."""
        try:
            return call(*args)
        except self._nvml.NVMLError as e:
            if e.value not in self._of.LOST:
                raise
            device.state, device.untold = "lost", {"all": self._of.reason(e)}
            if self._announced.get(device.id, {}).get("state") != "lost":
                self._slow = 0  # say so at the next step
            return None

    def _read(self, device: Any, now: int, slow: bool) -> dict[str, Any] | None:
        """A row, where there is something new to say."""
        if device.state != "ok":
            return None
        self._try(device, device.fast)
        if slow and device.state == "ok":
            self._try(device, device.slow, now)
        if device.state != "ok":
            return None
        t, lively = time.monotonic_ns(), device.lively
        since = t - device.told if device.told else int(PERIOD_S * SECOND)
        if lively == device.before and not slow:
            return None
        device.told, device.before = t, lively
        row: dict[str, Any] = device.row(t, min(since, MAX_DT))
        return row

    def _processes(self, now: int) -> list[dict[str, Any]]:
        since = time.time_ns() // 1000 - 2_000_000 if self._since else 0
        dt = min(now - self._since, MAX_DT) if self._since else SECOND
        self._since = now
        rows = []
        for device in list(self._devices.values()):
            listed = self._try(device, device.processes, since) if device.state == "ok" else None
            for process in listed or ():
                comm = self._of.name_of(process["pid"], self._proc)
                known = int(comm is not None)
                rows.append({"t": now, "dt": dt, "gpu": device.id, **process, "known": known,
                             "comm": comm or b""})  # fmt: skip
        return rows

    def _announce(self, now: int) -> None:
        """What changed of devices, those that are gone included."""
        said = {d.id: d.said for d in self._devices.values()}
        for id, before in self._announced.items():
            said.setdefault(id, {**before, "state": "gone"})
        rows = [{"t": now, "driver": self._driver, **row} for id, row in said.items()
                if self._announced.get(id) != row]  # fmt: skip
        self._announced = said
        if rows:
            self._send(["rows", "meta.gpu", rows])

    # -- Xid errors --------------------------------------------------------------------------------

    def _register(self, device: Any) -> None:
        nvml = self._nvml
        try:
            if self._events is None:
                self._events = nvml.nvmlEventSetCreate()
            # Before it is registered, so that the thread knows it.
            self._handles[_address(device.handle)] = device.id
            nvml.nvmlDeviceRegisterEvents(
                device.handle, nvml.nvmlEventTypeXidCriticalError, self._events
            )
        except nvml.NVMLError as e:
            if e.value in self._of.LOST or e.value in self._of.GONE:
                raise
            device.untold["xid"] = self._of.reason(e)
            return
        if not any(t.name == "xid" for t in threading.enumerate()):
            threading.Thread(target=self._wait, name="xid", daemon=True).start()

    def _wait(self) -> None:
        """On its own thread, so that an Xid error is told also while other calls hang."""
        nvml = self._nvml
        while True:
            try:
                event = nvml.nvmlEventSetWait(self._events, EVENT_WAIT_MS)
            except nvml.NVMLError as e:
                if e.value != nvml.NVML_ERROR_TIMEOUT:
                    time.sleep(EVENT_WAIT_MS / 1e3)  # a lost device fails it at once
                continue
            if event.eventType & nvml.nvmlEventTypeXidCriticalError:
                gpu = self._handles.get(_address(event.device), 0)
                row = {"t": time.monotonic_ns(), "gpu": gpu, "xid": int(event.eventData)}
                self._send(["rows", "nvml.xid", [row]])


class _Again(Exception):
    pass


def _address(handle: Any) -> int | None:
    return ctypes.cast(handle, ctypes.c_void_p).value


def run(job: dict[str, Any], send: Send) -> None:
    """Read until there is no more to read; the last message says why."""
    try:
        import pynvml
    except ImportError as e:
        send(["end", f"nvidia-ml-py cannot be imported ({e}); install it (pip install"
              " nvidia-ml-py)"])  # fmt: skip
        return
    try:
        if job["library"]:
            # By its SONAME the loader gives the same one to pynvml, which has no path to set.
            ctypes.CDLL(job["library"], ctypes.RTLD_GLOBAL)
        reader = Reader(send, job["known"], Path(job["proc"]), job["slow"])
        at = time.monotonic()
        while True:
            reader.step(time.monotonic_ns())
            at = max(at + PERIOD_S, time.monotonic())
            time.sleep(max(0.0, at - time.monotonic()))
    except _Again:
        send(["again"])
    except pynvml.NVMLError as e:
        send(["end", sentence(e.value, str(e).strip())])
    except OSError as e:
        send(["end", f"libnvidia-ml.so.1 cannot be loaded: {e}"])
    except Exception as e:  # whatever it is, the agent is to say it
        send(["end", f"NVML cannot be read: {type(e).__name__}: {e}"])


def sentence(code: int, words: str) -> str:
    """Why NVML as a whole tells nothing, and what to do."""
    import pynvml

    fixes = {
        pynvml.NVML_ERROR_DRIVER_NOT_LOADED: "the NVIDIA driver is not loaded; modprobe nvidia",
        pynvml.NVML_ERROR_LIBRARY_NOT_FOUND: "libnvidia-ml.so.1 is not there; install the NVIDIA"
        " driver",
        pynvml.NVML_ERROR_LIB_RM_VERSION_MISMATCH: "the NVIDIA driver and its library are of"
        " different versions; reload the driver or restart",
        pynvml.NVML_ERROR_NO_PERMISSION: "NVML refuses; run dsprobe as root",
    }
    return fixes.get(code, f"NVML tells nothing: {words}; see dmesg | grep -i nvrm")


def main() -> None:
    job = json.loads(sys.argv[1])
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)  # nobody would take what we read
    if os.getppid() != job["parent"]:
        return
    out, lock = os.dup(1), threading.Lock()
    os.dup2(2, 1)  # what a library prints is not for the agent

    def send(message: list[Any]) -> None:
        data = msgpack.packb(message)
        with lock:
            while data:
                data = data[os.write(out, data) :]

    with contextlib.suppress(BrokenPipeError):
        run(job, send)
    os._exit(0)  # the thread that waits for events has nothing to clean up


if __name__ == "__main__":
    main()
