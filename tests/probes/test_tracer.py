"""Loading and attaching when something is wrong: the rest runs, and coverage says why."""

from __future__ import annotations

import dataclasses
import gc
import os
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from dsprobe.probes import compiler, syscalls
from dsprobe.probes.btf import Btf, BtfError
from dsprobe.probes.napi import Napi
from dsprobe.probes.probe import Batch, BpfProbe, Map, Program
from dsprobe.probes.runq import Runq
from dsprobe.probes.softirq import Softirq
from dsprobe.probes.tcp import Tcp
from dsprobe.probes.tracer import Coverage, Tracer
from dsprobe.recordings.streams import SOFTIRQ_CPU
from tests.support import programs
from tests.support.wait import until

pytestmark = pytest.mark.bpf


class Broken(BpfProbe):
    """A probe whose C source the test writes."""

    name = "broken"
    doc = "made by a test"
    streams = (SOFTIRQ_CPU,)
    programs = (Program("broken_function", "raw_tracepoint", "softirq_entry"),)

    def __init__(self, folder: Path, text: str) -> None:
        path = folder / "broken.bpf.c"
        path.write_text(text)
        self.source = str(path)  # type: ignore[misc]

    def collect(self, now: int) -> list[Batch]:
        return []


def load(*probes: BpfProbe) -> tuple[Tracer, dict[tuple[str, str], Coverage]]:
    t = Tracer(probes)
    return t, {(c.probe, c.program): c for c in t.load()}


def assert_works(t: Tracer, said: Mapping[tuple[str, str], Coverage], name: str) -> None:
    """The probe is attached and sees softirqs."""
    assert said[name, ""].status == "attached"
    probe = next(p for p in t.probes if p.name == name)
    until(lambda: probe.collect(time.monotonic_ns()), "it sees something")


SYNTAX = "int broken_function(void *ctx) { return this_is_not_declared; }"
# Reads through a pointer that was not checked: clang is content, the verifier is not.
UNSAFE = """
BPF_HASH(broken_map, u32, u64);
int broken_function(struct bpf_raw_tracepoint_args *ctx)
{
	u32 key = 1;
	u64 *value = broken_map.lookup(&key);
	return *value;
}
"""


def test_source_that_does_not_compile(tmp_path: Path) -> None:
    t, said = load(Softirq(), Broken(tmp_path, SYNTAX), Runq())
    assert said["broken", ""].status == "missing"
    assert "does not compile here" in said["broken", ""].reason
    assert "this_is_not_declared" in said["broken", ""].reason
    assert "\n" not in said["broken", ""].reason
    assert_works(t, said, "softirq")
    assert_works(t, said, "runq")
    t.close()


def test_program_that_the_verifier_refuses(tmp_path: Path) -> None:
    t, said = load(Broken(tmp_path, UNSAFE), Softirq())
    c = said["broken", ""]
    assert c.status == "missing"
    assert c.reason.startswith("broken_function: ")
    assert "map_value_or_null" in c.reason or "invalid mem access" in c.reason
    assert_works(t, said, "softirq")
    t.close()


def test_maps_that_are_not_what_the_probe_expects(tmp_path: Path) -> None:
    class Odd(Softirq):
        def open(self, maps: Mapping[str, Map]) -> None:
            super().open({**maps, "softirq_cells": maps["softirq_slow_count"]})

    t, said = load(Odd(), Runq())
    assert said["softirq", ""].status == "missing"
    assert "maps cannot be read" in said["softirq", ""].reason
    assert_works(t, said, "runq")
    t.close()


def test_without_bcc_coverage_says_what_to_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "bcc.py").write_text("raise ImportError('no bcc here')")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setenv("DSPROBE_CACHE", "")
    t, said = load(Softirq(), Tcp())
    for name in ("softirq", "tcp"):
        assert said[name, ""].status == "missing"
        assert "no bcc here" in said[name, ""].reason
        assert "python3-bpfcc (apt) or python3-bcc (dnf)" in said[name, ""].reason
    assert not t.probes
    t.close()


