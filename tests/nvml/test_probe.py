"""What the probe says of simulated GPUs, and what it says when they change while it runs."""

from __future__ import annotations

import math
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from dsprobe.probes import nvml
from dsprobe.probes.nvml import HOPELESS_NS, Nvml, find_library
from dsprobe.recordings.nvmlstreams import GPU_STATES, NVML_DEVICE, PROCESS_KINDS, THROTTLE_REASONS
from tests.nvml.bench import SLOW, Bench
from tests.simgpu.nvml import UUID, State
from tests.support.wait import until

OK, LOST, GONE = (GPU_STATES.index(s) for s in ("ok", "lost", "gone"))
TOLD = tuple(f.name for f in NVML_DEVICE.fields if f.type.startswith("<f"))


def bits(*names: str) -> int:
    return sum(1 << THROTTLE_REASONS.index(n) for n in names)


def test_every_value_is_the_devices(bench: Bench) -> None:
    values = {
        "sm": 87, "memory": 41, "mem_used": 123456789012, "mem_total": 150754820096,
        "sm_clock": 1980, "sm_clock_max": 1985, "mem_clock": 3201, "mem_clock_max": 3202,
        "power": 512.5, "power_limit": 700, "temperature": 61, "temp_slowdown": 92,
        "temp_shutdown": 97, "pcie_rx": 1440000 * 1024, "pcie_tx": 812000 * 1024, "pcie_gen": 5,
        "pcie_width": 16, "ecc_corrected": 3, "ecc_uncorrected": 2, "remapped_corrected": 1,
        "remapped_uncorrected": 4, "remap_pending": 1, "remap_failed": 0,
    }  # fmt: skip
    bench.state.set({f"0.{k}": v for k, v in values.items()} | {"driver": "570.99"})
    row = bench.device(lambda r: r["pcie_rx"] > 0, "rows come")
    assert {k: float(row[k]) for k in values} == pytest.approx(values)
    assert set(TOLD) - set(values) == {"nvlink_rx", "nvlink_tx"}
    assert (row["throttle_known"], row["throttle"], row["mig"]) == (1, 0, 0)
    gpu = bench.gpus()[UUID.format(0)]
    assert (gpu["name"], gpu["pci"], gpu["driver"]) == (
        "Simulated GPU", "00000000:19:00.0", "570.99")  # fmt: skip
    assert (gpu["index"], gpu["simulated"], gpu["state"], gpu["parent"]) == (0, 1, OK, "")
    assert bench.probe.standing == ("attached", "")


