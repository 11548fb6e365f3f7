"""Rows and recordings to test with, all made from a seed."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from dsprobe.recordings import streams as st
from dsprobe.recordings.model import Rows, Stream
from dsprobe.recordings.writer import Writer

SECOND = 10**9
T0 = 5_000 * SECOND
FOREVER = 1 << 63


def random_rows(stream: Stream, n: int, seed: int = 0, start: int = T0, span: int = SECOND) -> Rows:
    """``n`` rows with any legal value in every field, ``t`` ascending in [start, start + span)."""
    rng = np.random.default_rng([seed, n, *stream.name.encode()])
    rows = stream.empty(n)
    for f in stream.fields:
        if f.name == "t":
            rows["t"] = np.sort(rng.integers(start, start + span, n, np.uint64))
        elif f.is_text:
            rows[f.name] = [f"{f.name} {i} äöü" for i in rng.integers(0, 9, n)]
        elif f.type.startswith("S"):
            rows[f.name] = [b"task-%d" % i for i in rng.integers(0, 9, n)]
        else:
            dtype = np.dtype(f.type)
            shape = rows[f.name].shape
            if dtype.kind == "f":
                rows[f.name] = rng.normal(size=shape)
            else:
                info = np.iinfo(dtype)
                rows[f.name] = rng.integers(info.min, info.max, shape, dtype, endpoint=True)
    return rows


def host_second(number: int, cpus: int = 2) -> dict[Stream, Rows]:
    """What a small host records in the second that ends at T0 + (number + 1) s: ten ticks."""
    rng = np.random.default_rng(number)
    start = T0 + number * SECOND
    ticks = start + (np.arange(10) + 1) * 100_000_000 - 1
    n = 10 * cpus * 2
    slow = int(rng.integers(0, 5))
    sent = int(rng.integers(0, 20))
    count = rng.poisson(50, n)
    hist = np.zeros((n, st.HIST_SLOTS), np.uint32)
    hist[:, 11] = count
    return {
        st.SOFTIRQ_CPU: st.SOFTIRQ_CPU.rows(
            t=np.repeat(ticks, cpus * 2),
            dt=99_999_999,
            cpu=np.tile(np.repeat(np.arange(cpus), 2), 10),
            vec=np.tile([1, 3], 10 * cpus),
            count=count,
            busy=count * 2500,
            waits=count,
            wait=count * 1000,
            run_hist=hist,
            wait_hist=hist,
        ),
        st.SOFTIRQ_SLOW: st.SOFTIRQ_SLOW.rows(
            t=np.sort(rng.integers(start, start + SECOND, slow, np.uint64)),
            duration=1_500_000,
            vec=3,
            comm=b"python3",
        ),
        st.TCP_RETRANSMIT: st.TCP_RETRANSMIT.rows(
            t=np.sort(rng.integers(start, start + SECOND, sent, np.uint64)),
            netns=4026531840 + number % 3,
            family=4,
            segments=1,
            sport=40000 + rng.integers(0, 9, sent),
            dport=443,
        ),
        st.META_CLOCK: st.META_CLOCK.rows(t=[start], wall=[start + 1_700_000_000 * SECOND]),
    }


def facts(**more: str) -> Rows:
    said = {
        "host": "testhost", "boot_id": "b-1", "utc_offset_s": "7200", "agent_pid": "77", **more,
    }  # fmt: skip
    return st.META_SESSION.rows(t=[T0] * len(said), key=list(said), value=list(said.values()))


def head(writer: Writer, **more: str) -> None:
    """The rows every recording begins with."""
    writer.append(st.META_SESSION, facts(**more))
    writer.append(
        st.META_COVERAGE,
        st.META_COVERAGE.rows(
            t=[T0, T0],
            probe=["softirq", "tcp"],
            program=["", ""],
            status=[0, 1],
            reason=["", "tracepoint tcp:tcp_retransmit_skb is missing"],
        ),
    )
    ids = [4026531840, 4026531841, 4026531842, 7]
    writer.append(
        st.META_NETNS,
        st.META_NETNS.rows(t=[T0] * 4, id=ids, name=["host", "a", "b", "nobody refers to it"]),
    )


def write_host(
    path: Path, seconds: int | Sequence[int] = 10, end: bool = True, **more: str
) -> dict[str, Rows]:
    """A recording of :func:`host_second`s; all rows by stream.  Without ``end`` it is cut off."""
    numbers = range(seconds) if isinstance(seconds, int) else seconds
    rows: dict[str, list[Rows]] = {}
    writer = Writer(path)
    head(writer, **more)
    for number in numbers:
        for stream, batch in host_second(number).items():
            writer.append(stream, batch)
            rows.setdefault(stream.name, []).append(batch)
        writer.flush()
    if end:
        writer.close()
    else:
        writer.abandon()
    return {name: np.concatenate(parts) for name, parts in rows.items()}


def same(a: Rows, b: Rows) -> bool:
    """Whether two arrays hold the same rows in the same order, NaN and all."""
    if a.dtype != b.dtype or len(a) != len(b):
        return False
    return all(
        a[n].tolist() == b[n].tolist() if a.dtype[n].hasobject else a[n].tobytes() == b[n].tobytes()
        for n in a.dtype.names or ()
    )
