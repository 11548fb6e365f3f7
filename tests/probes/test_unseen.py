"""What the kernel counted and the programs did not, with counters that the test writes."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from dsprobe.probes import unseen
from dsprobe.probes.unseen import Counts, Unseen, softirqs
from dsprobe.recordings.streams import VECTORS

CPUS = 3
TIMER, NET_RX = VECTORS.index("TIMER"), VECTORS.index("NET_RX")


class Kernel:
    """Its counters and, as they should be, those of the programs; both (CPU, vector)."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.counts = np.full((CPUS, len(VECTORS)), 1000, np.int64)
        self.seen: Counts = np.zeros_like(self.counts)
        self.online = {0, 1, 2}
        self.hidden: set[int] = set()
        """CPUs that show 0."""
        self.write()

    def write(self) -> None:
        shown = self.counts.copy()
        shown[sorted(self.hidden)] = 0
        lines = ["".join(f"{'CPU' + str(cpu):>12}" for cpu in range(CPUS))]
        for vec, name in enumerate(VECTORS):
            lines.append(f"{name:>12}:" + "".join(f"{n % (1 << 32):>11}" for n in shown[:, vec]))
        self.path.write_text("\n".join(lines) + "\n")

    def run(self, cpu: int, vec: int, n: int = 1, seen: bool = True) -> None:
        self.counts[cpu, vec] += n
        self.seen[cpu, vec] += n if seen else 0


@pytest.fixture
def kernel(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Kernel:
    it = Kernel(tmp_path / "softirqs")
    monkeypatch.setattr(unseen, "online_cpus", lambda: it.online)
    return it


class Compared:
    """Compares when it is called; :attr:`total` is all that was found."""

    def __init__(self, kernel: Kernel) -> None:
        self._kernel, self.total = kernel, 0
        self._unseen = Unseen(kernel.seen.copy(), kernel.path)

    def __call__(self) -> int:
        self._kernel.write()
        new = self._unseen.update(self._unseen.read(), self._kernel.seen.copy())
        assert new >= 0
        self.total += new
        return new

    @property
    def ran(self) -> int:
        return self._unseen.ran


def test_the_file_is_read_by_cpu_and_vector(kernel: Kernel) -> None:
    kernel.counts = np.arange(CPUS * len(VECTORS)).reshape(CPUS, -1)
    kernel.write()
    assert (softirqs(CPUS, kernel.path) == kernel.counts).all()
    assert (softirqs(2, kernel.path) == kernel.counts[:2]).all()
    wide = softirqs(5, kernel.path)
    assert (wide[:CPUS] == kernel.counts).all()
    assert not wide[CPUS:].any()


def test_columns_that_are_left_out_and_vectors_of_another_kernel(tmp_path: Path) -> None:
    path = tmp_path / "softirqs"
    path.write_text("      CPU0   CPU7\n NEW: 1 2\n  NET_RX:  5  8\n")
    counts = softirqs(8, path)
    assert counts[[0, 7], NET_RX].tolist() == [5, 8]
    assert counts.sum() == 13


@pytest.mark.parametrize("text", ["", "x", "CPU0 CPUx\n", "CPU0 CPU1\nTIMER: 1\n", "CPU0\nHI: q\n"])
def test_other_text_is_a_value_error_or_nothing(tmp_path: Path, text: str) -> None:
    path = tmp_path / "softirqs"
    path.write_text(text)
    try:
        assert not softirqs(2, path).any()
    except ValueError:
        assert text


def test_what_ran_unseen_is_counted_but_for_one_that_may_be_under_way(kernel: Kernel) -> None:
    compare = Compared(kernel)
    kernel.run(0, TIMER, 50)
    assert compare() == 0
    kernel.run(0, TIMER, 7, seen=False)
    assert compare() == 6
    kernel.run(1, NET_RX, seen=False)
    assert compare() == 0  # its program may be about to count it
    kernel.run(1, TIMER, seen=False)
    assert compare() == 1  # but only one runs on a CPU at a time
    assert compare() == 0
    assert compare.ran == 59


def test_what_runs_between_the_two_readings_is_no_loss_and_hides_none_for_long(
    kernel: Kernel,
) -> None:
    compare = Compared(kernel)
    kernel.run(0, TIMER, 11, seen=False)
    kernel.write()
    kernel.seen[0, TIMER] += 5  # counted since by the programs, by the kernel later
    real, kernel.write = kernel.write, lambda: None  # type: ignore[method-assign]
    assert compare() == 5
    kernel.write = real  # type: ignore[method-assign]
    kernel.counts[0, TIMER] += 5
    assert compare() == 5
    assert compare.total == 10


def test_counters_that_wrap(kernel: Kernel) -> None:
    kernel.counts[0, TIMER] = (1 << 32) - 5
    kernel.write()
    compare = Compared(kernel)
    kernel.run(0, TIMER, 100)
    assert compare() == 0
    kernel.run(0, TIMER, 3, seen=False)
    assert compare() == 2


def test_a_cpu_that_goes_and_comes_fakes_none(kernel: Kernel) -> None:
    """Offline it may show 0, and its whole past when it is back."""
    kernel.online, kernel.hidden = {0, 1}, {2}
    kernel.write()
    compare = Compared(kernel)
    for online, hidden in (({0, 1, 2}, set()), ({0, 1}, {2}), ({0, 1, 2}, set())):
        kernel.online, kernel.hidden = online, hidden
        kernel.run(0, TIMER, 9)
        kernel.run(2, TIMER, 9)
        assert compare() == 0
        kernel.run(2, TIMER, 9)
        assert compare() == 0
    kernel.run(2, TIMER, 50, seen=False)
    # What ran each time that it came back makes up for some.
    assert 50 - 1 - 3 * 9 <= compare() <= 50 - 1


def test_a_cpu_that_went_and_came_between_two_looks_at_which_are_online(kernel: Kernel) -> None:
    compare = Compared(kernel)
    kernel.hidden = {1}
    assert compare() == 0
    kernel.hidden = set()
    assert compare() == 0
    kernel.run(1, TIMER, 4, seen=False)
    assert compare() == 3


def test_counters_that_begin_anew(kernel: Kernel) -> None:
    compare = Compared(kernel)
    kernel.counts[1] = 0
    assert compare() == 0
    kernel.run(1, TIMER, 30)
    assert compare() == 0
    kernel.run(1, TIMER, 40, seen=False)
    assert compare() == 40 - 1 - 30  # what ran as it began makes up for some
