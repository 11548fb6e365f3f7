"""GPUs as NVIDIA's management library tells of them.

The library is called by another process (:mod:`dsprobe.probes.nvmlreader`): a driver that hangs
then leaves the agent free to go on and to end.  A process lives as long as what it loaded is of
use; another one follows when the driver was reloaded.  Where there is no library nothing is
started: it is looked for every ten seconds.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import re
import subprocess
import sys
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import msgpack
import numpy as np

from dsprobe.probes.probe import Batch, Probe
from dsprobe.recordings.model import Rows, Stream
from dsprobe.recordings.nvmlstreams import (
    GPU_STATES,
    META_GPU,
    NVML_STREAMS,
    NVML_XID,
    PROCESS_KINDS,
)
from dsprobe.recordings.xids import meaning

SECOND = 10**9
LIBRARY = "libnvidia-ml.so.1"
FOLDERS = (
    "/usr/lib/wsl/lib",  # WSL 2
    "/usr/local/nvidia/lib64",  # Google's hosts and older container runtimes
    *(f"/run/nvidia/driver/usr/{lib}" for lib in
      ("lib64", "lib/x86_64-linux-gnu", "lib/aarch64-linux-gnu")),  # the driver in a container
)  # fmt: skip
"""Where the linker does not look."""
CACHE = Path("/etc/ld.so.cache")

AGAIN_NS, AGAIN_MOST_NS = 10 * SECOND, 60 * SECOND
SILENT_NS = 3 * SECOND
HOPELESS_NS = 60 * SECOND
"""A process that has been silent for so long is killed, and if that ends it, another is tried."""
MAX_READ = 8 << 20

_WORDS = {("meta.gpu", "state"): GPU_STATES, ("nvml.process", "kind"): PROCESS_KINDS}
_STREAMS = {s.name: s for s in NVML_STREAMS}


def find_library(folders: Iterable[str] = FOLDERS, cache: Path = CACHE) -> str | None:
    """Path of the library; empty where the linker finds it by itself; None where there is none."""
    for folder in os.environ.get("LD_LIBRARY_PATH", "").split(":"):
        if folder and os.path.exists(f"{folder}/{LIBRARY}"):
            return ""
    try:
        listed = re.findall(rb"/[^\0]*/libnvidia-ml\.so\.1(?=\0)", cache.read_bytes())
    except OSError:
        listed = []
    if any(os.path.exists(path) for path in listed):
        return ""
    paths = (f"{folder}/{LIBRARY}" for folder in folders)
    return next((path for path in paths if os.path.exists(path)), None)


class Nvml(Probe):
    """``library`` is its path, or what to ask for it; ``now`` gives CLOCK_MONOTONIC ns.  After
    ``again`` ns another process is tried, and every ``slow`` ns is read what changes slowly."""

    name = "nvml"
    doc = "GPUs: utilisation, memory, clocks, throttling, power, Xid errors (NVML)"
    streams = NVML_STREAMS
    blocking = True

    def __init__(
        self,
        library: str | Callable[[], str | None] = find_library,
        proc: Path = Path("/proc"),
        now: Callable[[], int] = time.monotonic_ns,
        again: int = AGAIN_NS,
        slow: int = SECOND,
    ) -> None:
        self._find = (lambda: library) if isinstance(library, str) else library
        self._proc, self._now, self._again, self._slow = proc, now, again, slow
        self._wait = again
        self._next = 0
        self._child: subprocess.Popen[bytes] | None = None
        self._unpacker = msgpack.Unpacker()
        self._heard = 0
        self._why: list[Any] | None = None  # its last words
        self._fresh: set[int] | None = None  # announced by the process, until its first beat
        self._gpus: dict[int, dict[str, Any]] = {}
        self._state = ("", "")

    def start(self) -> None:
        """Begin to look; :attr:`standing` says what became of it."""
        self._open()

    def collect(self, now: int) -> list[Batch]:
        if self._child is None:
            self._open()
        batches = self._take() if self._child else []
        silent = self._now() - self._heard
        if self._child and silent > SILENT_NS:
            self._state = ("stalled", "the NVIDIA driver has not answered NVML for"
                           f" {SILENT_NS // SECOND} s; see dmesg | grep -i nvrm")  # fmt: skip
            if silent > HOPELESS_NS:
                self._child.kill()
        return batches

    @property
    def standing(self) -> tuple[str, str]:
        return self._state

    def close(self) -> None:
        """End the process; one that hangs in the kernel ends when the driver lets it."""
        child, self._child = self._child, None
        if child is not None:
            child.kill()
            assert child.stdout
            child.stdout.close()
            with contextlib.suppress(subprocess.TimeoutExpired):
                child.wait(0.2)

    # -- the process -------------------------------------------------------------------------------

    def _open(self) -> None:
        now = self._now()
        if now < self._next:
            return
        self._next = now + self._wait
        library = self._find()
        if library is None:
            self._state = ("off", f"this machine has no {LIBRARY}; with an NVIDIA driver installed"
                           " GPUs are seen within ten seconds")  # fmt: skip
            return
        known = {gpu["uuid"] or f"place {gpu['index']}": id for id, gpu in self._gpus.items()}
        job = {"library": library, "known": known, "proc": str(self._proc), "parent": os.getpid(),
               "slow": self._slow}  # fmt: skip
        isolated = ["-I"] if sys.flags.isolated else []
        self._child = subprocess.Popen(
            [sys.executable, *isolated, "-m", "dsprobe.probes.nvmlreader", json.dumps(job)],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            cwd="/",  # -m puts the working directory, which may be anybody's, in front
        )
        assert self._child.stdout
        os.set_blocking(self._child.stdout.fileno(), False)
        self._unpacker = msgpack.Unpacker(max_buffer_size=MAX_READ)
        self._heard, self._fresh, self._why = now, set(), None

    def _take(self) -> list[Batch]:
        """What it has written since the last call."""
        assert self._child
        assert self._child.stdout
        ended, batches = False, []
        with contextlib.suppress(BlockingIOError):
            while not ended:
                data = os.read(self._child.stdout.fileno(), 1 << 16)
                self._unpacker.feed(data)
                ended = not data
        for message in self._unpacker:
            if message[0] == "rows":
                batches += self._rows(_STREAMS[message[1]], message[2])
            elif message[0] == "beat":
                batches += self._beat()
            else:
                self._why = message
        if ended:
            self._ended()
        return batches

    def _ended(self) -> None:
        assert self._child
        code, why = self._child.wait(), self._why
        self.close()
        now = self._now()
        if why and why[0] == "again":
            self._next = 0
            return
        how = f"was ended by signal {-code}" if code < 0 else f"ended with code {code}"
        said = str(why[1]) if why else f"the process that reads NVML {how}; another one is tried"
        self._state = ("missing", said)
        self._next = now + self._wait
        self._wait = min(2 * self._wait, max(AGAIN_MOST_NS, self._again))

    # -- what it says ------------------------------------------------------------------------------

    def _rows(self, stream: Stream, said: list[dict[str, Any]]) -> list[Batch]:
        for row in said:
            for (name, field), words in _WORDS.items():
                if name == stream.name:
                    row[field] = words.index(row[field])
            if stream is NVML_XID:
                row["meaning"] = meaning(row["xid"])
            if stream is META_GPU:
                self._gpus[row["id"]] = row
                if self._fresh is not None:
                    self._fresh.add(row["id"])
        return [(stream, made(stream, said))]

    def _beat(self) -> list[Batch]:
        """All devices have answered: so what one that is new has not announced is gone."""
        self._heard, self._wait = self._now(), self._again
        batches: list[Batch] = []
        if self._fresh is not None:
            gone = GPU_STATES.index("gone")
            missed = [g for id, g in self._gpus.items() if id not in self._fresh
                      and g["state"] != gone]  # fmt: skip
            self._fresh = None
            for gpu in missed:
                gpu |= {"state": gone, "t": self._now()}
                batches.append((META_GPU, made(META_GPU, [gpu])))
        self._state = self._judged()
        return batches

    def _judged(self) -> tuple[str, str]:
        """Attached where every device answers; MIG devices come and go as somebody wishes."""
        whole = [g for g in self._gpus.values() if not g["parent"]]
        down = [g for g in whole if GPU_STATES[g["state"]] != "ok" and (g["uuid"] or _lost(g))]
        if not down:
            return ("attached", "" if whole else "the NVIDIA driver lists no GPU")
        named = ", ".join(_named(g) for g in down[:4]) + (", ..." if len(down) > 4 else "")
        if all(g in down for g in whole if g["uuid"] or _lost(g)):
            return ("missing", f"{named}; see dmesg | grep -i xid, then reset or restart")
        return ("shed", f"{named}; see dmesg | grep -i xid")


def made(stream: Stream, said: list[dict[str, Any]]) -> Rows:
    """Rows of ``stream``; floats that are not said are NaN."""
    rows = stream.empty(len(said))
    for f in stream.fields:
        none = math.nan if f.type.startswith("<f") else "" if f.is_text else 0
        rows[f.name] = np.array([row.get(f.name, none) for row in said], rows.dtype[f.name])
    return rows


def _lost(gpu: dict[str, Any]) -> bool:
    return GPU_STATES[gpu["state"]] == "lost"


def _named(gpu: dict[str, Any]) -> str:
    why = gpu["untold"].partition(": ")[0] if _lost(gpu) else ""
    state = "is lost" if _lost(gpu) else "is not listed any more"
    return f"GPU {gpu['index']} {state}" + (f" ({why})" if why else "")
