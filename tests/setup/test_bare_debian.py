"""The first README command in a Debian that holds nothing but its base."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.setup.places import BareDebian, folder, running
from tests.setup.terminal import Terminal
from tests.support.wait import until

pytestmark = [pytest.mark.setup, pytest.mark.bpf, pytest.mark.slow]


@pytest.fixture(scope="module")
def place() -> Iterator[Path]:
    with folder() as path:
        yield path


@pytest.fixture(scope="module")
def debian(place: Path) -> BareDebian:
    return BareDebian(place / "debian")


def test_the_first_use_installs_what_is_missing_and_runs(debian: BareDebian, place: Path) -> None:
    assert not (debian.root / "usr/bin/python3").exists()
    first = debian.command("scripts/dsprobe", "top", "--once")
    with Terminal(place, first, rows=100) as t:
        assert t.exit_code(seconds=150) == 0
        screen = t.screen()
    assert "dsprobe: installing python3 python3-venv python3-bpfcc ca-certificates" in screen
    assert "net_rx" in screen


def test_the_screen_comes_up_without_network_set_up_or_kernel_headers(
    debian: BareDebian, place: Path
) -> None:
    assert not (debian.root / "lib/modules").exists()
    with Terminal(place, debian.command("unshare", "-n", "scripts/dsprobe", "top")) as t:
        screen = t.wait(lambda s: "net_rx" in s)
        assert "installing" not in screen
        t.press("q")
        assert t.exit_code() == 0


def test_nothing_is_left_mounted_or_running(debian: BareDebian) -> None:
    # The agent that top started ends with it, within the second that its farewell may take.
    until(lambda: not running(debian.root), "every process has ended", 10)
    assert str(debian.root) not in Path("/proc/self/mountinfo").read_text()
