"""The interval that a part of a recording speaks for is the one that was asked for."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from dsprobe.agent.commands.main import main
from dsprobe.recordings import streams as st
from dsprobe.recordings.cut import cut
from dsprobe.recordings.filesession import open_file
from dsprobe.recordings.merge import merge
from dsprobe.recordings.writer import Writer
from tests.recordings.sample import FOREVER, SECOND, T0, head

MINUTE = 60 * SECOND


@pytest.fixture
def quiet(tmp_path: Path) -> Path:
    """A minute in which something happens at its two ends only."""
    path = tmp_path / "quiet.mcap"
    with Writer(path) as writer:
        head(writer)
        for second in range(61):
            t = T0 + second * SECOND
            writer.append(
                st.META_CLOCK, st.META_CLOCK.rows(t=[t], wall=[t + 1_700_000_000 * SECOND])
            )
        for t in (T0, T0 + MINUTE):
            writer.append(st.TCP_RETRANSMIT, st.TCP_RETRANSMIT.rows(t=[t], segments=1))
    return path


def part(source: Path, out: Path, start: int, end: int) -> tuple[int, int]:
    """The span of a cut, in ns since T0."""
    with open_file(source) as whole:
        cut(whole, out, T0 + start, T0 + end if end < FOREVER else end, force=True)
    with open_file(out) as found:
        assert not found.problems
        first, last = found.span()
        return (first - T0, last - T0) if last else (0, 0)


def test_a_cut_where_nothing_happened_keeps_its_interval(quiet: Path, tmp_path: Path) -> None:
    out = tmp_path / "c.mcap"
    assert part(quiet, out, 20 * SECOND, 30 * SECOND) == (20 * SECOND, 30 * SECOND - 1)
    again = tmp_path / "again.mcap"
    assert part(out, again, 22 * SECOND, 25 * SECOND) == (22 * SECOND, 25 * SECOND - 1)
    assert part(out, again, 0, FOREVER) == (20 * SECOND, 30 * SECOND - 1)
    # No further than the recording goes.
    assert part(quiet, out, 20 * SECOND, FOREVER) == (20 * SECOND, 60 * SECOND)
    assert part(quiet, out, -SECOND, 5 * SECOND) == (0, 5 * SECOND - 1)


def test_the_interval_is_what_people_asked_for(
    quiet: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "c.mcap"
    assert main(["cut", str(quiet), "-o", str(out), "--from", "20s", "--to", "30s"]) == 0
    capsys.readouterr()
    assert main(["info", "--json", str(out)]) == 0
    said = json.loads(capsys.readouterr().out)
    assert said["start"] == "2023-11-15T01:37:00.000000+02:00"
    assert said["end"] == "2023-11-15T01:37:09.999999+02:00"
    assert said["duration_s"] == pytest.approx(10)
    # And its moments count from there.
    assert main(["dump", str(out), "--stream", "meta.clock", "--from", "9s"]) == 0
    assert len(capsys.readouterr().out.splitlines()) == 1


def test_an_end_that_later_rows_speak_for_is_not_quiet(tmp_path: Path) -> None:
    """A sum over (25 s, 31 s] is left out of a cut to 30 s, which knows of no 25 to 30."""
    path, out = tmp_path / "a.mcap", tmp_path / "c.mcap"
    ts = [T0, T0 + 31 * SECOND, T0 + MINUTE]
    sums = st.SOFTIRQ_CPU.rows(t=ts, dt=6 * SECOND, count=9)
    with Writer(path) as writer:
        writer.append(st.SOFTIRQ_CPU, sums)
    assert part(path, out, 10 * SECOND, 30 * SECOND) == (10 * SECOND, 25 * SECOND)
    assert part(path, out, 10 * SECOND, 20 * SECOND) == (10 * SECOND, 20 * SECOND - 1)
    # What another row tells of is known all the same.
    with Writer(path, force=True) as writer:
        writer.append(st.SOFTIRQ_CPU, sums)
        writer.append(st.MARKER, st.MARKER.rows(t=[T0 + 28 * SECOND], label=["x"]))
    assert part(path, out, 10 * SECOND, 30 * SECOND) == (10 * SECOND, 28 * SECOND)


def test_quiet_parts_merge_without_a_hole(quiet: Path, tmp_path: Path) -> None:
    a, b, m = (tmp_path / f"{name}.mcap" for name in "abm")
    part(quiet, a, 10 * SECOND, 20 * SECOND)
    part(quiet, b, 20 * SECOND, 30 * SECOND)
    merge([b, a], m)
    with open_file(m) as merged:
        assert merged.span() == (T0 + 10 * SECOND, T0 + 30 * SECOND - 1)
        states = merged.read("meta.coverage", 0, FOREVER)
        assert st.STATUSES.index("off") not in states["status"].tolist()


def test_a_recording_without_any_event_lasts_as_long_as_its_agent_lived(tmp_path: Path) -> None:
    path = tmp_path / "a.mcap"
    with Writer(path) as writer:
        head(writer)
        for second in range(10):
            writer.append(st.META_CLOCK, st.META_CLOCK.rows(t=[T0 + second * SECOND], wall=[1]))
    with open_file(path) as source:
        assert source.span() == (T0, T0 + 9 * SECOND)
    assert part(path, tmp_path / "c.mcap", 2 * SECOND, 4 * SECOND) == (2 * SECOND, 4 * SECOND - 1)


@pytest.mark.parametrize(
    "text", ["1", "9 5", "-4 5", "0 5", "x y", f"5 {1 << 70}", "1 2 3", "9" * 99]
)
def test_an_interval_that_makes_no_sense_is_ignored(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str
) -> None:
    path = tmp_path / "a.mcap"
    with Writer(path) as writer:
        writer.append(st.MARKER, st.MARKER.rows(t=[T0, T0 + 5], label=["x", "y"]))
        writer.cover(0, 0)
        monkeypatch.setattr(writer, "_covers", text)
    with open_file(path) as found:
        assert found.span() == (T0, T0 + 5)
        assert not found.problems
