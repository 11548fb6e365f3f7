"""Softirqs that the kernel counted and no BPF program was run for.

Some kernels of sandboxes run no BPF program while a thread of PID 1 is current: softirqs that
interrupt it are in /proc/softirqs and nowhere else.  The kernel counts a softirq right before its
entry tracepoint (``handle_softirqs`` in kernel/softirq.c), so the two counts can be compared.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import numpy.typing as npt

from dsprobe.probes.probe import online_cpus
from dsprobe.recordings.streams import VECTORS

Counts = npt.NDArray[np.int64]

PATH = Path("/proc/softirqs")
_MAX_BYTES = 4 << 20  # 8192 CPUs take 1 MB
_INDEX = {name: i for i, name in enumerate(VECTORS)}


def softirqs(cpus: int, path: Path = PATH) -> Counts:
    """/proc/softirqs as (CPU, vector) of CPUs below ``cpus``, each a count modulo 2**32
    (``struct kernel_stat`` holds unsigned int).

    CPUs without a column and vectors without a line read 0.  Raises OSError, and ValueError where
    the text is another one.
    """
    with path.open("rb") as f:
        header, *lines = f.read(_MAX_BYTES).decode("ascii", "replace").splitlines() or [""]
    columns = np.array([int(name.removeprefix("CPU")) for name in header.split()], np.int64)
    out = np.zeros((cpus, len(VECTORS)), np.int64)
    ours = (columns >= 0) & (columns < cpus)
    for line in lines:
        name, _, values = line.partition(":")
        if (vec := _INDEX.get(name.strip())) is not None:
            counts = np.array(values.split(), np.int64)
            if len(counts) != len(columns):
                raise ValueError(f"{path} has {len(counts)} values for {len(columns)} CPUs")
            out[columns[ours], vec] = counts[ours]
    return out


class Unseen:
    """How many softirqs ran unseen since it was made: at least so many, and never more.

    ``seen`` is what the programs had counted before, as (CPU, vector).  The kernel's counters must
    be read after that ``seen`` here, and before the one of each :meth:`update`: what runs between
    two readings then makes the difference too small, never too large.
    """

    def __init__(self, seen: Counts, path: Path = PATH) -> None:
        self._path, self._cpus = path, len(seen)
        self._online = _online(self._cpus)
        self._kernel = softirqs(self._cpus, path)
        self._seen = self._last = seen
        self._short = np.zeros_like(seen)
        """What the programs are behind by, since the start."""
        self._most = np.zeros(len(seen), np.int64)
        """By CPU, the most that it has ever been for certain."""
        self.ran = 0
        """How many softirqs the kernel has counted meanwhile."""

    def read(self) -> tuple[Counts, npt.NDArray[np.bool_]]:
        """What :meth:`update` needs, to be read before the programs' counts."""
        online = _online(self._cpus)
        return softirqs(self._cpus, self._path), online

    def update(self, read: tuple[Counts, npt.NDArray[np.bool_]], seen: Counts) -> int:
        """How many more are known to have run unseen since the last call."""
        kernel, online = read
        grown = (kernel - self._kernel) % (1 << 32)
        # A CPU that was offline may show 0 meanwhile, and one that came back begin anew.
        back = (grown >= 1 << 31).any(axis=1)
        trusted = online & self._online & ~back
        self._short[trusted] += (grown - (seen - self._seen))[trusted]
        # Where counting begins anew, from a reading of the programs' that is older than ``kernel``.
        self._seen = np.where(trusted[:, None], seen, self._last)
        self._last = seen
        self._kernel, self._online = kernel, online & ~back
        self.ran += int(grown[trusted].sum())
        # One softirq of a CPU may have been counted by the kernel and not yet by its program.
        certain = np.maximum(self._short, 0).sum(axis=1) - 1
        before = int(self._most.sum())
        np.maximum(self._most, certain, out=self._most)
        return int(self._most.sum()) - before


def _online(cpus: int) -> npt.NDArray[np.bool_]:
    online = np.zeros(cpus, np.bool_)
    online[[cpu for cpu in online_cpus() if cpu < cpus]] = True
    return online
