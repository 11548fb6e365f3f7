"""The agent: probes in, frames out, until it is told to stop.

One thread runs it all: it drains rings every 50 ms while events come, collects aggregates every
250 ms, pairs clocks and measures itself every second, and serves viewers in between.  Probes that
may block have threads of their own (:mod:`dsprobe.agent.workers`), and compiling has a process.
"""

from __future__ import annotations

import selectors
import threading
import time
from collections.abc import Iterable
from dataclasses import dataclass

from dsprobe.agent import clock, host
from dsprobe.agent.flight import Flight
from dsprobe.agent.hub import Hub
from dsprobe.agent.overhead import Overhead
from dsprobe.agent.server import Server
from dsprobe.agent.shedding import Shedding
from dsprobe.agent.targets import Targets
from dsprobe.agent.workers import Worker, collect
from dsprobe.probes.probe import Batch, BpfProbe, Loss, Probe, Unavailable
from dsprobe.probes.registry import PROBES
from dsprobe.probes.tracer import Coverage, Tracer
from dsprobe.recordings import streams as st
from dsprobe.recordings import wire

DRAIN_NS, QUIET_NS = 50_000_000, 125_000_000
"""How often rings are drained while events come, and while none do: waking costs CPU time."""
TICK_NS = 250_000_000
SECOND_NS = 1_000_000_000
STALL_NS = SECOND_NS
"""By how much the loop may be late before it is said: it was stopped, or had no CPU."""
LAST_WORDS_SECONDS = 0.5
"""How long the end waits for probes that may block."""


@dataclass(frozen=True)
class Settings:
    """``linger``: end so many ns after the last viewer left (None: stay).  ``span`` (ns) and
    ``limit`` (bytes) bound the flight ring.  ``pids``: of processes that use CUDA, only these and
    their descendants are seen."""

    socket: str = wire.SOCKET
    linger: int | None = None
    span: int = 600 * SECOND_NS
    limit: int = 256 << 20
    pids: tuple[int, ...] = ()


