"""How ``scripts/bench`` judges figures and says that some are missing."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "scripts"))

from benchlib import main as bench_main  # noqa: E402
from benchlib import table  # noqa: E402
from benchlib.model import Bench, Context, Row, failed  # noqa: E402


@pytest.mark.parametrize(
    ("measured", "budget", "at_least", "verdict"),
    [
        (20, 25, False, "OK"),
        (25, 25, False, "OK"),
        (26, 25, False, "OVER"),
        (30, 25, True, "OK"),
        (24, 25, True, "OVER"),
        (30, None, False, ""),
        (None, 25, False, ""),
    ],
)
def test_verdicts(measured: float, budget: float, at_least: bool, verdict: str) -> None:
    assert Row("x", "", measured, budget, at_least).verdict == verdict


def ok(ctx: Context) -> Iterator[Row]:
    yield Row("good", "ns", 10, 20)


def over(ctx: Context) -> Iterator[Row]:
    yield Row("large", "MB", 30, 20)


def half(ctx: Context) -> Iterator[Row]:
    yield Row("before", "", 1, 2)
    raise RuntimeError("the disk\nis gone")


@pytest.mark.parametrize(
    ("runs", "code"), [((ok,), 0), ((ok, over), 6), ((ok, half), 1), ((over, half), 1)]
)
def test_exit_codes_and_the_document(
    runs: tuple[object, ...], code: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    benches = [Bench(r.__name__, "about it", r) for r in runs]  # type: ignore[attr-defined, arg-type]
    out = tmp_path / "bench.md"
    assert bench_main._measure(benches, ROOT, True, out) == code
    said, written = capsys.readouterr().out, out.read_text()
    for text in (said, written):
        assert ("FAILED (the disk is gone)" in text) == (half in runs)
        assert ("OVER" in text) == (over in runs)
        assert ("before" in text) == (half in runs), "rows before a failure are kept"
    assert "kernel" in written
    assert "quick run" in written


def test_a_failed_row_has_its_reason_in_both_tables() -> None:
    row = failed("x", "ns", "no such thing")
    assert "FAILED (no such thing)" in table.line(row)


def test_list_needs_neither_root_nor_time() -> None:
    done = subprocess.run(
        [str(ROOT / "scripts" / "bench"), "--list"], capture_output=True, text=True, timeout=20
    )
    assert done.returncode == 0
    assert {"intake", "udp", "tcp", "agent", "screen", "files"} <= {
        line.split()[0] for line in done.stdout.splitlines()
    }


def test_an_unknown_name_is_a_usage_error() -> None:
    done = subprocess.run(
        [str(ROOT / "scripts" / "bench"), "nonsense"], capture_output=True, text=True, timeout=20
    )
    assert done.returncode == 2
    assert "--list" in done.stderr
