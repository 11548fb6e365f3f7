"""Places for probes are tried out on builds that nobody verified, once each."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

from dsprobe.agent import vetting
from dsprobe.agent.vetting import Vetting
from dsprobe.probes import driver, functions, trial
from tests.simgpu import build

pytestmark = [pytest.mark.bpf, pytest.mark.tools("gcc")]


@pytest.fixture
def library() -> Iterator[tuple[int, driver.Driver]]:
    path = build.libcuda() / "libcuda.so.1"
    fd = os.open(path, os.O_RDONLY)
    yield fd, driver.read(fd, str(path))
    os.close(fd)


def no_bench() -> trial.Bench:
    raise OSError("programs cannot be loaded")


def test_a_build_is_tried_once_and_its_copies_are_not(
    library: tuple[int, driver.Driver], monkeypatch: pytest.MonkeyPatch
) -> None:
    fd, found = library
    v = Vetting()
    tried = v.places(fd, found)
    assert tried.entries == found.entries
    assert tried.refused == {}
    monkeypatch.setattr(trial, "Bench", no_bench)
    copy = driver.read(fd, "/elsewhere/libcuda.so.1")
    again = v.places(fd, copy)
    assert (again.path, again.entries) == (copy.path, tried.entries)


def test_what_cannot_be_tried_is_probed_at_its_start(
    library: tuple[int, driver.Driver], monkeypatch: pytest.MonkeyPatch
) -> None:
    fd, found = library
    monkeypatch.setattr(trial, "Bench", no_bench)
    placed = Vetting().places(fd, found)
    traced = [n for n in found.entries if functions.of_symbol(n)]
    assert len(traced) > 100
    for name in traced:
        entry = placed.entries[name]
        assert (entry.offset, entry.emulated) == (0, False)
        assert entry.why == "not tried out: programs cannot be loaded"


def test_a_function_that_failed_has_no_place(
    library: tuple[int, driver.Driver], monkeypatch: pytest.MonkeyPatch
) -> None:
    fd, found = library
    real = trial.Bench.try_out

    def fail(self: trial.Bench, fd: int, d: driver.Driver, names: list[str]) -> trial.Verdict:
        verdict = real(self, fd, d, names)
        entries = {n: p for n, p in verdict.entries.items() if n != "cuMemAlloc_v2"}
        return trial.Verdict(entries, {"cuMemAlloc_v2": "a probe there kills the process"},
                             verdict.untried)  # fmt: skip

    monkeypatch.setattr(trial.Bench, "try_out", fail)
    placed = Vetting().places(fd, found)
    assert "cuMemAlloc_v2" not in placed.entries
    assert placed.refused == {"cuMemAlloc_v2": "a probe there kills the process"}
    assert placed.entries.keys() == found.entries.keys() - {"cuMemAlloc_v2"}


def test_a_verified_build_is_not_tried(
    library: tuple[int, driver.Driver], monkeypatch: pytest.MonkeyPatch
) -> None:
    fd, found = library
    monkeypatch.setattr(trial, "VERIFIED", {found.build_id: "this"})
    monkeypatch.setattr(trial, "Bench", no_bench)
    assert Vetting().places(fd, found) is found


def test_seccomp_on_this_kernel_and_on_old_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    """Before 6.11 nothing has to be tried; where it cannot be tried, the answer is no."""
    v = Vetting()
    assert v.survives() == v.survives()
    monkeypatch.setattr(vetting.hitcost, "returns_survive_seccomp", lambda _: no_bench())
    monkeypatch.setattr(vetting.platform, "release", lambda: "6.10.14-generic")
    assert Vetting().survives()
    monkeypatch.setattr(vetting.platform, "release", lambda: "6.11.0-9-generic")
    assert not Vetting().survives()
