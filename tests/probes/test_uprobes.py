"""Uprobes on the simulated driver, by either way of attaching: what they see, and their going."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import ClassVar

import numpy as np
import pytest

from dsprobe.probes import syscalls
from dsprobe.probes.elf import Library
from dsprobe.probes.placement import place
from dsprobe.probes.probe import Batch, BpfProbe, Program, Uprobe
from dsprobe.probes.softirq import Softirq
from dsprobe.probes.tracer import Tracer
from dsprobe.recordings.model import Field, Rows, Stream
from tests.simgpu import build
from tests.simgpu.scenario import parse
from tests.simgpu.target import OUT, Target
from tests.support import programs
from tests.support.wait import until

pytestmark = [pytest.mark.bpf, pytest.mark.tools("gcc")]

HIT = Stream("test.hit", "Runs of a program.", "uprobes", (
    Field("t", "<u8", "ns", "when"), Field("cookie", "<u8", "id", "what it was told"),
    Field("word", "<u8", "id", "the second argument, or the result"),
    Field("top", "<u8", "address", "what the stack pointer points at"),
    Field("pid", "<u4", "pid", "PID"), Field("returned", "<u4", "bool", "on return"),
))  # fmt: skip

# The cookie is asked for by number: bcc 0.26 does not know the helper.
SOURCE = """
static u64 (*hit_cookie)(void *) = (void *)174;
RING(hit, 64);
static __always_inline int hit_put(struct pt_regs *ctx, u32 returned, u64 word)
{
	u32 cpu = bpf_get_smp_processor_id();
	struct ring_count *n = hit_count.lookup(&cpu);
	if (n)
		__sync_fetch_and_add(&n->produced, 1);
	u64 top = 0;
	bpf_probe_read_user(&top, sizeof(top), (void *)PT_REGS_SP(ctx));
	struct hit *e = hit.ringbuf_reserve(sizeof(struct hit));
	if (!e)
		return 0;
	e->t = bpf_ktime_get_ns();
	e->cookie = hit_cookie(ctx);
	e->word = word;
	e->top = top;
	e->pid = bpf_get_current_pid_tgid() >> 32;
	e->returned = returned;
	hit.ringbuf_submit(e, BPF_RB_NO_WAKEUP);
	return 0;
}
int hit_enter(struct pt_regs *ctx) { return hit_put(ctx, 0, PT_REGS_PARM2(ctx)); }
int hit_leave(struct pt_regs *ctx) { return hit_put(ctx, 1, PT_REGS_RC(ctx)); }
"""

NAMES = ("cuMemAlloc_v2", "cuMemFree_v2", "cuCtxSynchronize")


class Hits(BpfProbe):
    name = "hits"
    doc = "made by a test"
    streams = (HIT,)
    programs = (Program("hit_enter", "uprobe"), Program("hit_leave", "uretprobe", required=False))
    rings: ClassVar = {"hit": HIT}
    module = "cuda"

    def __init__(self, folder: Path) -> None:
        self.source = str(folder / "hits.bpf.c")  # type: ignore[misc]
        Path(self.source).write_text(SOURCE)

    def collect(self, now: int) -> list[Batch]:
        return []


class Probed:
    """A tracer with :class:`Hits`, and the hits so far."""

    def __init__(self, folder: Path, multi: bool) -> None:
        self.tracer = Tracer([Hits(folder)], multi)
        self.said = {(c.probe, c.program): c for c in self.tracer.load()}
        assert self.said["hits", ""].status == "attached", self.said

    def put(self, library: Path, key: str = "key", names: tuple[str, ...] = NAMES) -> None:
        """Entry and return probes on ``names``; the cookie is the place of the name in NAMES."""
        with open(library, "rb") as f:
            uprobes = [u for name in names for u in both(f.fileno(), name)]
            assert self.tracer.attach_library(key, f.fileno(), uprobes) == []

    def hits(self) -> Rows:
        batches = [rows for _, rows in self.tracer.drain()]
        return np.concatenate([HIT.empty(0), *batches])


def both(fd: int, name: str) -> list[Uprobe]:
    library = Library(fd)
    function = library.functions("cu")[name]
    offset = function.offset + place(library.code(function, 64)).offset
    cookie = 1000 + NAMES.index(name)
    return [Uprobe("hit_enter", offset, cookie),
            Uprobe("hit_leave", offset, cookie, returns=True)]  # fmt: skip


@pytest.fixture
def library(tmp_path: Path) -> Path:
    """A driver library that no other process maps or probes."""
    folder = tmp_path / "driver"
    shutil.copytree(build.libcuda("driver"), folder, symlinks=True)
    return folder / "libcuda.so.1"


@pytest.fixture
def fresh(tmp_path: Path, library: Path) -> Iterator[Target]:
    """A process that will use it."""
    prefix = ("env", f"LD_LIBRARY_PATH={library.parent}")
    with Target(tmp_path / "truth", parse({"gpu": {"memory": "8GiB"}}), prefix=prefix) as it:
        yield it


@pytest.fixture
def target(fresh: Target) -> Target:
    """One that does, with a context."""
    fresh.start()
    return fresh


@pytest.fixture(params=["multi", "perf"])
def probed(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Probed]:
    it = Probed(tmp_path, request.param == "multi")
    yield it
    it.tracer.close()


def text_of(pid: int, library: Path) -> bytes:
    """The code of a library as it is in the memory of a process; what is in the file but for
    breakpoints (0xcc)."""
    inode = str(library.stat().st_ino)
    maps = [line.split() for line in Path(f"/proc/{pid}/maps").read_text().splitlines()]
    ((low, high),) = [(int(x, 16) for x in m[0].split("-"))
                      for m in maps if m[4] == inode and "x" in m[1]]  # fmt: skip
    with open(f"/proc/{pid}/mem", "rb", 0) as f:
        f.seek(low)
        return f.read(high - low)


def changed(a: bytes, b: bytes) -> set[int]:
    """The bytes that ``b`` has where it is not as ``a``."""
    at = np.flatnonzero(np.frombuffer(a, np.uint8) != np.frombuffer(b, np.uint8))
    return {b[i] for i in at}


def calls(target: Target) -> int:
    """A few calls of each of NAMES, one of them a failure; how many."""
    blocks = [target.ok("cuMemAlloc_v2", OUT, 1000 + i) for i in range(5)]
    for block in blocks:
        target.ok("cuMemFree_v2", block)
    assert target.call("cuMemFree_v2", 0x1234)[0] != 0
    target.ok("cuCtxSynchronize")
    return 12


def test_what_they_see_is_the_truth(probed: Probed, target: Target, library: Path) -> None:
    """Counts, order, arguments, results, cookies and return addresses, in a running process."""
    began = target.truth.begun
    probed.put(library)
    made = calls(target)
    hits = probed.hits()
    truth = target.truth.events[began:]
    assert len(truth) == made
    cookies = [1000 + NAMES.index(target.truth.symbols[e["symbol"]]) for e in truth]
    entries, returns = hits[hits["returned"] == 0], hits[hits["returned"] == 1]
    assert entries["cookie"].tolist() == returns["cookie"].tolist() == cookies
    assert (hits["pid"] == target.pid).all()
    assert returns["word"].astype(np.int32).tolist() == truth["result"].tolist()
    sizes = truth["args"][truth["arg_count"] == 2, 1]
    assert entries["word"][entries["cookie"] == 1000].tolist() == sizes.tolist()
    assert (entries["t"] <= truth["begun"]).all()
    assert (returns["t"] >= truth["ended"]).all()
    # Where the entry's program runs, the return is not redirected yet: its caller is libffi.
    for address in entries["top"]:
        assert "libffi" in mapped_at(target.pid, int(address))


def mapped_at(pid: int, address: int) -> str:
    for line in Path(f"/proc/{pid}/maps").read_text().splitlines():
        low, high = (int(x, 16) for x in line.split()[0].split("-"))
        if low <= address < high:
            return line
    return ""


def test_processes_that_come_later(probed: Probed, fresh: Target, library: Path) -> None:
    """The library is mapped after the probes are there, and then by a child."""
    probed.put(library)
    child, _ = fresh.fork(["cuMemAlloc_v2", OUT, 4096])
    fresh.start()
    fresh.ok("cuMemAlloc_v2", OUT, 8192)
    hits = probed.hits()
    seen = {(int(h["pid"]), int(h["word"])) for h in hits[hits["returned"] == 0]}
    assert seen == {(child, 4096), (fresh.pid, 8192)}


def test_their_going_restores_the_code(probed: Probed, target: Target, library: Path) -> None:
    before = text_of(target.pid, library)
    probed.put(library)
    # A jump that a breakpoint replaces keeps its other bytes.
    assert changed(before, text_of(target.pid, library)) == {0xCC}
    probed.tracer.detach_library("key")
    until(lambda: text_of(target.pid, library) == before, "it is as it was")
    probed.hits()
    calls(target)
    assert not len(probed.hits())
    probed.put(library)
    made = calls(target)
    assert len(probed.hits()) == 2 * made
    ours = {c.id for c in probed.tracer.costs().values()}
    assert ours <= programs.loaded()
    probed.tracer.close()
    until(lambda: text_of(target.pid, library) == before, "it is as it was again")
    until(lambda: not ours & programs.loaded(), "the kernel has freed them")


def test_each_copy_of_a_library_for_itself(
    probed: Probed, target: Target, library: Path, tmp_path: Path
) -> None:
    """Two files of the same content, as two containers have: known by inode, detached alone."""
    shutil.copytree(library.parent, tmp_path / "copy")
    copy = tmp_path / "copy" / "libcuda.so.1"
    before = text_of(target.pid, library)
    probed.put(copy, "copy", NAMES[:1])
    assert text_of(target.pid, library) == before
    probed.put(library, "original", NAMES[:1])
    probed.tracer.detach_library("copy")
    probed.tracer.detach_library("never heard of")
    target.ok("cuMemAlloc_v2", OUT, 4096)
    assert probed.hits()["word"].tolist()[:1] == [4096]


def test_what_cannot_be_attached_is_named_and_the_rest_is(
    probed: Probed, target: Target, library: Path
) -> None:
    with open(library, "rb") as f:
        good = both(f.fileno(), NAMES[0]) + both(f.fileno(), NAMES[1])
        bad = [Uprobe("hit_enter", 1 << 40, 1), Uprobe("hit_nowhere", good[0].offset, 2)]
        errors = probed.tracer.attach_library(
            "key", f.fileno(), [good[0], bad[0], *good[1:], bad[1]]
        )
    assert {u for u, _ in errors} == set(bad)
    said = dict(errors)
    assert said[bad[1]] == "its program is not loaded"
    assert said[bad[0]].startswith("cannot be attached: ")
    target.ok("cuMemFree_v2", target.ok("cuMemAlloc_v2", OUT, 4096))
    assert probed.hits()["cookie"].tolist() == [1000, 1000, 1001, 1001]


def test_a_program_or_a_probe_that_goes_is_taken_out(
    probed: Probed, target: Target, library: Path
) -> None:
    before = text_of(target.pid, library)
    probed.put(library, names=NAMES[:1])
    (said, _) = probed.tracer.detach("hit_leave", "a test")
    assert (said.program, said.status) == ("hit_leave", "detached")

    def only_entries() -> bool:
        target.ok("cuMemAlloc_v2", OUT, 4096)
        return bool(probed.hits()["returned"].tolist() == [0])

    until(only_entries, "returns are not seen any more, entries are")
    assert probed.tracer.costs().keys() == {"hit_enter"}
    probed.tracer.detach("hit_enter", "a test")
    until(lambda: text_of(target.pid, library) == before, "it is as it was")
    assert not probed.tracer.probes


HOLDER = """
import os, sys
from pathlib import Path
from tests.probes.test_uprobes import Probed
probed = Probed(Path(sys.argv[1]), sys.argv[2] == "multi")
probed.put(Path(sys.argv[3]))
print(*(c.id for c in probed.tracer.costs().values()), flush=True)
sys.stdin.read()
"""


@pytest.mark.parametrize("way", ["multi", "perf"])
def test_kill_takes_them_out(way: str, target: Target, library: Path, tmp_path: Path) -> None:
    before = text_of(target.pid, library)
    holder = subprocess.Popen(
        [sys.executable, "-c", HOLDER, str(tmp_path), way, str(library)], text=True,
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, cwd=Path(__file__).parents[2],
    )  # fmt: skip
    with holder:
        assert holder.stdout
        ours = {int(n) for n in holder.stdout.readline().split()}
        assert len(ours) == 2
        assert changed(before, text_of(target.pid, library)) == {0xCC}
        os.kill(holder.pid, signal.SIGKILL)
        until(lambda: text_of(target.pid, library) == before, "it is as it was")
        until(lambda: not ours & programs.loaded(), "the kernel has freed them")
    calls(target)


# -- kernels that cannot -----------------------------------------------------------------------


def test_the_kernel_decides_on_the_way(tmp_path: Path) -> None:
    """What the kernel says of itself and what is then done agree."""
    tracer = Tracer([Hits(tmp_path)])
    assert {c.status for c in tracer.load()} == {"attached"}
    assert tracer._libraries._multi == syscalls.has_uprobe_multi()
    tracer.close()


@pytest.mark.parametrize(
    ("lacks", "why"),
    [("has_cookies", "Linux 5.15 can"), ("has_uprobes", "CONFIG_UPROBE_EVENTS")],
)
def test_without_what_they_need(
    lacks: str, why: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(syscalls, lacks, lambda: False)
    tracer = Tracer([Hits(tmp_path), Softirq()])
    said = {c.probe: c for c in tracer.load() if not c.program}
    assert said["hits"].status == "missing"
    assert why in said["hits"].reason
    assert said["softirq"].status == "attached"
    tracer.close()


def test_a_helper_that_the_kernel_lacks_is_found_out(monkeypatch: pytest.MonkeyPatch) -> None:
    assert syscalls.has_cookies()
    monkeypatch.setattr(syscalls, "_COOKIE", bytes.fromhex("85000000ffffff00"))
    assert not syscalls.has_cookies()
