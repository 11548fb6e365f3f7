"""What lanes, ``top --once`` and ``report`` make of rows of NVML."""

from __future__ import annotations

import json
import math
from typing import Any

import numpy as np
import pytest

from dsprobe.recordings import nvmlstreams as nv
from dsprobe.recordings import streams as st
from dsprobe.recordings.gpus import gpus, plain, reasons, xids
from dsprobe.recordings.lanes import BY_KEY
from dsprobe.recordings.leaks import Thresholds
from dsprobe.recordings.model import Rows
from dsprobe.recordings.report import report
from dsprobe.recordings.xids import meaning
from dsprobe.tui.glyphs import ASCII
from dsprobe.tui.gputext import gpu_lines
from dsprobe.tui.text import once
from tests.recordings.sample import random_rows
from tests.tui.memory import MemorySession

SECOND = 10**9
T = 1000 * SECOND
NAN = math.nan
FLOATS = [f.name for f in nv.NVML_DEVICE.fields if f.type.startswith("<f")]


def device(t: float, gpu: int = 1, dt: float = 1, **told: Any) -> dict[str, Any]:
    """A row ``t`` seconds on, in which only what is ``told`` is told."""
    return {**dict.fromkeys(FLOATS, NAN), "t": T + int(t * SECOND), "dt": int(dt * SECOND),
            "gpu": gpu, **told}  # fmt: skip


def rows(*said: dict[str, Any]) -> Rows:
    names = list(said[0])
    made = nv.NVML_DEVICE.empty(len(said))
    for i, row in enumerate(said):
        for name in {*names, *row}:
            made[name][i] = row.get(name, 0)
    return made[np.argsort(made["t"], kind="stable")]


def lane(key: str, held: Rows, seconds: int = 2) -> list[float]:
    edges = T + np.arange(seconds + 1) * SECOND
    return [float(v) for v in BY_KEY[f"nvml.{key}"].compute(held, edges)]


def test_utilisation_is_the_mean_of_what_devices_tell() -> None:
    held = rows(*(device(s + 1, gpu, sm=sm) for s in (0, 1) for gpu, sm in ((1, 100), (2, 0))),
                device(1, 3), device(2, 3))  # fmt: skip
    assert lane("sm", held) == [50, 50]
    assert lane("sm", rows(device(1), device(2))) == pytest.approx([NAN, NAN], nan_ok=True)
    assert lane("sm", held[:0]) == pytest.approx([NAN, NAN], nan_ok=True)


def test_the_mean_is_over_time_not_over_rows() -> None:
    held = rows(device(0.9, dt=0.9, sm=0), device(0.95, dt=0.05, sm=100),
                device(1, dt=0.05, sm=100))  # fmt: skip
    assert lane("sm", held, 1) == pytest.approx([10])


def test_sums_leave_out_mig_devices_and_what_is_not_told() -> None:
    held = rows(device(1, 1, mem_used=10, power=100, pcie_rx=1e9),
                device(1, 2, mem_used=5, power=NAN, pcie_rx=2e9),
                device(1, 3, mem_used=4, mig=1, power=50))  # fmt: skip
    assert lane("used", held, 1) == [15]
    assert lane("power", held, 1) == [100]
    assert lane("pcie_rx", held, 1) == [3e9]


def test_worst_of_devices() -> None:
    bit = {name: 1 << i for i, name in enumerate(nv.THROTTLE_REASONS)}
    held = rows(
        device(1, 1, sm_clock=1800, sm_clock_max=2000, temperature=50, throttle_known=1),
        device(1, 2, sm_clock=500, sm_clock_max=2000, temperature=90, throttle_known=1,
               throttle=bit["hw_thermal_slowdown"] | bit["gpu_idle"]),
        device(1, 3, sm_clock=9, sm_clock_max=0, throttle_known=0, throttle=bit["hw_slowdown"]),
        device(1, 4, throttle_known=1, throttle=sum(bit[b] for b in nv.BENIGN)),
    )  # fmt: skip
    assert lane("clock", held, 1) == [25]
    assert lane("temperature", held, 1) == [90]
    assert lane("throttled", held, 1) == [1]
    assert lane("throttled", held[held["gpu"] == 3], 1) == pytest.approx([NAN], nan_ok=True)


def test_any_rows_have_lanes() -> None:
    for seed in range(3):
        held = random_rows(nv.NVML_DEVICE, 60, seed, T, 5 * SECOND)
        held["gpu"] %= 5
        for key, one in BY_KEY.items():
            if one.stream == "nvml.device":
                with np.errstate(all="ignore"):
                    assert len(lane(key.removeprefix("nvml."), held, 5)) == 5


