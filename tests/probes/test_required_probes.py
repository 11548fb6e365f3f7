"""Probes that require others, and programs that others go on with."""
# ruff: noqa: F811 (fixtures that another file of tests has)

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from dsprobe.probes.hashmap import HashMap
from dsprobe.probes.probe import Batch, BpfProbe, Map, Program, Uprobe
from dsprobe.probes.softirq import Softirq
from dsprobe.probes.tracer import Tracer
from tests.probes.test_uprobes import HIT, both, fresh, library, target  # noqa: F401
from tests.simgpu.target import OUT, Target

pytestmark = [pytest.mark.bpf, pytest.mark.tools("gcc")]


class Written(BpfProbe):
    """A probe whose C source is its ``text``."""

    doc = "made by a test"
    streams = (HIT,)
    module = "cuda"
    text: str

    def __init__(self, folder: Path) -> None:
        self.source = str(folder / f"{self.name}.bpf.c")  # type: ignore[misc]
        Path(self.source).write_text(self.text)
        self.maps: dict[str, Map] = {}

    def open(self, maps: Any) -> None:
        self.maps = dict(maps)

    def collect(self, now: int) -> list[Batch]:
        return []


class Base(Written):
    """Has a map; others count in it."""

    name = "base"
    programs = (Program("base_enter", "uprobe"),)
    text = """
BPF_ARRAY(base_cells, u64, 4);
static __always_inline int base_add(u32 cell)
{
	base_cells.atomic_increment(cell);
	return 0;
}
int base_enter(struct pt_regs *ctx) { return base_add(0); }
"""


class Upper(Written):
    name = "upper"
    programs = (Program("upper_enter", "uprobe"),)
    requires = (Base,)
    text = "int upper_enter(struct pt_regs *ctx) { return base_add(1); }"


class Other(Written):
    name = "other"
    programs = (Program("other_enter", "uprobe"),)
    requires = (Base,)
    text = "int other_enter(struct pt_regs *ctx) { return base_add(2); }"


def tried(*probes: BpfProbe) -> tuple[Tracer, dict[str, tuple[str, str]]]:
    tracer = Tracer(probes)
    return tracer, {c.probe: (c.status, c.reason) for c in tracer.load() if not c.program}


def test_probes_share_what_they_require(tmp_path: Path) -> None:
    """Named in any order; the maps are the same ones."""
    upper, base, other = Upper(tmp_path), Base(tmp_path), Other(tmp_path)
    tracer, said = tried(upper, other, base, Softirq())
    assert said == dict.fromkeys(("base", "upper", "other", "softirq"), ("attached", ""))
    assert base.maps == upper.maps == other.maps
    assert base.maps.keys() == {"base_cells"}
    tracer.close()


def test_without_what_they_require(tmp_path: Path) -> None:
    tracer, said = tried(Upper(tmp_path), Softirq())
    assert said["upper"] == ("missing", "it needs the probe base, which was not asked for")
    assert said["softirq"][0] == "attached"
    tracer.close()


@pytest.mark.parametrize(
    "text",
    ["int base_enter(struct pt_regs *ctx) { return not_declared; }",
     "int base_enter(struct pt_regs *ctx) { return *(u64 *)0; }"],
    ids=["does not compile", "is refused"],
)  # fmt: skip
def test_what_they_require_does_not_run(
    text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    helper = "static __always_inline int base_add(u32 cell) { return 0; }\n"
    monkeypatch.setattr(Base, "text", helper + text)
    tracer, said = tried(Upper(tmp_path), Base(tmp_path), Softirq())
    assert said["base"][0] == said["upper"][0] == "missing"
    assert said["base"][1]
    assert said["upper"][1]
    assert said["softirq"][0] == "attached"
    tracer.close()


def test_one_goes_and_those_that_require_it_go_too(tmp_path: Path) -> None:
    tracer, _ = tried(Base(tmp_path), Upper(tmp_path), Softirq())
    coverage = tracer.detach("base_enter", "a test")
    said = {(c.probe, c.program): c.status for c in coverage}
    assert said == dict.fromkeys((("base", "base_enter"), ("base", ""), ("upper", "")), "detached")
    assert [p.name for p in tracer.probes] == ["softirq"]
    tracer.close()


TAIL = """
BPF_PROG_ARRAY(tail_programs, 1);
BPF_ARRAY(tail_counts, u64, 2);
int tail_enter(struct pt_regs *ctx)
{
	tail_programs.call(ctx, 0);
	u32 missed = 0;
	tail_counts.atomic_increment(missed);
	return 0;
}
int tail_goes_on(struct pt_regs *ctx)
{
	u32 cell = PT_REGS_PARM2(ctx) == 4096;
	tail_counts.atomic_increment(cell);
	return 0;
}
"""


class Tail(Written):
    name = "tail"
    programs = (Program("tail_enter", "uprobe"), Program("tail_goes_on", "tail", "tail_programs"))
    text = TAIL


@pytest.mark.parametrize("way", [True, False], ids=["multi", "perf"])
def test_a_program_that_another_goes_on_with(
    way: bool, tmp_path: Path, target: Target, library: Path
) -> None:
    probe = Tail(tmp_path)
    tracer = Tracer([probe], way)
    assert {c.status for c in tracer.load()} == {"attached"}
    with open(library, "rb") as f:
        offset = both(f.fileno(), "cuMemAlloc_v2")[0].offset
        assert tracer.attach_library("key", f.fileno(), [Uprobe("tail_enter", offset, 0)]) == []
    for _ in range(3):
        target.ok("cuMemAlloc_v2", OUT, 4096)
    counts = HashMap(probe.maps["tail_counts"], "<u4", "<u8")
    assert [int(counts.get(i)) for i in (0, 1)] == [0, 3]
    tracer.close()
