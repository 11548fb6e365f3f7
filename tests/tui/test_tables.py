"""The tables beside the lanes, against plain loops over the rows."""

from __future__ import annotations

from collections import Counter
from itertools import pairwise

import numpy as np
import pytest

from dsprobe.recordings import streams as st
from dsprobe.recordings.lanes import BY_KEY
from dsprobe.recordings.tables import (
    by_vector,
    endpoint,
    softirq_rows,
    top_cpus,
    top_flows,
)
from tests.tui.memory import MemorySession
from tests.tui.scenario import BOOT, NET_RX, SECOND, address, recording


def test_cpus_are_ordered_by_their_time_in_net_rx() -> None:
    session = recording(20)
    start, end = BOOT + 4 * SECOND, BOOT + 14 * SECOND
    rows = top_cpus(softirq_rows(session, start, end), start, end, 10)
    busy: Counter[int] = Counter()
    runs: Counter[int] = Counter()
    for row in session.read("softirq.cpu", start + 1, end + 1):
        if row["vec"] == NET_RX:
            busy[int(row["cpu"])] += int(row["busy"])
            runs[int(row["cpu"])] += int(row["count"])
    assert [r.cpu for r in rows] == [cpu for cpu, _ in busy.most_common()]
    assert {r.cpu: r.runs for r in rows} == runs
    for row in rows:
        assert row.busy == pytest.approx(busy[row.cpu] / (end - start))
    assert rows[0].cpu == 1


def test_a_row_that_began_before_the_window_counts_for_its_part() -> None:
    session = MemorySession(live=False)
    session.append("softirq.cpu", t=15 * SECOND, dt=10 * SECOND, cpu=0, vec=NET_RX, count=4,
                   busy=10 * SECOND)  # fmt: skip
    session.refresh()
    start, end = 10 * SECOND, 20 * SECOND
    (row,) = top_cpus(softirq_rows(session, start, end), start, end, 5)
    assert row.busy == pytest.approx(0.5)
    assert np.isnan(row.wait)


def test_vectors_add_up_to_all_runs() -> None:
    session = recording(10)
    start, end = BOOT, BOOT + 10 * SECOND
    rows = softirq_rows(session, start, end)
    table = by_vector(rows, start, end)
    assert [v.vector for v in table] == ["TIMER", "NET_RX"]
    assert sum(v.runs for v in table) == rows["count"].sum()


def test_flows_are_told_apart_and_named() -> None:
    session = recording(20)
    rows = top_flows(session, BOOT, BOOT + 20 * SECOND, 10)
    raw = session.read("tcp.retransmit", BOOT, BOOT + 20 * SECOND)
    assert sum(r.segments for r in rows) == raw["segments"].sum()
    assert sum(r.calls for r in rows) == len(raw)
    first, second = rows
    assert (first.source, first.destination) == ("10.0.0.1:40000", "[2001:db8::7]:443")
    assert first.causes == ("data/fast",)
    assert (second.destination, second.causes, second.netns) == (
        "10.0.0.2:40000",
        ("data/RTO",),
        "blue",
    )


def test_same_ports_in_two_namespaces_are_two_flows() -> None:
    session = MemorySession(live=False)
    session.append("tcp.retransmit", t=[1, 2, 3], netns=[7, 8, 8], segments=1, kind=[0, 1, 0],
                   saddr=np.stack([address("10.0.0.1")] * 3), sport=1,
                   daddr=np.stack([address("10.0.0.2")] * 3), dport=2)  # fmt: skip
    session.refresh()
    rows = top_flows(session, 0, 10, 10)
    assert [(r.netns, r.segments) for r in rows] == [("8", 2), ("7", 1)]
    assert set(rows[0].causes) == {"SYN", "data"}


def test_many_flows_are_counted_right() -> None:
    rng = np.random.default_rng(1)
    n = 20_000
    port = rng.integers(1, 300, n)
    session = MemorySession(live=False)
    session.append("tcp.retransmit", t=np.arange(n) + 1, netns=1, segments=rng.integers(1, 9, n),
                   sport=port, dport=80, saddr=np.stack([address("::1")] * n))  # fmt: skip
    session.refresh()
    rows = session.read("tcp.retransmit", 0, n + 1)
    want: Counter[str] = Counter()
    for p, segments in zip(port, rows["segments"], strict=True):
        want[f"[::1]:{p}"] += int(segments)
    top = top_flows(session, 0, n + 1, 20)
    assert [r.segments for r in top] == [count for _, count in want.most_common(20)]


def test_codes_a_newer_writer_may_use_do_not_break_a_table() -> None:
    session = MemorySession(live=False)
    session.append("tcp.retransmit", t=1, kind=200, cause=9, segments=1)
    session.append("softirq.cpu", t=1, dt=1, vec=200, count=1)
    session.refresh()
    assert top_flows(session, 0, 10, 5)[0].causes == ("?200/?9",)
    assert by_vector(softirq_rows(session, 0, 10), 0, 10) == ()
    empty = MemorySession(live=False)
    assert top_flows(empty, 0, 10, 5) == ()
    assert top_cpus(softirq_rows(empty, 0, 10), 0, 10, 5) == ()


@pytest.mark.parametrize(
    ("text", "port", "shown"),
    [
        ("192.0.2.1", 80, "192.0.2.1:80"),
        ("2001:db8::1", 443, "[2001:db8::1]:443"),
        ("::", 0, "[::]:0"),
    ],
)
def test_endpoints(text: str, port: int, shown: str) -> None:
    assert endpoint(address(text), port) == shown


def test_vectors_are_the_kernels() -> None:
    assert st.VECTORS[NET_RX] == "NET_RX"


def test_a_flood_of_quick_runs_hides_no_slow_one() -> None:
    """Against a plain loop over CPUs and vectors."""
    rng = np.random.default_rng(3)
    n = 400
    hist = np.zeros((n, st.HIST_SLOTS), np.uint32)
    hist[np.arange(n), rng.integers(8, 16, n)] = rng.integers(0, 5000, n)
    t = np.sort(rng.integers(1, 10, n)) * SECOND // 4
    cpu, vec = rng.integers(0, 4, n), rng.integers(0, 3, n)
    cpu[7], hist[7] = 9, 0
    hist[7, 22] = 3
    rows = st.SOFTIRQ_CPU.rows(t=t, dt=SECOND // 4, cpu=cpu, vec=vec, wait_hist=hist)
    for width in (SECOND // 20, SECOND // 4, SECOND, 3 * SECOND):
        edges = np.arange(0, 3 * SECOND + 1, width)
        got = BY_KEY["softirq.wait"].compute(rows, edges)
        for b, (lo, hi) in enumerate(pairwise(edges)):
            here = (
                (t > lo) & (t - SECOND // 4 < hi) if width < SECOND // 4 else (t > lo) & (t <= hi)
            )
            worst = np.nan
            for key in {(int(c), int(v)) for c, v in zip(cpu[here], vec[here], strict=True)}:
                of = hist[here & (cpu == key[0]) & (vec == key[1])].sum(axis=0)
                if of.sum():
                    slot = int(np.flatnonzero(np.cumsum(of) >= 0.99 * of.sum())[0])
                    worst = np.nanmax([worst, 2.0 ** (slot + 1)])
            assert got[b] == pytest.approx(worst, nan_ok=True)
        assert np.nanmax(got) == 2.0**23, "three waits of 4 ms among a million of a few us"