def test_another_package_called_bcc(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """PyPI's bcc is about crystal lattices."""
    (tmp_path / "bcc.py").write_text("lattice = 3.2")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setenv("DSPROBE_CACHE", "")
    t, said = load(Softirq())
    assert said["softirq", ""].status == "missing"
    assert "python3-bpfcc" in said["softirq", ""].reason
    t.close()


def test_without_btf_softirq_works_and_the_others_say_why(monkeypatch: pytest.MonkeyPatch) -> None:
    def none() -> Btf:
        raise BtfError("no BTF")

    monkeypatch.setattr(Btf, "running", none)
    t, said = load(Softirq(), Napi(), Tcp(), Runq())
    assert_works(t, said, "softirq")
    for name in ("napi", "tcp", "runq"):
        assert said[name, ""].status == "missing"
        assert "CONFIG_DEBUG_INFO_BTF" in said[name, ""].reason
    t.close()


def test_a_member_this_kernel_does_not_have(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        Tcp, "defines", lambda self, btf: {"X": btf.offset("sock_common", "skc_of_tomorrow")}
    )
    t, said = load(Tcp(), Softirq())
    assert said["tcp", ""].reason == "struct sock_common has no skc_of_tomorrow in this kernel"
    assert_works(t, said, "softirq")
    t.close()


def fake_python(folder: Path, script: str, monkeypatch: pytest.MonkeyPatch) -> None:
    path = folder / "python"
    path.write_text(
        f"#!{sys.executable} -I\nimport os, sys, time\n"
        "def say(data):\n    sys.stdin.buffer.read()\n    os.write(1, data)\n"
        f"{script}\n"
    )
    path.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(path))


@pytest.mark.parametrize(
    ("script", "why"),
    [
        ("sys.exit(3)", "the compiler ended with code 3"),
        ("os.kill(os.getpid(), 9)", "the compiler was killed by signal 9"),
        ("time.sleep(600)", "it took longer than 0.3 s"),
        ("say(b'garbage')", "not a compiled module"),
        ("say(b'')", "not a compiled module"),
        # [[], {"x": an instruction that loads map 7}, {}]
        ("say(bytes.fromhex('9390 81a178 c408 1811000007000000 80'))", "a map that does not exist"),
    ],
    ids=["ends", "killed", "hangs", "garbage", "nothing", "a map that is not there"],
)
def test_compiler_that_does_not_do_its_work(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, script: str, why: str
) -> None:
    monkeypatch.setattr(compiler, "COMPILE_SECONDS", 0.3)
    monkeypatch.setenv("DSPROBE_CACHE", "")
    fake_python(tmp_path, script, monkeypatch)
    before = len(os.listdir("/proc/self/fd"))
    t, said = load(Softirq(), Tcp())
    for name in ("softirq", "tcp"):
        assert said[name, ""].status == "missing"
        assert why in said[name, ""].reason
    (used,) = t._loader._compilers.values()
    assert used.child is not None
    assert used.child.returncode is not None  # reaped
    t.close()
    assert len(os.listdir("/proc/self/fd")) == before