def scene(simulated: int = 1) -> MemorySession:
    s = MemorySession(live=False)
    s.append("meta.coverage", t=T, probe=["nvml", "memory", "launches", "calls"], program="",
             status=0)  # fmt: skip
    for id, name, parent, state in ((1, "H200", "", 0), (2, "H200", "", 1), (3, "1g", "U1", 0)):
        s.append("meta.gpu", t=T, id=id, index=id - 1 if id < 3 else 0, simulated=simulated,
                 state=state, uuid=[f"U{id}"], name=[name], parent=[parent],
                 untold=["not supported: power"])  # fmt: skip
    last = rows(
        *(device(t, sm=80, mem_used=60 << 30, mem_total=140 << 30, sm_clock=990, temperature=93,
                 sm_clock_max=1980, throttle_known=1, throttle=0x40, ecc_uncorrected=2)
          for t in range(1, 10)),
        device(3, 2, power=300), device(9, 3, mig=1, mem_used=1 << 30, mem_total=10 << 30),
    )  # fmt: skip
    s.append_rows(nv.NVML_DEVICE, last)
    s.append("nvml.process", t=T + 9 * SECOND, dt=SECOND, gpu=1, pid=[77, 4190000], known=[1, 0],
             comm=[b"vllm", b""], mem_used=[50 << 30, NAN], sm=[70, NAN])  # fmt: skip
    s.append("nvml.xid", t=T + 3 * SECOND, gpu=2, xid=79, meaning=[meaning(79)])
    s.append("cpu.load", t=T + (np.arange(9) + 1) * SECOND, dt=SECOND)
    s.refresh()
    return s


def test_gpus_of_a_session() -> None:
    s, end = scene(), T + 9 * SECOND
    whole, part, lost = gpus(s, T, end)
    assert [whole.label, part.label, lost.label] == ["GPU 0", "MIG 0", "GPU 1"]
    assert (whole.throttle, whole.slowed, whole.sm_mean) == (("hw_thermal_slowdown",), 1, 80)
    assert lost.state == "lost"
    assert math.isnan(lost.values["power"])  # what it last said holds no more
    assert [(p.pid, p.known) for p in whole.processes] == [(77, True), (4190000, False)]
    assert [(x.xid, x.gpu) for x in xids(s, T, end)] == [(79, 2)]
    assert xids(s, T + 4 * SECOND, end) == []
    old = gpus(s, T, end + 10 * SECOND)[0]
    assert math.isnan(old.values["sm"])
    said = plain([whole], [])["gpus"][0]
    assert (said["values"]["power"], said["values"]["sm"]) == (None, 80)


def test_reasons_have_names() -> None:
    assert reasons(0x44) == ("sw_power_cap", "hw_thermal_slowdown")
    assert reasons(1 << 40 | 1) == ("gpu_idle", "0x10000000000")
    assert reasons(0) == ()


def test_once_and_report_show_gpus_and_say_that_they_are_simulated() -> None:
    s = scene()
    text = once(s, 200, ASCII)
    assert "! SIMULATED GPU" in text
    assert "throttled: hw_thermal_slowdown; 2 uncorrected ECC errors" in text
    assert "vllm:77, memory 50.0G, SM 70.0%" in text
    assert "PID 4190000, which is not in /proc here, memory n/a, SM n/a" in text
    assert "Xid 79 on GPU 1: the GPU has fallen off the bus" in text
    line = next(x for x in text.splitlines() if "GPU 0 H200" in x)
    assert line.split()[3:10] == ["80.0%", "80.0%", "60.0G/140G", "50.0%", "n/a", "93.0C", "n/a"]
    assert "LOST" in next(x for x in text.splitlines() if "GPU 1 H200" in x)
    said = report(s, T, T + 9 * SECOND, Thresholds(), 10)
    assert [g["simulated"] for g in said["gpus"]] == [True] * 3
    assert said["xids"][0]["xid"] == 79
    assert said["nvml"]["status"] == "attached"


def test_a_real_gpu_is_not_called_simulated_and_no_gpu_is_not_mentioned() -> None:
    assert "SIMULATED" not in once(scene(simulated=0), 200, ASCII)
    s = MemorySession(live=False)
    s.append("cpu.load", t=T + (np.arange(9) + 1) * SECOND, dt=SECOND)
    s.append("meta.coverage", t=T, probe=["nvml"], program="", status=st.STATUSES.index("off"),
             reason=["no library"])  # fmt: skip
    s.refresh()
    text = once(s, 120, ASCII)
    assert sum("GPUs" in line for line in text.splitlines()) == 1
    assert gpu_lines([], []) == []


@pytest.mark.parametrize("seed", range(4))
def test_any_rows_are_drawn(seed: int) -> None:
    s = MemorySession(live=False)
    for stream in nv.NVML_STREAMS:
        held = random_rows(stream, 60, seed, T, 5 * SECOND)
        for name in {"gpu", "id"} & set(stream.by_name):
            held[name] %= 7
        s.append_rows(stream, held)
    s.refresh()
    with np.errstate(all="ignore"):
        assert once(s, 100, ASCII).isascii()
        json.dumps(report(s, T, T + 5 * SECOND, Thresholds(), 10), allow_nan=False)


def test_every_xid_has_a_sentence() -> None:
    assert all(meaning(n) for n in range(1, 200))
    assert "reset" in meaning(95)
