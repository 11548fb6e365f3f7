"""Tables beside the lanes: who is behind a curve, between two moments."""

from __future__ import annotations

import ipaddress
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from dsprobe.recordings import streams as st
from dsprobe.recordings.lane import quantile, spread
from dsprobe.recordings.lanes import NET_RX
from dsprobe.recordings.model import Rows
from dsprobe.recordings.session import FOREVER, Session

MAX_FLOW_ROWS = 100_000
"""Retransmissions looked at for one table: the newest ones."""


@dataclass(frozen=True)
class CpuRow:
    """Softirq work of one vector on one CPU.  ``busy`` is a share of the time (0-1), ``wait`` the
    99th percentile of raise-to-run in ns, NaN where no raise was seen."""

    cpu: int
    runs: int
    busy: float
    wait: float


@dataclass(frozen=True)
class VectorRow:
    """Softirq work of one vector on all CPUs; ``busy`` is a number of CPUs, the rest as above."""

    vector: str
    runs: int
    busy: float
    wait: float
    run: float


@dataclass(frozen=True)
class FlowRow:
    """Retransmissions of one flow, local end first.  ``causes`` says what was sent again and why
    ("data/RTO"), most frequent first."""

    netns: str
    source: str
    destination: str
    causes: tuple[str, ...]
    segments: int
    calls: int


@dataclass(frozen=True)
class SlowRow:
    """A run or wait that ended at ``t`` after ``duration`` (ns), and the task it interrupted."""

    t: int
    duration: int
    kind: str
    cpu: int
    vector: str
    task: str


def _has(rows: Rows, *names: str) -> bool:
    return len(rows) > 0 and set(names) <= set(rows.dtype.names or ())


def _by(
    keys: npt.NDArray[np.int64], amount: npt.NDArray[np.uint64], n: int
) -> npt.NDArray[np.uint64]:
    """Sum of ``amount`` (rows, ...) per key 0 ... n - 1."""
    out = np.zeros((n, *amount.shape[1:]), np.uint64)
    order = np.argsort(keys, kind="stable")
    present, begins = np.unique(keys[order], return_index=True)
    if len(present):
        out[present] = np.add.reduceat(amount[order], begins, axis=0, dtype=np.uint64)
    return out


def softirq_rows(session: Session, start: int, end: int) -> Rows:
    """The rows of ``softirq.cpu`` that end in (start, end], for the tables below."""
    return session.read(st.SOFTIRQ_CPU.name, start + 1, end + 1)


def top_cpus(
    rows: Rows, start: int, end: int, limit: int, vector: int = NET_RX
) -> tuple[CpuRow, ...]:
    """CPUs that spent the most time in ``vector`` within (start, end], busiest first."""
    if not _has(rows, "dt", "cpu", "vec", "count", "busy", "wait_hist"):
        return ()
    rows = rows[rows["vec"] == vector]
    if not len(rows):
        return ()
    cpus, key = np.unique(rows["cpu"], return_inverse=True)
    edges = np.array([start, end], np.int64)
    busy = spread(rows, rows["busy"], edges, rows["cpu"])[:, 0]
    runs = _by(key, rows["count"], len(cpus))
    wait = quantile(_by(key, rows["wait_hist"], len(cpus)), 0.99)
    order = np.lexsort((cpus, -runs.astype(float), -busy))[:limit]
    return tuple(
        CpuRow(int(cpus[i]), int(runs[i]), float(busy[i]) / (end - start), float(wait[i]))
        for i in order
    )


def by_vector(rows: Rows, start: int, end: int) -> tuple[VectorRow, ...]:
    """Every vector that ran within (start, end], in the kernel's order."""
    if not _has(rows, "dt", "vec", "count", "busy", "wait_hist", "run_hist"):
        return ()
    n = len(st.VECTORS)
    rows = rows[rows["vec"] < n]
    key = rows["vec"].astype(np.int64)
    runs, busy = _by(key, rows["count"], n), _by(key, rows["busy"], n)
    wait = quantile(_by(key, rows["wait_hist"], n), 0.99)
    run = quantile(_by(key, rows["run_hist"], n), 0.99)
    return tuple(
        VectorRow(
            st.VECTORS[i], int(runs[i]), float(busy[i]) / (end - start), float(wait[i]),
            float(run[i]),
        )
        for i in np.flatnonzero(runs)
    )  # fmt: skip


