"""Programs that take a snapshot of themselves, built and run; and what the tools say of them."""

from __future__ import annotations

import contextlib
import subprocess
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from dsprobe.probes.native.symbolizer import Answer, Registers, Symbolizer
from tests.support.wait import until

HERE = Path(__file__).parent


def build(out: Path, source: str | Path, *flags: str) -> Path:
    """The program ``out`` from a source beside this file (or anywhere)."""
    source = HERE / source
    compiler = "g++" if source.suffix == ".cc" else "gcc"
    command = [compiler, "-O2", f"-I{HERE}", *flags, "-o", str(out), str(source)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return out


@dataclass(frozen=True)
class Snapshot:
    """``truth``: return addresses by backtrace(3), innermost first."""

    pid: int
    t: int
    registers: Registers
    copy: bytes
    truth: list[int]

    @classmethod
    def read(cls, process: subprocess.Popen[str]) -> Snapshot:
        assert process.stdout is not None
        words = process.stdout.readline().split()
        assert len(words) > 10, "the target took no snapshot"
        return cls(
            process.pid,
            time.monotonic_ns(),
            Registers(*(int(w, 16) for w in words[:8])),
            bytes.fromhex(words[8]),
            [int(w, 16) for w in words[9:]],
        )


@contextlib.contextmanager
def running(*command: str | Path) -> Iterator[subprocess.Popen[str]]:
    process = subprocess.Popen(
        [str(c) for c in command], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


@contextlib.contextmanager
def symbolizer(**limits: float) -> Iterator[Symbolizer]:
    s = Symbolizer(**limits)
    try:
        yield s
    finally:
        s.close()


def answer(s: Symbolizer, key: object) -> Answer:
    """The answer to ``key``, which is the only question."""
    found = until(s.answers, f"an answer to {key}", 60)
    assert [a.key for a in found] == [key]
    return found[0]


def ask(s: Symbolizer, snapshot: Snapshot, addresses: Sequence[int]) -> Answer:
    assert s.ask("ask", 1, snapshot.pid, snapshot.t, addresses)
    return answer(s, "ask")


def unwind(s: Symbolizer, snapshot: Snapshot) -> Answer:
    assert s.unwind("unwind", 1, snapshot.pid, snapshot.t, snapshot.registers, snapshot.copy)
    return answer(s, "unwind")


def loaded_at(pid: int, path: str) -> int:
    """Address of a file's first mapping."""
    for line in Path(f"/proc/{pid}/maps").read_text().splitlines():
        if line.endswith(path):
            return int(line.split("-")[0], 16)
    raise AssertionError(f"{path} is not mapped")


def names_at(path: Path, address: int, *flags: str) -> set[str]:
    """All functions of ``path`` that hold ``address``, as nm has them."""
    done = subprocess.run(
        ["nm", "-S", "--defined-only", *flags, str(path)], capture_output=True, text=True
    )
    found = set()
    for line in done.stdout.splitlines():
        words = line.split(None, 3)
        if len(words) == 4 and words[2] in "tTwWiuU":
            start, size = int(words[0], 16), int(words[1], 16)
            if start <= address < start + size:
                found.add(words[3].split("@")[0])
    return found


def build_id(path: Path) -> str:
    out = subprocess.run(["readelf", "-n", str(path)], capture_output=True, text=True).stdout
    return out.partition("Build ID: ")[2].split()[0] if "Build ID: " in out else ""
