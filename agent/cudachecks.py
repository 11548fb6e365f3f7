"""What ``dsprobe doctor`` says about processes that use CUDA, and about probes on their library."""

from __future__ import annotations

import contextlib
import os
import platform
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from dsprobe.agent.check import LIMITED, OK, Check
from dsprobe.probes import driver, functions, hitcost, trial
from dsprobe.probes.driver import Driver, Mapped
from dsprobe.probes.elf import ElfError
from dsprobe.probes.placement import Placement
from dsprobe.probes.tracer import Tracer

_SHOWN_PIDS = 8
_SHOWN_LIBRARIES = 16
"""Each is tried out, which takes as long as it likes, up to some seconds."""


@dataclass(frozen=True)
class _Means:
    """``bench`` and ``survives`` are None where they could not be had."""

    bench: trial.Bench | None
    survives: bool | None


def cuda_checks(verbose: bool) -> Iterator[Check]:
    """Which processes can be traced, through which library, at what cost; with ``verbose`` also
    where each probe would sit."""
    libraries: dict[tuple[str, int], list[Mapped]] = {}
    for mapped in driver.users():
        libraries.setdefault(mapped.key, []).append(mapped)
    if platform.machine() != "x86_64":
        yield Check("CUDA", LIMITED, f"uprobes are not used on {platform.machine()}, where kernels"
                    " have resumed stepped instructions wrongly, so CUDA calls are not"
                    " seen")  # fmt: skip
        return
    with contextlib.ExitStack() as stack:
        means = _Means(None, None)
        if os.geteuid() == 0:
            cost, means = _measured(stack)
            yield cost
        if means.survives is False:
            yield Check("CUDA", LIMITED, "this kernel lets seccomp filters kill a process at a"
                        " probe on a return, so there are probes on entries only: calls are"
                        " counted, but not timed, and memory is not followed",
                        "use a kernel with the fix: 6.12.15, 6.13.4, 6.14 or later")  # fmt: skip
        if not libraries:
            yield Check("CUDA", OK, "no process has the CUDA driver library (libcuda.so) mapped;"
                        " those that map it later are found then")  # fmt: skip
        for users in list(libraries.values())[:_SHOWN_LIBRARIES]:
            yield from _library(users, means, verbose)
        if len(libraries) > _SHOWN_LIBRARIES:
            yield Check("CUDA", LIMITED, f"{len(libraries) - _SHOWN_LIBRARIES} more driver"
                        " libraries are mapped, which are not looked at here")  # fmt: skip
        yield from _strangers({m.pid for users in libraries.values() for m in users})


def _measured(stack: contextlib.ExitStack) -> tuple[Check, _Means]:
    tracer = Tracer([trial.Trial()])
    stack.callback(tracer.close)
    tracer.load()
    try:
        cost = hitcost.measure(tracer)
        survives = hitcost.returns_survive_seccomp(tracer)
        bench = trial.Bench()
        stack.callback(bench.close)
    except OSError as e:
        return Check("probe cost", LIMITED, f"cannot be measured: {e}"), _Means(None, None)
    said = (
        f"a hit costs a process {cost.emulated / 1e3:.2f} us, {cost.with_return / 1e3:.2f} us with"
        f" its return, and {cost.stepped / 1e3:.1f} us where the kernel has to step the instruction"
    )
    return Check("probe cost", OK, said), _Means(bench, survives)


def _library(users: list[Mapped], means: _Means, verbose: bool) -> Iterator[Check]:
    pids = ", ".join(str(u.pid) for u in users[:_SHOWN_PIDS])
    pids += f" and {len(users) - _SHOWN_PIDS} more" if len(users) > _SHOWN_PIDS else ""
    who = f"{users[0].path}, mapped by PID {pids}"
    refused: Mapping[str, str] = {}
    tried = ""
    try:
        with driver.opened(users[0]) as fd:
            found = driver.read(fd, users[0].path)
            names = [n for n in found.functions if functions.of_symbol(n)]
            places = {n: found.entries[n] for n in names if n in found.entries}
            if found.build_id in trial.VERIFIED:
                tried = "this build's entries are known"
            elif means.bench and trial.needed(found, names):
                verdict = means.bench.try_out(fd, found, names)
                places, refused = verdict.entries, verdict.refused
                tried = "tried out in a process of its own"
    except (OSError, ElfError) as e:
        yield Check("CUDA", LIMITED, f"{who}: {e}")
        return
    yield _summary(who, found, names, places, refused, tried)
    unknown = functions.unknown(found.functions)
    if unknown:
        yield Check("CUDA", LIMITED, f"{users[0].path}: calls of {', '.join(unknown[:6])} are not"
                    " seen: newer than this dsprobe", "update dsprobe")  # fmt: skip
    if verbose:
        for name in names:
            yield Check(f"  {name}", *_placed(places.get(name), refused.get(name, "")))
        rest = sorted(set(found.functions) - set(names))
        yield Check("  the others", OK, "neither launch, block, nor concern memory, and are not"
                    f" traced: {', '.join(rest)}")  # fmt: skip


def _summary(
    who: str, found: Driver, names: list[str], places: Mapping[str, Placement],
    refused: Mapping[str, str], tried: str,
) -> Check:  # fmt: skip
    cheap = sum(p.emulated for p in places.values())
    detail = (
        f"{who}: driver {found.version or 'of unknown version'} ({found.machine}), build"
        f" {found.build_id or 'unknown'}; {len(names)} of its {len(found.functions)} functions are"
        f" traced, {cheap} of them at an instruction that is cheap to probe"
    )
    detail += f"; {tried}" if tried else ""
    if found.machine != "x86_64":
        return Check("CUDA", LIMITED, f"{detail}; not traced: it is not for this machine")
    if refused:
        return Check("CUDA", LIMITED, f"{detail}; not traced: {', '.join(sorted(refused)[:6])}")
    return Check("CUDA", OK, detail)


def _placed(place: Placement | None, refused: str) -> tuple[str, str]:
    if place is None:
        return LIMITED, f"not probed: {refused or 'not for this machine'}"
    where = f"at +{place.offset}, {place.instruction}"
    return (OK, where) if place.emulated else (LIMITED, f"{where}: expensive, {place.why}")


def _strangers(known: set[int]) -> Iterator[Check]:
    """Processes that talk to a device without having called the driver library."""
    found = [pid for pid in map(int, filter(str.isdigit, os.listdir("/proc")))
             if pid not in known and _holds_device(pid)]  # fmt: skip
    if found:
        pids = ", ".join(map(str, found[:_SHOWN_PIDS]))
        yield Check("CUDA", LIMITED, f"PID {pids}: has an NVIDIA device open, but no libcuda.so"
                    " mapped under that name, so its calls are not seen")  # fmt: skip


def _holds_device(pid: int) -> bool:
    folder = f"/proc/{pid}/fd"
    try:
        names = os.listdir(folder)[:4096]
    except OSError:
        return False
    for name in names:
        with contextlib.suppress(OSError):
            target = os.readlink(f"{folder}/{name}")
            if target.startswith("/dev/nvidia") and target[11:].isdigit():
                return True
    return False
