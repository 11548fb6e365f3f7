"""nvidia-ml-py itself on the simulated library, and our reader's single steps on both."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

from tests.simgpu.nvml import UUID, State, libnvidia_ml

ROOT = Path(__file__).parents[2]


def run(text: str) -> Any:
    """What ``text`` prints as JSON in a process of its own, which finds the library by itself."""
    env = os.environ | {"LD_LIBRARY_PATH": str(libnvidia_ml().parent), "PYTHONPATH": str(ROOT)}
    done = subprocess.run([sys.executable, "-c", textwrap.dedent(text)], env=env, cwd="/",
                          capture_output=True, text=True, timeout=60)  # fmt: skip
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_pynvml_runs_on_it(state: State) -> None:
    state.set({"gpus": 3, "driver": "570.1", "2.mem_used": 123456789, "1.sm": 77, "0.mig": 2,
               "2.pids": "4711:1000:40,12:-:-", "2.unsupported": "power"})  # fmt: skip
    said = run(f"""
        import json, os, pynvml as N
        N.nvmlInit()
        h = [N.nvmlDeviceGetHandleByIndex(i) for i in range(N.nvmlDeviceGetCount())]
        part = N.nvmlDeviceGetMigDeviceHandleByIndex(h[0], 1)
        def refused(call, *args):
            try: return call(*args)
            except N.NVMLError as e: return type(e).__name__
        found = dict(
            driver=N.nvmlSystemGetDriverVersion(), uuid=[N.nvmlDeviceGetUUID(d) for d in h],
            name=N.nvmlDeviceGetName(h[0]), pci=N.nvmlDeviceGetPciInfo(h[1]).busId,
            memory=N.nvmlDeviceGetMemoryInfo(h[2], version=N.nvmlMemory_v2).used,
            sm=N.nvmlDeviceGetUtilizationRates(h[1]).gpu,
            processes=[(p.pid, p.usedGpuMemory)
                       for p in N.nvmlDeviceGetComputeRunningProcesses_v3(h[2])],
            shares=[(s.pid, s.smUtil) for s in N.nvmlDeviceGetProcessUtilization(h[2], 0)],
            part=N.nvmlDeviceGetUUID(part),
            refused=[refused(N.nvmlDeviceGetPowerUsage, h[2]),
                     refused(N.nvmlDeviceGetUtilizationRates, part),
                     refused(N.nvmlDeviceGetFanSpeed, h[0])])
        s = N.nvmlEventSetCreate()
        N.nvmlDeviceRegisterEvents(h[1], N.nvmlEventTypeXidCriticalError, s)
        found["quiet"] = refused(N.nvmlEventSetWait, s, 1)
        with open({str(state.path)!r}, "a") as f: f.write("1.xid=79\\n1.xid_seq=1\\n")
        e = N.nvmlEventSetWait(s, 5000)
        found["xid"] = (e.eventType, e.eventData, N.nvmlDeviceGetUUID(e.device))
        with open({str(state.path)!r}, "a") as f: f.write("1.lost=1\\n")
        found["lost"] = refused(N.nvmlDeviceGetPowerUsage, h[1])
        print(json.dumps(found))
    """)
    assert said == {
        "driver": "570.1",
        "uuid": [UUID.format(i) for i in range(3)],
        "name": "Simulated GPU",
        "pci": "00000000:29:00.0",
        "memory": 123456789,
        "sm": 77,
        "processes": [[4711, 1000], [12, None]],
        "shares": [[4711, 40]],
        "part": "MIG-51300000-0000-5000-8000-000000000001",
        "refused": ["NVMLError_NotSupported", "NVMLError_NotSupported",
                    "NVMLError_FunctionNotFound"],
        "quiet": "NVMLError_Timeout",
        "xid": [8, 79, UUID.format(1)],
        "lost": "NVMLError_GpuIsLost",
    }  # fmt: skip


def test_the_library_is_loaded_anew_while_a_device_stays_lost(state: State) -> None:
    state.set({"gpus": 2, "1.lost": 1})
    said = run("""
        import json
        from pathlib import Path
        from dsprobe.probes.nvmlreader import RELOAD_NS, Reader, _Again
        sent = []
        reader = Reader(sent.append, {}, Path("/proc"))
        now, again = 10**18, 0
        for after in (0, RELOAD_NS, RELOAD_NS + 10**9):
            try: reader.step(now + after)
            except _Again: again = after
        states = {r["index"]: r["state"] for m in sent if m[1:2] == ["meta.gpu"] for r in m[2]}
        print(json.dumps([again - RELOAD_NS, states, [m[0] for m in sent].count("beat")]))
    """)
    assert said == [10**9, {"0": "ok", "1": "lost"}, 3]


def test_the_reader_loads_no_numpy(state: State) -> None:
    assert (
        run("""
        import json, sys
        from pathlib import Path
        from dsprobe.probes.nvmlreader import Reader
        Reader(print, {}, Path("/proc"))
        print(json.dumps([m for m in ("numpy", "bcc", "textual") if m in sys.modules]))
    """)
        == []
    )
