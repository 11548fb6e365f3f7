"""A host that is the same in every run: four CPUs, a burst of net_rx, a flow that loses packets."""

from __future__ import annotations

import ipaddress

import numpy as np

from dsprobe.recordings import streams as st
from tests.tui.memory import MemorySession

SECOND = 1_000_000_000
TICK = SECOND // 4
BOOT = 1_000 * SECOND
"""Monotonic time at which the scenario starts."""
WALL = 1_772_373_600 * SECOND
"""2026-03-01 14:00:00 UTC, the wall clock at BOOT."""
NET_RX, TIMER = 3, 1


def address(text: str) -> np.ndarray:  # type: ignore[type-arg]
    ip = ipaddress.ip_address(text)
    packed = ip.packed if ip.version == 6 else b"\0" * 10 + b"\xff\xff" + ip.packed
    return np.frombuffer(packed, np.uint8)


class Scenario:
    """Appends one tick after the other to ``session``; the numbers depend on the tick alone."""

    def __init__(self, session: MemorySession, cpus: int = 4) -> None:
        self.session, self.cpus = session, cpus
        self.tick = 0
        s = session
        s.append("meta.session", t=BOOT, key=["host", "cpus", "zone"],
                 value=["gpu-07", str(cpus), "UTC"])  # fmt: skip
        s.append("meta.netns", t=BOOT, id=[4026531840, 4026532300], name=["host", "blue"])
        s.append("meta.clock", t=BOOT, wall=WALL, uncertainty=200)
        probes = ["softirq", "napi", "netdev", "tcp", "sockets", "cpu", "runq", "pressure"]
        status = [st.STATUSES.index("attached")] * 7 + [st.STATUSES.index("missing")]
        reason = [""] * 7 + ["this kernel has no /proc/pressure; boot with psi=1"]
        s.append("meta.coverage", t=BOOT - TICK, probe=probes, program="", status=status,
                 reason=reason)  # fmt: skip

    @property
    def now(self) -> int:
        return BOOT + self.tick * TICK

    def run(self, seconds: float) -> None:
        for _ in range(round(seconds * SECOND / TICK)):
            self.advance()

    def advance(self) -> None:
        """One tick of 250 ms."""
        self.tick += 1
        n, t, s = self.tick, self.now, self.session
        rng = np.random.default_rng(n)
        cpu = np.arange(self.cpus)
        storm = 20 <= n % 80 < 40
        busy = (0.02 + 0.01 * rng.random(self.cpus)) * TICK
        busy[1] = (0.75 if storm else 0.1) * TICK
        hist = np.zeros((self.cpus, st.HIST_SLOTS), np.uint32)
        hist[:, 12] = 990
        hist[:, 20 if storm else 14] = 60
        for vec, share in ((NET_RX, 1.0), (TIMER, 0.1)):
            s.append("softirq.cpu", t=t, dt=TICK, cpu=cpu, vec=vec, count=1000 + cpu,
                     busy=(busy * share).astype(np.uint64), waits=1050, wait=5_000_000,
                     run_hist=hist, wait_hist=hist)  # fmt: skip
        if storm:
            s.append("softirq.slow", t=t - 1000, duration=2_000_000, cpu=1, vec=NET_RX, kind=0,
                     pid=77, tid=78, comm=b"python3")  # fmt: skip
            s.append("tcp.retransmit", t=[t - 3000, t - 2000], netns=4026532300, family=4,
                     state=1, kind=0, cause=[1, 2], segments=[1, 3], sport=[5001, 40000],
                     dport=[40000, 443], saddr=np.stack([address("10.0.0.1")] * 2),
                     daddr=np.stack([address("10.0.0.2"), address("2001:db8::7")]))  # fmt: skip
        s.append("net.napi", t=t, dt=TICK, netns=4026531840, ifindex=2, device=b"eth0",
                 polls=500, work=4000 + n, budget_hits=int(storm))  # fmt: skip
        s.append("net.softnet", t=t, dt=TICK, cpu=cpu, processed=1000, squeezed=int(storm))
        s.append("cpu.runq", t=t, dt=TICK, cpu=cpu, samples=25, total=40, longest=1 + n % 5)
        if n % 4 == 0:
            second = 4 * TICK
            s.append("tcp.sockets", t=t, dt=second, netns=[4026531840, 4026532300],
                     inuse=[100 + n, 7], time_wait=[40, 2], out_segs=[9000, 100],
                     retrans_segs=[0, 3])  # fmt: skip
            user = ((0.3 + 0.2 * rng.random(self.cpus)) * second).astype(np.uint64)
            soft = (0.1 * second * np.ones(self.cpus)).astype(np.uint64)
            s.append("cpu.usage", t=t, dt=second, cpu=cpu, user=user, softirq=soft,
                     idle=second - user - soft)  # fmt: skip
            s.append("cpu.load", t=t, dt=second, running=2 + n % 3, switches=5000)
            s.append("meta.clock", t=t, wall=WALL + (t - BOOT), uncertainty=200)
            s.append("meta.overhead", t=t, dt=second, agent_cpu=4_000_000, bpf_cpu=1_000_000,
                     rss=92 << 20, viewers=1, flight_bytes=1 << 20)  # fmt: skip


def recording(seconds: float = 60, cpus: int = 4) -> MemorySession:
    """A finished session."""
    session = MemorySession(live=False, name="gpu-07.mcap")
    Scenario(session, cpus).run(seconds)
    session.refresh()
    return session


def live(seconds: float = 60, cpus: int = 4) -> tuple[MemorySession, Scenario]:
    """A growing session that has been collected for ``seconds``."""
    session = MemorySession(live=True, name="/run/dsprobe.sock")
    scenario = Scenario(session, cpus)
    scenario.run(seconds)
    session.refresh()
    return session, scenario
