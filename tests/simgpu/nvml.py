"""The simulated NVML: its library, built when first asked for, and the file that says what its GPUs
are like.

Keys of the whole: ``gpus`` (how many), ``driver`` (version), ``hang``, ``crash``, ``not_loaded``,
``mismatch``.  Keys of device 0: ``0.`` and a field of nvml.device; ``0.lost``, ``0.mig`` (number of
MIG devices), ``0.pids`` and ``0.graphics_pids`` (``PID:BYTES:SM%,...``, ``-`` for what is not
told), ``0.xid`` with ``0.xid_seq`` (another one raises it), ``0.nvlink_rx_kib`` and
``0.nvlink_tx_kib``, ``0.unsupported`` and ``0.forbidden`` (names of fields, with commas; ``sm``,
``memory_info``, ``fields``, ``processes``, ``shares``, ``remapped`` stand for what one call gives).
Of the MIG device in place 1: ``0.mig1.`` and so on.
"""

from __future__ import annotations

import os
from pathlib import Path

from tests.simgpu import build

SOURCE = build.HERE / "libnvidia-ml/nvml.c"
UUID = "GPU-51300000-0000-4000-8000-{:012}"


def libnvidia_ml() -> Path:
    """The library."""

    def make(work: Path) -> None:
        build.gcc(
            "-shared", "-fPIC", "-fvisibility=hidden", "-Wl,-soname,libnvidia-ml.so.1",
            "-o", str(work / "libnvidia-ml.so.1"), str(SOURCE),
        )  # fmt: skip

    return build.cached("libnvidia-ml", make, SOURCE) / "libnvidia-ml.so.1"


class State:
    """The file, which the library reads again at each call."""

    def __init__(self, path: Path, **values: object) -> None:
        self.path = path
        self._values: dict[str, object] = {}
        self.set(values)

    def set(self, values: dict[str, object], *without: str) -> None:
        """Change ``values``, take those ``without`` away, at once."""
        self._values |= values
        for name in without:
            self._values.pop(name, None)
        new = self.path.with_suffix(".new")
        new.write_text("".join(f"{k}={v}\n" for k, v in self._values.items()))
        os.rename(new, self.path)

    def xid(self, number: int, gpu: int = 0) -> None:
        """Have the driver report an Xid error."""
        seq = int(str(self._values.get(f"{gpu}.xid_seq", 0))) + 1
        self.set({f"{gpu}.xid": number, f"{gpu}.xid_seq": seq})
