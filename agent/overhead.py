"""What the agent and its BPF programs cost: rows of meta.overhead and meta.program."""

from __future__ import annotations

import contextlib
import os
import resource
import time

from dsprobe.probes import syscalls
from dsprobe.probes.probe import Batch, Loss
from dsprobe.probes.tracer import Tracer
from dsprobe.recordings.streams import META_OVERHEAD, META_PROGRAM

SAMPLE_EVERY = 10
"""BPF statistics cost two clock reads a run, so they are on for one tick in so many seconds."""


class Overhead:
    """Call :meth:`collect` once a second, and :meth:`tick` several times in between."""

    def __init__(self) -> None:
        self._cpu = _cpu()
        self._t = time.monotonic_ns()
        self._second = 0
        self._stats = -1
        self._stats_since = 0
        self._before: dict[str, syscalls.ProgramInfo] = {}
        self._misses: dict[str, int] = {}
        self._share = 0.0  # BPF time per time, by the last sample

    def collect(self, now: int, tracer: Tracer, viewers: int, flight: int) -> list[Batch]:
        dt = max(now - self._t, 1)
        cpu = _cpu()
        if self._stats < 0 and self._second % SAMPLE_EVERY == 1:
            with contextlib.suppress(OSError):  # before Linux 5.8 there is none
                self._stats = syscalls.enable_stats()
                self._stats_since = time.monotonic_ns()
                self._before = tracer.costs()
        self._second += 1
        row = META_OVERHEAD.rows(
            t=now,
            dt=dt,
            agent_cpu=max(cpu - self._cpu, 0),
            bpf_cpu=int(self._share * dt),
            rss=_rss(),
            viewers=viewers,
            flight_bytes=flight,
        )
        self._cpu, self._t = cpu, now
        return [(META_OVERHEAD, row)]

    def tick(self, tracer: Tracer) -> list[Batch]:
        """End the sample that :meth:`collect` has begun, if it has."""
        if self._stats < 0:
            return []
        after = tracer.costs()
        now = time.monotonic_ns()
        dt = max(now - self._stats_since, 1)
        self.close()
        both = [n for n in after if n in self._before]
        if not both:
            self._share = 0.0
            return []
        delta = {
            f: [getattr(after[n], f) - getattr(self._before[n], f) for n in both]
            for f in ("runs", "run_time", "misses")
        }
        self._share = sum(delta["run_time"]) / dt
        return [
            (META_PROGRAM, META_PROGRAM.rows(t=[now] * len(both), dt=dt, program=both, **delta))
        ]

    def losses(self, tracer: Tracer) -> list[Loss]:
        """Runs that the kernel skipped because a program was already running on that CPU."""
        out = []
        costs = tracer.costs()
        for probe in tracer.probes:
            for program in probe.programs:
                info = costs.get(program.function)
                if info is None:
                    continue
                n = info.misses - self._misses.get(program.function, 0)
                self._misses[program.function] = info.misses
                if n > 0:
                    stream = probe.streams[0].name
                    out.append(Loss(stream, f"{program.function}: runs skipped by the kernel", n))
        return out

    def close(self) -> None:
        """Switch the kernel's statistics off again, if they are on."""
        if self._stats >= 0:
            os.close(self._stats)
            self._stats = -1


def _children() -> list[int]:
    """PIDs of the processes that the agent has started: compilers, the reader of ELF files."""
    found = []
    for task in os.listdir("/proc/self/task"):
        with contextlib.suppress(OSError), open(f"/proc/self/task/{task}/children") as f:
            found += [int(pid) for pid in f.read().split()]
    return found


def _cpu() -> int:
    """CPU time of the agent and of what it has started, ns."""
    ended = resource.getrusage(resource.RUSAGE_CHILDREN)
    total = time.process_time_ns() + int((ended.ru_utime + ended.ru_stime) * 1e9)
    for pid in _children():
        with contextlib.suppress(OSError):
            total += time.clock_gettime_ns((~pid << 3) | 2)  # clock_getcpuclockid(3)
    return total


def _rss() -> int:
    pages = 0
    for pid in ("self", *_children()):
        with contextlib.suppress(OSError), open(f"/proc/{pid}/statm") as f:
            pages += int(f.read().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")
