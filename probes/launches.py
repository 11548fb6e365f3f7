"""Launches of kernels and graphs: how many, how regularly, which, and what a thread did instead.

Counts and histograms are kept by launches.bpf.c for each thread and each CUDA stream; single
launches come while a process makes few enough.  Kernels are named by the calls that give out their
handles; one that was given out before probes were attached has no name.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt

from dsprobe.probes import cudamaps, processes
from dsprobe.probes.cuda import Cuda
from dsprobe.probes.cudamaps import GAP, Places
from dsprobe.probes.functions import Class
from dsprobe.probes.hashmap import HashMap
from dsprobe.probes.probe import Batch, BpfProbe, Map, Program
from dsprobe.recordings.cudastreams import (
    CUDA_LAUNCH,
    CUDA_STREAM,
    CUDA_THREAD,
    LAUNCH_SLOTS,
    META_KERNEL,
)
from dsprobe.recordings.model import Field, Rows, Stream

_NAME = 256
_KERNEL = Stream(
    "meta.kernel", "A kernel was named, or launched without a name.", "launches.bpf.c",
    (
        Field("t", "<u8", "ns", "CLOCK_MONOTONIC"),
        Field("process", "<u4", "id", "process"),
        Field("id", "<u4", "id", "kernel"),
        Field("handle", "<u8", "handle", "CUfunction or CUkernel"),
        Field("name", f"S{_NAME}", "text", "its name, NUL at the end; empty where unknown"),
    ),
)  # fmt: skip
_STREAM = np.dtype(
    [("stream", "<u8"), ("process", "<u4"), ("thread", "<u4"), ("first", "<u8"), ("last", "<u8"),
     ("gaps", GAP, 2), ("hist", "<u4", LAUNCH_SLOTS)]
)  # fmt: skip
_STREAM_KEY = np.dtype([("stream", "<u8"), ("process", "<u4"), ("thread", "<u4")])
_KERNEL_KEY = np.dtype([("handle", "<u8"), ("process", "<u4"), ("pad", "<u4")])
_KERNEL_LEAF = np.dtype([("id", "<u4"), ("pad", "<u4"), ("hash", "<u8")])
CALM_NS = 1_000_000_000
"""So long after the last launch that was not kept it is said that they are again."""
IDLE_NS = 60_000_000_000
"""A stream that was not used for so long may lose its place to another."""


class Launches(BpfProbe):
    name = "launches"
    doc = "launches of kernels and graphs by process, thread and CUDA stream, and the gaps between"
    requires = (Cuda,)
    streams = (CUDA_LAUNCH, CUDA_THREAD, CUDA_STREAM, META_KERNEL)
    source = "launches.bpf.c"
    programs = (
        Program("launches_enter", "uprobe"),
        Program("launches_name", "uprobe"),
        Program("launches_named", "uretprobe"),
    )
    rings: ClassVar = {"cuda_kernel": _KERNEL, "cuda_launch": CUDA_LAUNCH}

    def __init__(self) -> None:
        self._shed: dict[int, int] = {}  # by PID: when a launch was last not kept
        self._idle: list[int] = []

    def build_on(self, required: BpfProbe) -> None:
        assert isinstance(required, Cuda)
        self._cuda = required
        required.serves[Class.LAUNCH] = ("launches_enter", "")
        required.serves[Class.NAME] = ("launches_name", "launches_named")

    def open(self, maps: Mapping[str, Map]) -> None:
        self._streams = Places(
            maps, "launch_streams", _STREAM, cudamaps.NEXT_STREAM, "launch_free_streams"
        )
        self._stream_of = HashMap(maps["launch_streams_of"], _STREAM_KEY, "<u4")
        self._kernels = HashMap(maps["launch_kernels"], _KERNEL_KEY, _KERNEL_LEAF)
        self._threads_before = np.zeros(0, cudamaps.THREAD)
        self._streams_before = np.zeros(0, _STREAM)
        self._known: set[int] = set()

    @property
    def shortage(self) -> str:
        if not self._shed:
            return ""
        pids = ", ".join(map(str, sorted(self._shed)))
        return (
            f"more than {self._cuda.budget:,} launches/s in process {pids}: not every one has a row"
            " of its own; counts and intervals are of all"
        )

    def took(self, ring: str, rows: Rows) -> list[Batch]:
        if ring == "cuda_launch":
            return [(CUDA_LAUNCH, rows)]
        names = [processes.printable(n, _NAME) for n in rows["name"].tolist()]
        return [(META_KERNEL, META_KERNEL.rows(
            t=rows["t"], id=rows["id"], process=rows["process"], handle=rows["handle"], name=names,
        ))]  # fmt: skip

    def collect(self, now: int) -> list[Batch]:
        epoch = int(self._cuda.config["epoch"][0])
        self._cuda.config["epoch"] = epoch + 1  # from now on the other one of two gaps is written
        batches = [(CUDA_THREAD, self._by_thread(now, epoch)),
                   (CUDA_STREAM, self._by_stream(now, epoch))]  # fmt: skip
        self._forget(now)
        return [(stream, rows) for stream, rows in batches if len(rows)]

    def _by_thread(self, now: int, epoch: int) -> Rows:
        live = self._cuda.threads.live
        at, new, before = _changed(live, self._threads_before, "id", "count")
        self._threads_before = _kept(live, self._threads_before, at, new)
        gap = new["gaps"][:, epoch & 1]
        rows = CUDA_THREAD.rows(
            t=[now] * len(at), process=new["process"], thread=new["id"],
            count=new["count"] - before["count"], shed=new["shed"] - before["shed"],
            hist=new["hist"] - before["hist"],
        ) if len(at) else CUDA_THREAD.empty()  # fmt: skip
        has = gap["epoch"] == epoch
        for name, of in (("longest", "longest"), ("longest_end", "end"), ("within", "within"),
                         ("within_time", "within_time")):  # fmt: skip
            rows[name][has] = gap[of][has]
        self._shed |= dict.fromkeys(new["tgid"][rows["shed"] > 0].tolist(), now)
        self._shed = {pid: t for pid, t in self._shed.items() if now - t < CALM_NS}
        return rows

    def _by_stream(self, now: int, epoch: int) -> Rows:
        live = self._streams.live
        at, new, before = _changed(live, self._streams_before, "process", "last")
        self._streams_before = _kept(live, self._streams_before, at, new)
        gap = new["gaps"][:, epoch & 1]
        if not len(at):
            return CUDA_STREAM.empty()
        return CUDA_STREAM.rows(
            t=[now] * len(at), process=new["process"], thread=new["thread"], stream=new["stream"],
            count=_launched(new) - _launched(before), hist=new["hist"] - before["hist"],
            longest=np.where(gap["epoch"] == epoch, gap["longest"], 0),
        )  # fmt: skip

    # -- what has ended ------------------------------------------------------------------------

    def _forget(self, now: int) -> None:
        """Places of streams of processes that have ended, or that were not used for long while
        there is little room.  These are taken out of BPF's sight first, and given back a collection
        later, so that what is written until then is still read."""
        self._give_back(self._idle)
        self._idle = []
        known = set(self._cuda.processes)
        gone, self._known = self._known - known, known
        live = self._streams.live
        if gone:
            ended = np.flatnonzero(np.isin(live["process"], list(gone)))
            self._stream_of.delete(_keys(live[ended]))
            self._give_back(ended.tolist())
            keys, _ = self._kernels.read()
            self._kernels.delete(keys[np.isin(keys["process"], list(gone))])
        if np.count_nonzero(live["process"]) > self._stream_of.entries // 2:
            idle = np.flatnonzero((live["process"] != 0) & (live["last"] + IDLE_NS < now))
            self._stream_of.delete(_keys(live[idle]))
            live["stream"][idle] = ~np.uint64(0)  # no thread's remembered place fits any more
            self._idle = idle.tolist()

    def _give_back(self, places: Iterable[int]) -> None:
        places = list(places)
        self._streams.give_back(places)
        self._streams_before[places] = np.zeros((), _STREAM)


def _launched(streams: npt.NDArray[Any]) -> npt.NDArray[np.uint64]:
    """Every launch has a place in the histogram, but one that had none before it."""
    launched: npt.NDArray[np.uint64] = streams["first"] + streams["hist"].sum(1, np.uint64)
    return launched


def _keys(streams: npt.NDArray[Any]) -> npt.NDArray[Any]:
    keys = np.zeros(len(streams), _STREAM_KEY)
    for name in ("stream", "process", "thread"):
        keys[name] = streams[name]
    return keys


def _changed(
    live: npt.NDArray[Any], before: npt.NDArray[Any], owner: str, moves: str
) -> tuple[npt.NDArray[np.intp], npt.NDArray[Any], npt.NDArray[Any]]:
    """Places where something was launched since (``moves`` is another), what is there now and what
    was there before; that is nothing where another ``owner`` had the place."""
    old = np.zeros(len(live), np.uint64)
    old[: len(before)] = np.where(before[owner] == live[owner][: len(before)], before[moves], 0)
    at = np.flatnonzero(live[moves] != old)
    was = np.zeros(len(at), live.dtype)
    known = at < len(before)
    was[known] = before[at[known]]
    new = live[at]
    was[was[owner] != new[owner]] = np.zeros((), live.dtype)
    return at, new, was


def _kept(
    live: npt.NDArray[Any], before: npt.NDArray[Any], at: npt.NDArray[np.intp],
    new: npt.NDArray[Any],
) -> npt.NDArray[Any]:  # fmt: skip
    """``before`` with what is new."""
    if len(live) > len(before):
        before = np.concatenate([before, np.zeros(len(live) - len(before), live.dtype)])
    before[at] = new
    return before
