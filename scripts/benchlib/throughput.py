"""How much traffic a host still handles while somebody watches its softirqs.

Everybody measures the same load in turn, in every round, beside a run without anybody; the figure
is the median over the rounds of (watched rate / unwatched rate of that round).
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
            ctx, "UDP flood", "datagrams/s", lambda: udp_flood(p, ctx.seconds, cpu=cpu(0)).rate
        )


def tcp(ctx: Context) -> Iterator[Row]:
    """One iperf3 stream over a veth pair, sender and receiver on two CPUs."""
    with pair() as p:
        yield from _compare(
            ctx, "TCP stream", "Gbit/s",
            lambda: tcp_throughput(p, ctx.seconds, (cpu(0), cpu(1))) / 1e9,
        )  # fmt: skip


def _compare(ctx: Context, load: str, unit: str, measure: Callable[[], float]) -> Iterator[Row]:
    every = [p.name for p in PROBES]
    ours = (dsprobe(ctx, _OURS, ["softirq"]), dsprobe(ctx, "dsprobe (all host probes)", every))
    tracers = [*ours, *PEERS]
    missing = [t for t in tracers if t.missing()]
    present = [t for t in tracers if t not in missing]
    rates: dict[str, list[float]] = {_NOBODY: []}
    broken: dict[str, str] = {}
    measure()  # once for caches, CPU clocks and the like
    for n in range(ctx.rounds):
        ctx.say(f"bench: {load}, round {n + 1} of {ctx.rounds}")
        rates[_NOBODY].append(measure())
        # Another order each round, so that nobody always runs after the same one.
        turn = n % max(len(present), 1)
        for tracer in present[turn:] + present[:turn]:
            if tracer.name not in broken:
                try:
                    rates.setdefault(tracer.name, []).append(_watched(tracer, measure))
                except (RuntimeError, AssertionError, OSError) as e:
                    broken[tracer.name] = str(e)
    yield Row(f"{load}, {_NOBODY} attached", unit, statistics.median(rates[_NOBODY]))
    kept = {name: _kept(r, rates[_NOBODY]) for name, r in rates.items() if name not in broken}
    best = max((kept[t.name][0] for t in PEERS if t.name in kept), default=None)
    for tracer in tracers:
        name, unit = f"{load} kept, {tracer.name}", ""
        if tracer in missing:
            yield Row(name, unit, None, note=f"not installed ({tracer.package or tracer.argv[0]})")
        elif tracer.name in broken:
            yield failed(name, unit, broken[tracer.name])
        else:
            median, low, high = kept[tracer.name]
            budget = best if tracer.name == _OURS else None
            note = f"{low:.2f} to {high:.2f}"
            if budget is not None:
                note += "; the budget is the best peer of this run"
            yield Row(name, unit, median, budget, True, note)


def _watched(tracer: Tracer, measure: Callable[[], float]) -> float:
    with running(tracer):
        return measure()


def _kept(watched: list[float], alone: list[float]) -> tuple[float, float, float]:
    """Median, least and most of the kept share."""
    shares = [w / a for w, a in zip(watched, alone, strict=True)]
    return statistics.median(shares), min(shares), max(shares)