def test_rows_come_while_something_changes_else_as_what_is_slow(bench: Bench) -> None:
    bench.until(lambda: len(bench.rows("nvml.device")) >= 3, "a quiet device has few rows")
    quiet = bench.rows("nvml.device")
    assert (np.diff(quiet["t"].astype(np.int64)) > SLOW * 0.9).all()
    begun = time.monotonic_ns()

    def busy() -> bool:
        bench.state.set({"0.sm": (time.monotonic_ns() // 5_000_000) % 100})
        return len(bench.rows("nvml.device")) >= len(quiet) + 12

    bench.until(busy, "a busy one has more")
    assert time.monotonic_ns() - begun < 12 * SLOW  # which quiet ones would take
    rows = bench.rows("nvml.device")
    t = rows["t"].astype(np.int64)
    assert (rows["dt"][1:] == np.diff(t)).all()  # each speaks for the time since the one before


def test_nvlink_is_a_rate_of_its_counters(bench: Bench) -> None:
    bench.state.set({"0.nvlink_rx_kib": 1000, "0.nvlink_tx_kib": 5000})
    bench.device(lambda r: r["nvlink_rx"] == 0, "nothing moves")
    bench.state.set({"0.nvlink_rx_kib": 1000 + 2**20, "0.nvlink_tx_kib": 5000 + 2**21})
    row = bench.device(lambda r: r["nvlink_rx"] > 0, "it moves")
    assert row["nvlink_rx"] == pytest.approx(
        2**30 / (SLOW / 1e9), rel=0.5
    )  # over the time that one reading is apart
    assert row["nvlink_tx"] == pytest.approx(2 * row["nvlink_rx"], rel=1e-3)


def test_unsupported_is_not_zero(bench: Bench) -> None:
    bench.device(lambda r: r["power"] == 300, "all is told at first")
    bench.state.set({"0.unsupported": "power,throttle,remapped,sm", "0.forbidden": "pcie_rx"})
    row = bench.device(lambda r: math.isnan(r["power"]) and math.isnan(r["pcie_rx"]), "less is")
    assert all(math.isnan(row[n]) for n in ("sm", "memory", "remap_failed", "nvlink_rx"))
    assert (row["throttle_known"], row["throttle"]) == (0, 0)
    assert row["mem_used"] == 1e9
    why = bench.until(lambda: (w := str(bench.gpus()[UUID.format(0)]["untold"])) and
                      "permissions" in w and "power" in w and w, "it says why")  # fmt: skip
    reasons = dict(part.split(": ") for part in why.split("; "))
    assert reasons["insufficient permissions"] == "pcie_rx"
    assert {"power", "throttle", "sm", "remap_failed"} <= set(reasons["not supported"].split(", "))
    bench.state.set({}, "0.unsupported", "0.forbidden")
    bench.device(lambda r: r["power"] == 300 and r["pcie_rx"] > 0, "it is told again")
    bench.until(lambda: "power" not in str(bench.gpus()[UUID.format(0)]["untold"]), "and so said")


def test_a_throttle_while_running(bench: Bench) -> None:
    bench.device(lambda r: r["throttle_known"], "rows come")
    wanted = bits("sw_power_cap", "hw_thermal_slowdown")
    bench.state.set({"0.throttle": wanted, "0.sm_clock": 900, "0.temperature": 93})
    row = bench.device(lambda r: r["throttle"] == wanted, "the reasons")
    assert row["sm_clock"] == 900
    bench.state.set({"0.throttle": bits("gpu_idle")})
    bench.device(lambda r: r["throttle"] == 1, "another reason")


def test_an_xid_while_running(bench: Bench) -> None:
    bench.state.set({"gpus": 2})
    bench.standing("attached")
    bench.state.xid(79, gpu=1)
    bench.until(lambda: len(bench.rows("nvml.xid")) == 1, "the first")
    bench.state.xid(99999, gpu=0)
    bench.until(lambda: len(bench.rows("nvml.xid")) == 2, "the second")
    first, second = bench.rows("nvml.xid")
    ids = {u: int(g["id"]) for u, g in bench.gpus().items()}
    assert (first["gpu"], first["xid"]) == (ids[UUID.format(1)], 79)
    assert "fallen off the bus" in first["meaning"]
    assert (second["gpu"], second["xid"]) == (ids[UUID.format(0)], 99999)
    assert "not in our list" in second["meaning"]


def test_a_lost_gpu_comes_back(bench: Bench) -> None:
    bench.state.set({"gpus": 2})
    bench.standing("attached")
    bench.state.set({"1.lost": 1})
    reason = bench.standing("shed")
    assert reason.startswith("GPU 1 is lost (gpu is lost)")
    gpu = bench.gpus()[UUID.format(1)]
    assert gpu["state"] == LOST
    one = bench.device(lambda r: r["gpu"] != gpu["id"], "the other one goes on")
    rows = bench.rows("nvml.device")
    assert (rows["gpu"][rows["t"] >= one["t"]] != gpu["id"]).all()
    bench.state.set({"0.lost": 1})
    assert "GPU 0 is lost" in bench.standing("missing")
    bench.state.set({}, "0.lost", "1.lost")
    bench.standing("attached")
    assert bench.gpus()[UUID.format(1)]["state"] == OK
    assert bench.device(lambda r: r["gpu"] == gpu["id"], "it has rows again")["power"] == 300


def test_a_gpu_that_is_lost_before_we_come(bench: Bench) -> None:
    bench.state.set({"gpus": 2, "0.lost": 1})
    assert "GPU 0 is lost" in bench.standing("shed")
    bench.state.set({}, "0.lost")
    bench.standing("attached")
    assert bench.gpus()[UUID.format(0)]["state"] == OK


def test_a_hang_is_stalled_and_an_xid_is_told_meanwhile(bench: Bench) -> None:
    bench.standing("attached")
    bench.state.set({"hang": 1})
    bench.state.xid(119)
    bench.until(lambda: len(bench.rows("nvml.xid")) == 1, "the Xid")
    begun = time.monotonic_ns()
    bench.clock = 3_000_000_000  # so long it takes to be called a hang
    assert "not answered" in bench.standing("stalled")
    bench.clock = 0
    bench.collect()
    assert time.monotonic_ns() - begun < 2_000_000_000  # nobody waited for it
    bench.state.set({}, "hang")
    bench.standing("attached")
    rows = bench.rows("nvml.device")
    assert rows["dt"].max() <= 1_500_000_000  # no row speaks for the time of the hang


def test_a_hang_at_the_start(bench: Bench) -> None:
    bench.state.set({"hang": 1})
    bench.collect()
    assert bench.probe.standing == ("", "")
    bench.clock = 4_000_000_000
    bench.standing("stalled")
    bench.state.set({}, "hang")
    bench.standing("attached")


def test_a_process_that_hangs_for_good_is_replaced(bench: Bench) -> None:
    bench.standing("attached")
    first = bench.probe._child
    assert first
    bench.state.set({"hang": 1})
    bench.clock = HOPELESS_NS + 10**9
    bench.until(lambda: first.poll() == -signal.SIGKILL, "it is killed")
    bench.state.set({}, "hang")
    bench.standing("attached")
    assert bench.probe._child is not first


def test_a_crash_of_the_library(bench: Bench) -> None:
    bench.standing("attached")
    bench.state.set({"crash": 1})
    assert "signal 6" in bench.standing("missing")
    bench.state.set({}, "crash")
    bench.standing("attached")


def test_a_driver_that_is_reloaded(bench: Bench) -> None:
    bench.state.set({"gpus": 2, "driver": "550.1"})
    bench.standing("attached")
    before = {u: int(g["id"]) for u, g in bench.gpus().items()}
    bench.state.set({"not_loaded": 1})
    assert bench.standing("missing") == "the NVIDIA driver is not loaded; modprobe nvidia"
    bench.state.set({"driver": "570.2", "mismatch": 1}, "not_loaded")
    bench.until(lambda: "different versions" in bench.probe.standing[1], "the library is of before")
    bench.state.set({"gpus": 1}, "mismatch")
    assert "GPU 1 is not listed any more" in bench.standing("shed")
    assert bench.gpus()[UUID.format(1)]["state"] == GONE
    bench.state.set({"gpus": 2})
    bench.standing("attached")
    after = bench.gpus()
    assert {u: int(g["id"]) for u, g in after.items()} == before
    assert {str(g["driver"]) for g in after.values()} == {"570.2"}


def test_mig_devices_come_and_go(bench: Bench) -> None:
    bench.device(lambda r: r["sm"] == 50, "a whole device")
    bench.state.set({"0.mig": 2, "0.mig1.mem_used": 777, "0.mig1.pids": "1:4096:-"})
    part = bench.device(lambda r: r["mig"] and r["mem_used"] == 777, "a part of it")
    assert all(math.isnan(part[n]) for n in ("sm", "power", "sm_clock"))
    whole = bench.device(lambda r: not r["mig"] and math.isnan(r["sm"]), "the whole has rows too")
    assert whole["power"] == 300
    gpu = next(g for g in bench.gpus().values() if g["id"] == part["gpu"])
    assert (gpu["parent"], gpu["index"], gpu["pci"]) == (UUID.format(0), 1, "00000000:19:00.0")
    assert str(gpu["uuid"]).startswith("MIG-")
    bench.until(lambda: (bench.rows("nvml.process")["gpu"] == part["gpu"]).any(), "its process")
    bench.state.set({}, "0.mig")
    bench.until(lambda: bench.gpus()[str(gpu["uuid"])]["state"] == GONE, "they go")
    assert bench.probe.standing == ("attached", "")  # as somebody wished
    bench.device(lambda r: r["sm"] == 50, "the whole device again")


def test_processes_are_looked_up_in_proc(bench: Bench) -> None:
    dead = subprocess.Popen(["true"])
    dead.wait()
    me = Path("/proc/self/comm").read_text().strip().encode()
    bench.state.set({"0.pids": f"{os.getpid()}:{5 << 30}:40,{dead.pid}:-:-",
                     "0.graphics_pids": f"1:{1 << 20}:-"})  # fmt: skip
    bench.until(lambda: len(bench.rows("nvml.process")) >= 3, "processes are listed")
    of = {int(r["pid"]): r for r in bench.rows("nvml.process")[:3]}
    mine, gone, first = of[os.getpid()], of[dead.pid], of[1]
    assert (mine["known"], mine["comm"], mine["mem_used"], mine["sm"]) == (1, me, 5 << 30, 40)
    assert (gone["known"], gone["comm"]) == (0, b"")
    assert math.isnan(gone["mem_used"])
    assert math.isnan(gone["sm"])
    assert (PROCESS_KINDS[first["kind"]], first["known"]) == ("graphics", 1)


def test_changed_pids(bench: Bench) -> None:
    bench.state.set({"0.pids": f"{os.getpid()}:1000:1"})
    bench.until(lambda: len(bench.rows("nvml.process")), "a process")
    bench.state.set({"0.pids": "4190000:1000:1"})  # as a driver does that numbers them anew
    bench.until(lambda: bench.rows("nvml.process")["pid"][-1] == 4190000, "another number")
    assert bench.rows("nvml.process")["known"][-1] == 0
    n = len(bench.rows("nvml.process"))
    bench.state.set({}, "0.pids")
    now = time.monotonic_ns()
    bench.until(
        lambda: (bench.rows("nvml.device")["t"] > now + 2 * SLOW).any(), "it was read twice"
    )
    assert len(bench.rows("nvml.process")) <= n + 1


def test_no_library_costs_no_process_and_is_looked_for_rarely(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(nvml.subprocess, "Popen", lambda *a, **k: pytest.fail("a process"))
    now, looks = [10**12], 0

    def find() -> None:
        nonlocal looks
        looks += 1

    probe = Nvml(find, now=lambda: now[0])
    probe.start()
    for _ in range(4 * 30):  # ticks of 30 s
        now[0] += 250_000_000
        assert probe.collect(now[0]) == []
    assert looks == 1 + 3
    status, reason = probe.standing
    assert status == "off"
    assert "no libnvidia-ml.so.1" in reason


def test_where_the_library_is_looked_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("LD_LIBRARY_PATH", raising=False)
    cache, odd = tmp_path / "cache", tmp_path / "odd"
    odd.mkdir()
    assert find_library([str(odd)], cache) is None
    library = odd / "libnvidia-ml.so.1"
    library.touch()
    assert find_library([str(odd)], cache) == str(library)
    cache.write_bytes(b"glibc-ld.so.cache1.1\0libnvidia-ml.so.1\0" + bytes(library) + b"\0")
    assert find_library([], cache) == ""
    library.unlink()
    assert find_library([], cache) is None  # the cache is of before
    library.touch()
    monkeypatch.setenv("LD_LIBRARY_PATH", f"/nowhere:{odd}")
    assert find_library([], tmp_path / "none") == ""


def test_a_file_that_is_no_library_and_a_missing_pynvml(tmp_path: Path) -> None:
    path = tmp_path / "libnvidia-ml.so.1"
    path.write_text("not a library")
    probe = Nvml(str(path))
    probe.start()
    until(lambda: (probe.collect(0), probe.standing[0])[1] == "missing", "it says so")
    assert "cannot be loaded" in probe.standing[1]
    said = subprocess.run(
        [sys.executable, "-c", "import sys; sys.modules['pynvml'] = None\n"
         "from dsprobe.probes.nvmlreader import run\nrun({}, print)"],
        capture_output=True, text=True, cwd="/", timeout=60,
    )  # fmt: skip
    assert "pip install nvidia-ml-py" in said.stdout


def test_the_process_ends_with_us(bench: Bench, library: str, state: State) -> None:
    text = (
        "import sys, time\nfrom dsprobe.probes.nvml import Nvml\n"
        f"p = Nvml({library!r})\np.start()\nprint(p._child.pid, flush=True)\ntime.sleep(60)\n"
    )
    us = subprocess.Popen([sys.executable, "-c", text], stdout=subprocess.PIPE, text=True, cwd="/")
    assert us.stdout
    child = int(us.stdout.readline())
    us.kill()
    us.wait()
    until(lambda: not _runs(child), "its process has ended")


def _runs(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False
