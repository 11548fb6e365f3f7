"""Native stacks of allocations in a running program, from BPF to rows, against backtrace(3)."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from dsprobe.probes.cuda import Cuda
from dsprobe.probes.memory import Memory
from dsprobe.probes.native.maps import Maps
from dsprobe.probes.native.symbolizer import Symbolizer
from dsprobe.probes.stacks import Stacks
from dsprobe.probes.tracer import Tracer
from dsprobe.recordings.cudastreams import FRAME_KINDS
from dsprobe.recordings.filesession import open_file
from tests.cuda.tracing import Tracing
from tests.native.targets import Snapshot, build, build_id
from tests.simgpu.build import libcuda
from tests.simgpu.run import environment
from tests.support.box import box
from tests.support.wait import until

pytestmark = [pytest.mark.bpf, pytest.mark.tools("gcc", "g++", "readelf")]


def frames_of_allocation(folder: Path, program: Path, unwind: bool) -> tuple[Snapshot, list, Maps]:
    """The snapshot, native rows of meta.frame (innermost first), and the mappings then."""
    cuda = Cuda()
    cuda.stacks = Stacks(Symbolizer(), unwind=unwind)
    tracer = Tracer([cuda, Memory()])
    try:
        said = [c for c in tracer.load() if c.status != "attached" and not c.program]
        assert not said
        tracing = Tracing(tracer, cuda)
        tracing.attach(libcuda("driver") / "libcuda.so.1")
        process = subprocess.Popen(
            [program], env=environment(folder), text=True,
            stdin=subprocess.PIPE, stdout=subprocess.PIPE,
        )  # fmt: skip
        try:
            snapshot = Snapshot.read(process)
            maps = Maps.parse(Path(f"/proc/{process.pid}/maps").read_bytes())

            def stack() -> int:
                tracing.step()
                rows = tracing.rows("gpu.alloc")
                mine = rows[(rows["bytes"] == 1 << 20) & (rows["stack"] > 0)]
                number = int(mine["stack"][0]) if len(mine) else 0
                return number if (tracing.rows("meta.stack")["id"] == number).any() else 0

            number = until(stack, "the allocation's stack")
        finally:
            process.kill()
            process.communicate()
        stacks, frames = tracing.rows("meta.stack"), tracing.rows("meta.frame")
        mine = stacks[stacks["id"] == number]
        by_id = {int(f["id"]): f for f in frames}
        assert mine["depth"].tolist() == list(range(len(mine)))
        found = [by_id[int(s["frame"])] for s in mine]
        return snapshot, [f for f in found if FRAME_KINDS[f["kind"]] == "native"], maps
    finally:
        tracer.close()


def in_memory(frames: list, maps: Maps) -> list[int]:
    """Addresses of frames; in these files what lies at an offset has that as its address."""
    found = []
    for f in frames:
        r = next(r for r in maps.ranges if r.path == f["module"])
        found.append(int(f["offset"]) - r.offset + r.low)
    return found


@pytest.fixture(scope="module")
def program(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build(tmp_path_factory.mktemp("allocator") / "allocator", "allocator.cc")


def test_all_callers_of_an_allocation(tmp_path: Path, program: Path) -> None:
    snapshot, frames, maps = frames_of_allocation(tmp_path / "truth", program, unwind=True)
    assert [f["function"] for f in frames[:3]] == [
        "pool::Segment::grow(unsigned long)",
        "pool::refill(std::vector<unsigned long, std::allocator<unsigned long> > const&)",
        "compare(void const*, void const*)",
    ]
    functions = [f["function"] for f in frames]
    assert functions.index("main") > 3  # beyond the C library's qsort
    assert functions[-1] == "_start"
    assert frames[0]["module"] == str(program)
    assert frames[0]["build_id"] == build_id(program)
    # grow() calls the driver, then it asks for the truth: only in grow() itself they differ.
    assert in_memory(frames, maps)[1:] == snapshot.truth[1:]


def test_without_the_option_the_caller_alone(tmp_path: Path, program: Path) -> None:
    _, frames, _ = frames_of_allocation(tmp_path / "truth", program, unwind=False)
    assert [f["function"] for f in frames] == ["pool::Segment::grow(unsigned long)"]


def test_record_with_the_option(tmp_path: Path, program: Path) -> None:
    """The whole way: an agent that finds the program while it runs, and a file."""
    with box() as here:
        path = tmp_path / "r.mcap"
        env = environment(tmp_path / "truth")
        with subprocess.Popen([program, "1000"], env=env) as process:
            try:
                code, _, err = here.run(
                    "record", "-o", str(path), "--native-stacks", "--probes", "memory",
                    "--pid", str(process.pid), "--duration", "4s",
                )  # fmt: skip
            finally:
                process.kill()
        assert code == 0, err
    with open_file(str(path)) as f:
        stacks, frames = (f.read(s, 0, 1 << 62) for s in ("meta.stack", "meta.frame"))
        allocated = f.read("gpu.alloc", 0, 1 << 62)
    names = dict(zip(frames["id"].tolist(), frames["function"], strict=True))
    number = allocated["stack"][allocated["stack"] > 0][-1]
    functions = [names[i] for i in stacks["frame"][stacks["id"] == number].tolist()]
    assert functions[0] == "pool::Segment::grow(unsigned long)"
    assert functions.index("compare(void const*, void const*)") < functions.index("main")
