"""How much traffic a host still handles while somebody watches its softirqs.

Everybody watches the same load in turn, in every round, between two runs without anybody; the
figure is the median over the rounds of (watched rate / mean of the two unwatched ones beside it).
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator

from benchlib.machine import cpu
from benchlib.model import Context, Row, failed
from benchlib.tracers import PEERS, Tracer, dsprobe, running
from dsprobe.probes.registry import PROBES
from tests.support.loads import tcp_throughput, udp_flood
from tests.support.netns import pair

_NOBODY = "nothing"
_OURS = "dsprobe (softirq)"


def udp(ctx: Context) -> Iterator[Row]:
    """One CPU sends 64-byte datagrams over a veth pair: a NET_RX softirq for each."""
    with pair() as p:
        yield from _compare(
            ctx,
            "UDP flood",
            "datagrams/s",
            lambda: udp_flood(p, ctx.seconds, cpu=cpu(0)).rate,
            judged=True,
        )


def tcp(ctx: Context) -> Iterator[Row]:
    """One iperf3 stream over a veth pair, sender and receiver on two CPUs.

    Segmentation offload makes softirqs few, and where they run decides more than who watches them:
    shown beside each other, not judged.
    """
    with pair() as p:
        yield from _compare(
            ctx, "TCP stream", "Gbit/s",
            lambda: tcp_throughput(p, ctx.seconds, (cpu(0), cpu(1))) / 1e9,
        )  # fmt: skip


def _compare(
    ctx: Context, load: str, unit: str, measure: Callable[[], float], judged: bool = False
) -> Iterator[Row]:
    every = [p.name for p in PROBES]
    ours = (dsprobe(ctx, _OURS, ["softirq"]), dsprobe(ctx, "dsprobe (all host probes)", every))
    tracers = [*ours, *PEERS]
    missing = [t for t in tracers if t.missing()]
    present = [t for t in tracers if t not in missing]
    alone: list[float] = []
    shares: dict[str, list[float]] = {}
    broken: dict[str, str] = {}
    measure()  # once for caches, CPU clocks and the like
    for n in range(ctx.rounds):
        ctx.say(f"bench: {load}, round {n + 1} of {ctx.rounds}")
        before = measure()
        # Another order each round, so that nobody always runs after the same one.
        turn = n % max(len(present), 1)
        for tracer in present[turn:] + present[:turn]:
            if tracer.name in broken:
                continue
            try:
                watched = _watched(tracer, measure)
            except (RuntimeError, AssertionError, OSError) as e:
                broken[tracer.name] = str(e)
                continue
            after = measure()
            shares.setdefault(tracer.name, []).append(2 * watched / (before + after))
            alone.append(before)
            before = after
    yield Row(f"{load}, {_NOBODY} attached", unit, statistics.median(alone or [before]))
    kept = {name: statistics.median(s) for name, s in shares.items() if name not in broken}
    best = max((kept[t.name] for t in PEERS if t.name in kept), default=None)
    for tracer in tracers:
        name, unit = f"{load} kept, {tracer.name}", ""
        if tracer in missing:
            yield Row(name, unit, None, note=f"not installed ({tracer.package or tracer.argv[0]})")
        elif tracer.name in broken:
            yield failed(name, unit, broken[tracer.name])
        else:
            low, high = min(shares[tracer.name]), max(shares[tracer.name])
            budget = best if judged and tracer.name == _OURS else None
            note = f"{low:.2f} to {high:.2f}"
            if budget is not None:
                note += "; the budget is the best peer of this run"
            yield Row(name, unit, kept[tracer.name], budget, True, note)


def _watched(tracer: Tracer, measure: Callable[[], float]) -> float:
    with running(tracer):
        return measure()