def slowest(session: Session, start: int, end: int, limit: int) -> tuple[SlowRow, ...]:
    """The longest softirq runs and waits that ended within [start, end), longest and
    newest first."""
    rows = session.read(st.SOFTIRQ_SLOW.name, start, end)
    if not _has(rows, "duration", "cpu", "vec", "kind", "tid", "comm"):
        return ()
    order = np.lexsort((-rows["t"].astype(float), -rows["duration"].astype(float)))[:limit]
    return tuple(
        SlowRow(
            int(r["t"]),
            int(r["duration"]),
            word(st.SLOW_KINDS, int(r["kind"])),
            int(r["cpu"]),
            word(st.VECTORS, int(r["vec"])),
            f"{bytes(r['comm']).decode(errors='replace')}:{r['tid']}" if r["tid"] else "idle",
        )
        for r in rows[order]
    )


_FLOW = ("netns", "saddr", "sport", "daddr", "dport")


def top_flows(session: Session, start: int, end: int, limit: int) -> tuple[FlowRow, ...]:
    """Flows with the most segments sent again within [start, end), most first."""
    rows = session.read(st.TCP_RETRANSMIT.name, start, end)[-MAX_FLOW_ROWS:]
    if not _has(rows, *_FLOW, "kind", "cause", "segments"):
        return ()
    # One comparable number of bytes per flow: numpy sorts it as it is.
    packed = np.empty(len(rows), [(name, *_shape(rows, name)) for name in _FLOW])
    for name in _FLOW:
        packed[name] = rows[name]
    _, first, key = np.unique(
        packed.view(f"V{packed.dtype.itemsize}"), return_index=True, return_inverse=True
    )
    key = key.reshape(-1)
    n = len(first)
    segments, calls = _by(key, rows["segments"], n), np.bincount(key, minlength=n)
    names = netns_names(session)
    order = np.lexsort((first, -calls, -segments.astype(float)))[:limit]
    return tuple(
        FlowRow(
            names.get(int(rows["netns"][first[i]]), str(int(rows["netns"][first[i]]))),
            endpoint(rows["saddr"][first[i]], int(rows["sport"][first[i]])),
            endpoint(rows["daddr"][first[i]], int(rows["dport"][first[i]])),
            _causes(rows[key == i]),
            int(segments[i]),
            int(calls[i]),
        )
        for i in order
    )


def _shape(rows: Rows, name: str) -> tuple[object, ...]:
    base, shape = rows.dtype[name].base, rows.dtype[name].shape
    return (base, shape) if shape else (base,)


def _causes(rows: Rows) -> tuple[str, ...]:
    code = rows["kind"].astype(np.int64) * 256 + rows["cause"]
    values, counts = np.unique(code, return_counts=True)
    words = []
    for value in values[np.argsort(-counts, kind="stable")]:
        kind = word(st.RETRANSMIT_KINDS, int(value) >> 8)
        cause = word(st.RETRANSMIT_CAUSES, int(value) & 255)
        words.append(kind if cause == "unknown" else f"{kind}/{cause}")
    return tuple(words)


def word(words: tuple[str, ...], i: int) -> str:
    """Word ``i`` of an enumeration, ``?i`` where it has none."""
    return words[i] if i < len(words) else f"?{i}"


def netns_names(session: Session) -> dict[int, str]:
    """Names of network namespaces by inode number."""
    rows = session.read(st.META_NETNS.name, 0, FOREVER)
    if not _has(rows, "id", "name"):
        return {}
    return {int(i): str(name) for i, name in zip(rows["id"], rows["name"], strict=True)}


def endpoint(address: npt.NDArray[np.uint8], port: int) -> str:
    """``a.b.c.d:port`` or ``[v6]:port`` of a 16-byte address."""
    ip = ipaddress.IPv6Address(bytes(address.astype(np.uint8)[:16].tobytes()).ljust(16, b"\0"))
    return f"{ip.ipv4_mapped}:{port}" if ip.ipv4_mapped else f"[{ip.compressed}]:{port}"