class Agent:
    """``probes`` as :func:`dsprobe.probes.registry.select` gives them.

    Raises :class:`dsprobe.agent.server.ServerError` when the socket is taken.
    """

    def __init__(self, probes: Iterable[Probe], settings: Settings) -> None:
        self._settings = settings
        self._selector = selectors.DefaultSelector()
        self.hub = Hub(Flight(settings.span, settings.limit))
        self._server = Server(
            settings.socket,
            self.hub,
            self._selector,
            time.monotonic_ns,
            self._mark,
            self._asked_to_stop,
        )
        probes = list(probes)
        self.tracer = Tracer([p for p in probes if isinstance(p, BpfProbe)])
        plain = [p for p in probes if not isinstance(p, BpfProbe)]
        self._quick = [p for p in plain if not p.blocking]
        self._blocking = [p for p in plain if p.blocking]
        self._off = [p for p in PROBES if p.name not in {q.name for q in probes}]
        self._workers: list[Worker] = []
        self._collected: dict[str, int] = {}
        self._failing: set[str] = set()
        self._short: dict[str, str] = {}
        self._loading: threading.Thread | None = None
        self._loaded: list[Coverage] = []
        self._overhead = Overhead()
        self._shedding = Shedding(self.tracer)
        self._targets = Targets(self._selector, self.tracer, settings.pids)
        self._stopping = False
        self._alone_since = time.monotonic_ns()
        self._ticks = 0

    # -- running ------------------------------------------------------------------------------

    def run(self) -> None:
        """Until :meth:`stop`.  Everything is detached on the way out, whatever the way."""
        try:
            self._begin()
            self._loop()
            self._tick(time.monotonic_ns(), last=True)
            self._end_workers()
            self._second(time.monotonic_ns(), clock.pair())
        finally:
            self._overhead.close()
            self._targets.close()
            self.tracer.cancel()
            if self._loading:
                self._loading.join()
            self.tracer.close()
            self._server.close("the agent has ended")
            self._selector.close()

    def stop(self) -> None:
        """End soon; may be called from a signal handler."""
        self._stopping = True

    def _begin(self) -> None:
        now = time.monotonic_ns()
        known = host.facts()
        keys = list(known)
        self.hub.publish(
            st.META_SESSION,
            st.META_SESSION.rows(t=[now] * len(keys), key=keys, value=list(known.values())),
        )
        self._tell_clock(clock.pair())
        for said in host.mount_missing():
            self._cover([Coverage("host", "", "attached", said)])
        self._cover([Coverage(p.name, "", "off", "not asked for (--probes)") for p in self._off])
        self._cover(self._targets.begin())
        self._loading = threading.Thread(target=self._load, name="load", daemon=True)
        self._loading.start()
        for probe in list(self._quick):
            try:
                probe.start()
                self._collected[probe.name] = time.monotonic_ns()
                self._cover([Coverage(probe.name, "", "attached")])
            except Unavailable as e:
                self._quick.remove(probe)
                self._cover([Coverage(probe.name, "", "missing", str(e))])
            except Exception as e:
                self._quick.remove(probe)
                self._cover([Coverage(probe.name, "", "missing", f"cannot be read: {e}")])
        self._workers = [Worker(p) for p in self._blocking]

    def _load(self) -> None:
        """On its own thread: compiling takes a while, and viewers should not wait for it."""
        try:
            self._loaded = self.tracer.load()
        except Exception as e:
            self.tracer.close()
            reason = f"BPF programs could not be loaded: {e}"
            self._loaded = [Coverage(p.name, "", "missing", reason) for p in self.tracer.wanted]

    def _loop(self) -> None:
        drain = tick = second = time.monotonic_ns()
        while not self._stopping:
            now = time.monotonic_ns()
            for key, mask in self._selector.select(max(0, drain - now) / 1e9):
                key.data(mask)
            now = time.monotonic_ns()
            if now < drain:
                continue
            if now - drain > STALL_NS:
                self._stood_still(drain, now)
            step = DRAIN_NS if self._drain() or self._loading else QUIET_NS
            drain = now + step - (now - drain) % step
            # Taken before the tick: whoever sees it knows that all up to then has been told.
            pair = clock.pair() if now >= second else None
            if now >= tick:
                self._tick(now)
                tick = now + TICK_NS - (now - tick) % TICK_NS
            if pair:
                self._second(now, pair)
                second = now + SECOND_NS - (now - second) % SECOND_NS
            self._server.flush()

    # -- what happens when --------------------------------------------------------------------

    def _ready(self) -> bool:
        """Whether the BPF programs are loaded; takes note of it the first time."""
        if self._loading is None:
            return True
        if self._loading.is_alive():
            return False
        self._loading = None
        self._collected |= self.tracer.started
        self._cover(self._targets.start(self._loaded))
        return True

    def _drain(self) -> bool:
        """Publish what the rings hold; whether there was anything, or more is soon to come."""
        any_rows = False
        if self._ready():
            for stream, rows in self.tracer.drain():
                self.hub.publish(stream, rows)
                any_rows = True
            coverage, batches = self._targets.tick(time.monotonic_ns())
            self._publish(batches)
            self._cover(coverage)
            any_rows |= self._targets.busy
        return any_rows

    def _tick(self, now: int, last: bool = False) -> None:
        self._drain()
        probes: list[Probe] = [*self._quick]
        if self._loading is None:
            probes += self.tracer.probes
            self._lose(now, self.tracer.losses())
        for probe in probes:
            if last or self._ticks % probe.every == 0:
                self._collect(probe)
        if self._loading is None:
            self._cover(self._shedding.decide(now))
            self._publish(self._overhead.tick(self.tracer))
        for worker in self._workers:
            if last or self._ticks % worker.probe.every == 0:
                worker.ask()
            self._take(worker)
        self._ticks += 1

    def _collect(self, probe: Probe) -> None:
        """A reading that fails is said once; one of /proc is tried again, as it may come back."""
        now = time.monotonic_ns()
        try:
            batches = collect(probe, now, self._collected[probe.name])
            losses = probe.losses()
        except Exception as e:
            reason = f"cannot be read: {e}"
            if isinstance(probe, BpfProbe):
                self._cover(self.tracer.remove(probe, reason))
            elif probe.name not in self._failing:
                self._failing.add(probe.name)
                self._cover([Coverage(probe.name, "", "missing", reason)])
            return
        if probe.name in self._failing:
            self._failing.remove(probe.name)
            self._cover([Coverage(probe.name, "", "attached", "answers again")])
        self._collected[probe.name] = now
        self._publish(batches)
        self._lose(now, losses)
        if probe.shortage != self._short.get(probe.name, ""):
            self._short[probe.name] = probe.shortage
            full = self._targets.state_of(probe.name)
            short = Coverage(probe.name, "", "shed", probe.shortage)
            self._cover([short if probe.shortage else full])

    def _take(self, worker: Worker) -> None:
        changed = worker.changed()
        self._cover([changed] if changed else [])
        batches, losses = worker.take()
        self._publish(batches)
        self._lose(time.monotonic_ns(), losses)

    def _end_workers(self) -> None:
        """Take what they have just been asked for; one that hangs is not waited for."""
        for worker in self._workers:
            worker.end()
        deadline = time.monotonic() + LAST_WORDS_SECONDS
        for worker in self._workers:
            worker.join(max(0.0, deadline - time.monotonic()))
            self._take(worker)

    def _second(self, now: int, pair: tuple[int, int, int]) -> None:
        self._tell_clock(pair)
        if self._loading is None:
            self.tracer.follow_cpus()
            self._lose(now, self._overhead.losses(self.tracer))
            flight = self.hub.flight.bytes
            viewers = self._server.viewers
            self._publish(self._overhead.collect(now, self.tracer, viewers, flight))
        self._linger(now)

    def _linger(self, now: int) -> None:
        if self._server.viewers:
            self._alone_since = now
        elif self._settings.linger is not None:
            # A starter needs a moment to connect before it counts as having left.
            patience = max(self._settings.linger, 0 if self._server.served else 10 * SECOND_NS)
            if now - self._alone_since > patience:
                self.stop()

    # -- rows ---------------------------------------------------------------------------------

    def _publish(self, batches: Iterable[Batch]) -> None:
        for stream, rows in batches:
            if len(rows):
                self.hub.publish(stream, rows)

    def _tell_clock(self, pair: tuple[int, int, int]) -> None:
        t, wall, uncertainty = pair
        self.hub.publish(st.META_CLOCK, st.META_CLOCK.rows(t=t, wall=wall, uncertainty=uncertainty))

    def _stood_still(self, since: int, now: int) -> None:
        """Say when this process did not run: what came up then is one row for the whole time."""
        long = f"{(now - since) / 1e9:.1f} s"
        coverage = [Coverage("agent", "", "stalled", f"it did not run for {long}"),
                    Coverage("agent", "", "attached", f"runs again after {long}")]  # fmt: skip
        self._cover(coverage, [since, now])

    def _cover(self, coverage: Iterable[Coverage], t: list[int] | None = None) -> None:
        rows = list(coverage)
        if rows:
            self.hub.publish(
                st.META_COVERAGE,
                st.META_COVERAGE.rows(
                    t=t or [time.monotonic_ns()] * len(rows),
                    probe=[c.probe for c in rows],
                    program=[c.program for c in rows],
                    status=[st.STATUSES.index(c.status) for c in rows],
                    reason=[c.reason for c in rows],
                ),
            )

    def _lose(self, now: int, losses: Iterable[Loss]) -> None:
        rows = list(losses)
        if rows:
            self.hub.publish(
                st.META_LOSS,
                st.META_LOSS.rows(
                    t=[now] * len(rows),
                    stream=[x.stream for x in rows],
                    reason=[x.reason for x in rows],
                    lost=[x.lost for x in rows],
                ),
            )

    def _asked_to_stop(self) -> None:
        """By the last viewer: an agent that was started for a while ends, a daemon stays."""
        if self._settings.linger is not None:
            self.stop()

    def _mark(self, label: str) -> None:
        self.hub.publish(st.MARKER, st.MARKER.rows(t=time.monotonic_ns(), label=[label]))

    def detach(self, function: str, reason: str) -> None:
        """Take one BPF program off while running; coverage says so from then on."""
        self._drain()
        self._cover(self.tracer.detach(function, reason))
