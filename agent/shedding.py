"""Detail that is given up while a host is so busy that tracing it would cost too much.

Of the softirq programs the one on softirq_raise only serves raise-to-run latency, and it costs a
third of the whole: about 0.1 us for each raise, 4 % of the packets that a CPU in a UDP flood can
handle.  In a storm it is attached for one second in ten, so latency is sampled; counts and times
stay exact.  Coverage says "shed" meanwhile.
"""

from __future__ import annotations

from dsprobe.probes.softirq import Softirq
from dsprobe.probes.tracer import Coverage, Tracer

PROGRAM = "softirq_raise"
STORM = 100_000.0
"""Softirqs per second on one CPU, from which on the program alone takes 1 % of that CPU."""
CALM = STORM / 2
SAMPLE_NS, EVERY_NS = 1_000_000_000, 10_000_000_000
_REASON = f"over {STORM:,.0f} softirqs/s on a CPU: raise-to-run latency is seen 1 s in 10"


class Shedding:
    """Call :meth:`decide` after each collection."""

    def __init__(self, tracer: Tracer) -> None:
        self._tracer = tracer
        self._since = 0
        """When the storm was noticed; 0 while there is none."""
        self._on = True

    def decide(self, now: int) -> list[Coverage]:
        """Attach or take off, by the rate of the last interval; what changed."""
        probe = next((p for p in self._tracer.probes if isinstance(p, Softirq)), None)
        if probe is None:
            return []
        if self._since:
            if probe.fastest < CALM:
                return self._end()
            # Sampling seconds come last in each ten, as the first is behind us when a storm starts.
            self._put((now - self._since) % EVERY_NS >= EVERY_NS - SAMPLE_NS)
        elif probe.fastest > STORM and PROGRAM in self._tracer.costs():
            self._since = now
            self._put(False)
            return [Coverage(probe.name, PROGRAM, "shed", _REASON),
                    Coverage(probe.name, "", "shed", _REASON)]  # fmt: skip
        return []

    def _end(self) -> list[Coverage]:
        self._since = 0
        self._put(True)
        if not self._on:
            return []
        return [Coverage(Softirq.name, PROGRAM, "attached"), Coverage(Softirq.name, "", "attached")]

    def _put(self, on: bool) -> None:
        if on != self._on:
            if on:
                self._on = self._tracer.resume(PROGRAM)
            else:
                self._tracer.rest(PROGRAM)
                self._on = False
