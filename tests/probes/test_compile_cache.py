"""Modules that are kept: used where they are root's and whole, compiled again where not."""

from __future__ import annotations

import os
import stat
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from dsprobe.probes import compilecache, compiler
from dsprobe.probes.compilecache import Cache
from dsprobe.probes.module import Module, load
from dsprobe.probes.probe import BpfProbe
from dsprobe.probes.runq import Runq
from dsprobe.probes.softirq import Softirq
from tests.probes.test_compiler import MAPS, MOVE, load_of
from tests.probes.test_tracer import SYNTAX, UNSAFE, Broken, assert_works
from tests.probes.test_tracer import load as loaded

pytestmark = pytest.mark.bpf

KEY = "0" * 64
MODULE = Module(MAPS, {"f": load_of(1) + MOVE})


@pytest.fixture(autouse=True)
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache that does not exist yet."""
    path = tmp_path / "cache"
    monkeypatch.setenv("DSPROBE_CACHE", str(path))
    return path


@pytest.fixture
def compiled(monkeypatch: pytest.MonkeyPatch) -> list[object]:
    """A job for each compilation."""
    jobs: list[object] = []
    real = compiler.Compiler.compile

    def count(self: compiler.Compiler, job: dict[str, object]) -> Module:
        jobs.append(job)
        return real(self, job)

    monkeypatch.setattr(compiler.Compiler, "compile", count)
    return jobs


def run(*probes: BpfProbe) -> None:
    """Load probes, and have each of them see something."""
    t, said = loaded(*probes)
    for probe in probes:
        assert_works(t, said, probe.name)
    t.close()


def test_the_second_time_nothing_is_compiled(place: Path, compiled: list[object]) -> None:
    run(Softirq(), Runq())
    assert len(compiled) == 1
    run(Softirq(), Runq())
    assert len(compiled) == 1
    (file,) = place.iterdir()
    assert stat.S_IMODE(place.stat().st_mode) == 0o700
    assert stat.S_IMODE(file.stat().st_mode) == 0o600


def test_what_is_kept_needs_no_bcc_and_no_child(place: Path) -> None:
    run(Softirq())
    code = (
        "import sys, subprocess\n"
        "subprocess.Popen = None\n"
        "from tests.probes.test_compile_cache import run, Softirq\n"
        "run(Softirq())\n"
        "assert 'bcc' not in sys.modules\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, cwd=Path(__file__).parents[2])


@pytest.mark.parametrize("what", ["text", "kernel", "bcc", "header"])
def test_another_text_or_machine_is_another_module(
    what: str, compiled: list[object], monkeypatch: pytest.MonkeyPatch, place: Path
) -> None:
    run(Softirq())
    if what == "kernel":
        now = os.uname()
        other = os.uname_result((*now[:3], now.version + " rebuilt", now.machine))
        monkeypatch.setattr(os, "uname", lambda: other)
    elif what == "bcc":
        monkeypatch.setattr(compilecache, "_bcc", lambda: ["elsewhere", "0.99"])
    elif what == "header":
        header = place.parent / "include" / "x.h"
        header.parent.mkdir()
        header.write_text("#define X 1\n")
        for name in ("compiler.py", "module.py"):
            (place.parent / name).symlink_to(compilecache._HERE / name)
        monkeypatch.setattr(compilecache, "_HERE", place.parent)
    run(Softirq(slow_ns=5_000_000) if what == "text" else Softirq())
    assert len(compiled) == 2
    assert len(list(place.iterdir())) == 2


@pytest.mark.parametrize(
    "damage",
    [
        lambda data: b"",
        lambda data: data[: len(data) // 2],
        lambda data: data[:-1] + bytes([data[-1] ^ 1]),
        lambda data: data + b"x",
        lambda data: b"other module 9\n" + data,
    ],
    ids=["empty", "cut", "a bit", "longer", "of another version"],
)
def test_what_is_damaged_is_made_again(
    damage: Callable[[bytes], bytes], place: Path, compiled: list[object]
) -> None:
    run(Softirq())
    (file,) = place.iterdir()
    whole = file.read_bytes()
    file.write_bytes(damage(whole))
    run(Softirq())
    assert len(compiled) == 2
    assert file.read_bytes() == whole


def test_every_bit_counts(place: Path) -> None:
    Cache().put(KEY, MODULE)
    assert Cache().get(KEY) == MODULE
    whole = (place / KEY).read_bytes()
    for i in range(len(whole)):
        for bit in range(8):
            (place / KEY).write_bytes(whole[:i] + bytes([whole[i] ^ 1 << bit]) + whole[i + 1 :])
            assert Cache().get(KEY) is None


def _link_folder(place: Path) -> None:
    place.rename(place.with_name("real"))
    place.symlink_to("real")


def _link_file(place: Path) -> None:
    (place / KEY).rename(place / "real")
    (place / KEY).symlink_to("real")


def _fifo(place: Path) -> None:
    (place / KEY).unlink()
    os.mkfifo(place / KEY, 0o600)


@pytest.mark.parametrize(
    "spoil",
    [
        lambda place: os.chown(place / KEY, 1000, 0),
        lambda place: os.chown(place, 1000, 0),
        lambda place: (place / KEY).chmod(0o620),
        lambda place: (place / KEY).chmod(0o602),
        lambda place: place.chmod(0o770),
        lambda place: place.chmod(0o1777),
        _link_file,
        _link_folder,
        _fifo,
    ],
    ids=["file of another", "folder of another", "group may write", "others may write",
         "group may write the folder", "others may write the folder", "symbolic link",
         "folder is a symbolic link", "FIFO"],
)  # fmt: skip
def test_what_another_could_have_written_is_not_used(
    spoil: Callable[[Path], None], place: Path
) -> None:
    Cache().put(KEY, MODULE)
    assert Cache().get(KEY) == MODULE
    spoil(place)
    assert Cache().get(KEY) is None


def test_nothing_is_put_where_another_may_write(place: Path) -> None:
    place.mkdir()
    place.chmod(0o777)
    Cache().put(KEY, MODULE)
    assert not list(place.iterdir())
    place.chmod(0o700)
    # A link in the way of the new file is replaced, not followed.
    (place.parent / "precious").write_text("precious")
    (place / KEY).symlink_to(place.parent / "precious")
    Cache().put(KEY, MODULE)
    assert (place.parent / "precious").read_text() == "precious"
    assert Cache().get(KEY) == MODULE


@pytest.mark.parametrize("why", ["off", "not root", "a file there", "no such folder"])
def test_no_cache_is_no_trouble(
    why: str, place: Path, compiled: list[object], monkeypatch: pytest.MonkeyPatch
) -> None:
    if why == "off":
        monkeypatch.setenv("DSPROBE_CACHE", "")
    elif why == "not root":
        monkeypatch.setattr(os, "geteuid", lambda: 1000)
    elif why == "a file there":
        place.write_text("")
    else:
        monkeypatch.setenv("DSPROBE_CACHE", str(place / "deep" / "down"))
    run(Softirq())
    run(Softirq())
    assert len(compiled) == 2
    assert not place.is_dir()


def test_those_used_last_are_kept(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compilecache, "KEPT", 3)
    keys = [f"{i:064x}" for i in range(5)]
    for age, key in enumerate(reversed(keys)):
        Cache().put(key, MODULE)
        assert Cache().get(key) == MODULE
        os.utime(place / key, (1000 + age, 1000 + age))
        (place / "something else").touch()
    assert Cache().get(keys[2]) == MODULE  # used now
    begun = place / f".{keys[0]}.1234_5678"
    begun.touch(0o600)
    os.utime(begun, (1000, 1000))
    Cache().put("f" * 64, MODULE)
    left = {p.name for p in place.iterdir()}
    assert left == {"f" * 64, keys[2], keys[0], "something else"}
    assert not begun.exists()


def test_many_at_once(place: Path) -> None:
    """Each loads, and leaves one whole file."""
    failed: list[BaseException] = []

    def one() -> None:
        try:
            run(Softirq())
        except BaseException as e:
            failed.append(e)

    threads = [threading.Thread(target=one) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failed
    (file,) = place.iterdir()
    assert Cache().get(file.name) is not None


def test_what_did_not_compile_is_tried_again(
    place: Path, compiled: list[object], tmp_path: Path
) -> None:
    for _ in range(2):
        t, said = loaded(Broken(tmp_path, SYNTAX), Softirq())
        assert "this_is_not_declared" in said["broken", ""].reason
        assert_works(t, said, "softirq")
        t.close()
    assert len(compiled) == 2
    assert not place.exists()


def test_what_the_verifier_refuses_is_refused_for_the_same_reason(
    compiled: list[object], tmp_path: Path
) -> None:
    reasons = set()
    for _ in range(2):
        t, said = loaded(Broken(tmp_path, UNSAFE), Softirq())
        reasons.add(said["broken", ""].reason)
        assert_works(t, said, "softirq")
        t.close()
    assert len(compiled) == 1
    assert len(reasons) == 1
    assert "invalid mem access" in reasons.pop()


def test_a_map_that_cannot_be_made_costs_only_those_that_use_it() -> None:
    huge = MAPS[0].__class__("huge", 1, 4, 1 << 20, (1 << 32) - 1, 0)
    exit = bytes.fromhex("9500000000000000")
    zero = bytes.fromhex("b700000000000000")
    module = Module(
        (huge, MAPS[1]),
        {"uses_it": load_of(0) + zero + exit, "does_not": load_of(1) + zero + exit},
    )
    before = len(os.listdir("/proc/self/fd"))
    made = load(module, dict.fromkeys(("uses_it", "does_not", "no_such"), "raw_tracepoint"))
    assert made.programs.keys() == {"does_not"}
    assert made.maps.keys() == {"ring"}
    assert made.errors.keys() == {"uses_it"}
    assert made.errors["uses_it"].startswith("its map huge cannot be made: ")
    made.close()
    assert len(os.listdir("/proc/self/fd")) == before