def test_compiler_does_not_import_from_where_we_stand(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Root may start dsprobe in a directory of somebody else's."""
    for name in ("json.py", "bcc.py", "dsprobe.py"):
        (tmp_path / name).write_text(f"open({str(tmp_path / 'imported')!r}, 'w')")
    monkeypatch.chdir(tmp_path)
    t, said = load(Softirq())
    assert_works(t, said, "softirq")
    t.close()
    assert not (tmp_path / "imported").exists()


def test_everything_is_given_back() -> None:
    """Descriptors, programs, and with them maps and attachments."""
    gc.collect()  # what tests before this one have left
    before, earlier = len(os.listdir("/proc/self/fd")), programs.held_by(os.getpid())
    t, said = load(Softirq(), Napi(), Tcp(), Runq())
    for name in ("softirq", "napi", "tcp", "runq"):
        assert said[name, ""].status == "attached"
    ours = programs.held_by(os.getpid()) - earlier
    assert len(ours) == len(t.costs()) == 7
    assert ours <= programs.loaded()
    t.close()
    until(lambda: not ours & programs.loaded(), "the kernel has freed them")
    del t, said
    gc.collect()  # and with the probes what they had mapped
    assert len(os.listdir("/proc/self/fd")) == before


def test_compiling_costs_this_process_no_memory() -> None:
    def rss() -> int:
        with open("/proc/self/statm") as f:
            return int(f.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")

    load(Softirq())[0].close()  # imports and caches
    before = rss()
    t, _ = load(Softirq(), Napi(), Tcp(), Runq())
    assert rss() - before < 16 << 20
    t.close()


def test_descriptors_do_not_leak_into_programs_we_start() -> None:
    t, _ = load(Softirq(), Runq())
    for fd in os.listdir("/proc/self/fd"):
        try:
            target = os.readlink(f"/proc/self/fd/{fd}")
        except OSError:
            continue
        if "bpf" in target or "perf" in target:
            assert not os.get_inheritable(int(fd)), target
    t.close()


# -- system calls ------------------------------------------------------------------------------


def test_programs_have_ids_and_costs() -> None:
    earlier = programs.held_by(os.getpid())
    t, _ = load(Softirq())
    costs = t.costs()
    assert costs.keys() == {"softirq_raise", "softirq_entry", "softirq_exit"}
    assert {c.id for c in costs.values()} == programs.held_by(os.getpid()) - earlier
    stats = syscalls.enable_stats()
    before = t.costs()["softirq_entry"]
    until(lambda: t.costs()["softirq_entry"].runs > before.runs, "it runs and is timed")
    after = t.costs()["softirq_entry"]
    assert 0 < after.run_time - before.run_time < 10**9
    os.close(stats)
    t.close()


@pytest.mark.parametrize(
    "call",
    [lambda: syscalls.open_raw_tracepoint("softirq_entry", 10**6),
     lambda: syscalls.open_cpu_clock(10**6, 10**6, 0), lambda: syscalls.program_info(10**6)],
)  # fmt: skip
def test_refusals_are_errors(call: Any) -> None:
    before = len(os.listdir("/proc/self/fd"))
    with pytest.raises(OSError):  # noqa: PT011
        call()
    assert len(os.listdir("/proc/self/fd")) == before


def without_raise(name: str) -> Softirq:
    """A softirq probe on a kernel where softirq_raise is called ``name``."""
    probe = Softirq()
    probe.programs = tuple(  # type: ignore[misc]
        dataclasses.replace(p, target=name) if p.function == "softirq_raise" else p
        for p in Softirq.programs
    )
    return probe


def test_a_program_that_could_not_be_attached_is_no_program() -> None:
    t, said = load(without_raise("softirq_of_tomorrow"))
    assert said["softirq", "softirq_raise"].status == "missing"
    assert said["softirq", ""].reason == "raise-to-run latency is not measured"
    assert t.costs().keys() == {"softirq_entry", "softirq_exit"}
    assert t.detach("softirq_raise", "a test") == []
    assert not t.resume("softirq_raise")
    assert not t.resume("softirq_raise")
    t.close()


def test_resting_and_resuming() -> None:
    t, said = load(Softirq())
    waits = lambda: sum(int(r["waits"].sum()) for _, r in t.probes[0].collect(1))  # noqa: E731
    until(waits, "raises are seen")
    t.rest("softirq_raise")
    t.rest("softirq_raise")
    assert "softirq_raise" not in t.costs()
    until(lambda: not waits(), "what was raised before has run")
    until(lambda: t.probes[0].collect(1), "runs are seen all the same")
    assert t.resume("softirq_raise")
    assert t.resume("softirq_raise")
    until(waits, "raises are seen again")
    assert_works(t, said, "softirq")
    t.close()
