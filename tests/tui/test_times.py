"""Moments and quantities as text, and back."""

from __future__ import annotations

import math
from datetime import timezone
from zoneinfo import ZoneInfo

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as some

from dsprobe.recordings.session import Clock
from dsprobe.tui import units
from dsprobe.tui.glyphs import ASCII, BLOCKS, choose
from dsprobe.tui.times import SECOND, Scale, duration, elapsed, zone_of
from tests.tui.scenario import BOOT, WALL

PAIR = Clock(np.array([BOOT], np.int64), np.array([WALL], np.int64), 100)
NO_CLOCK = Clock(np.empty(0, np.int64), np.empty(0, np.int64), 0)
UTC = Scale(PAIR, BOOT, timezone.utc)
END = BOOT + 3600 * SECOND


def test_wall_clock_has_its_zone() -> None:
    assert UTC.text(BOOT + 3_500_000_000) == "14:00:03.5 UTC"
    berlin = Scale(PAIR, BOOT, ZoneInfo("Europe/Berlin"))
    assert berlin.text(BOOT) == "15:00:00.0 CET"
    assert Scale(PAIR, BOOT, timezone.utc, relative=True).text(BOOT + 62 * SECOND) == "+1:02.0"
    assert Scale(NO_CLOCK, BOOT).text(BOOT + SECOND) == "+0:01.0"


@pytest.mark.parametrize(
    ("text", "moment"),
    [
        ("14:10", BOOT + 600 * SECOND),
        ("14:10:30.5", BOOT + 630 * SECOND + SECOND // 2),
        ("2026-03-01 14:00:01", BOOT + SECOND),
        ("2026-03-01T14:00", BOOT),
        ("-30s", BOOT + 70 * SECOND),
        ("+1m30s", BOOT + 190 * SECOND),
        ("250ms", BOOT + SECOND // 4),
        ("50%", BOOT + 1800 * SECOND),
        (" 1h ", END),
    ],
)
def test_what_people_type(text: str, moment: int) -> None:
    assert UTC.parse(text, BOOT + 100 * SECOND, END) == moment


@pytest.mark.parametrize(
    "text", ["", "x", "25:00", "14:99", "-", "%", "1e9s", "5 s", "999999-01-01 00:00", "- 5"]
)
def test_what_means_nothing_is_refused(text: str) -> None:
    assert UTC.parse(text, BOOT, END) is None


@given(some.text(max_size=30))
def test_nothing_one_can_type_breaks_the_parser(text: str) -> None:
    moment = UTC.parse(text, BOOT, END)
    assert moment is None or isinstance(moment, int)


def test_a_time_of_day_means_the_day_that_is_held() -> None:
    late = Clock(np.array([BOOT], np.int64), np.array([WALL + 9 * 3600 * SECOND], np.int64), 1)
    scale = Scale(late, BOOT, timezone.utc)  # 23:00 to 01:00
    end = BOOT + 7200 * SECOND
    assert scale.parse("00:30", BOOT, end) == BOOT + 5400 * SECOND
    assert scale.parse("23:30", end, end) == BOOT + 1800 * SECOND


def test_ticks_are_round_and_far_enough_apart() -> None:
    ticks = UTC.ticks(BOOT + SECOND // 3, BOOT + 60 * SECOND, 7 * SECOND)
    assert [text for _, text in ticks] == [f"14:00:{s}" for s in range(10, 60, 10)] + ["14:01:00"]
    assert all((t - BOOT) % (10 * SECOND) == 0 for t, _ in ticks)
    tokyo = Scale(PAIR, BOOT, ZoneInfo("Asia/Tokyo"))
    days = tokyo.ticks(BOOT, BOOT + 3 * 86400 * SECOND, 86400 * SECOND)
    assert [text for _, text in days] == ["03-02", "03-03", "03-04"]
    relative = Scale(PAIR, BOOT, None, relative=True).ticks(BOOT, BOOT + 20 * SECOND, 7 * SECOND)
    assert [text for _, text in relative] == ["+0:00", "+0:10", "+0:20"]


def test_a_clock_that_is_nonsense_is_shown_without_a_fault() -> None:
    odd = Clock(np.array([0], np.int64), np.array([-(1 << 62)], np.int64), 1)
    assert Scale(odd, 0).text(5)
    assert Scale(odd, 0).ticks(0, 100, 1) is not None
    scale = Scale(odd, 0, timezone.utc)
    moment = scale.parse("10:00", 0, 100)
    assert moment is not None
    assert scale.text(moment) == "10:00:00.0 UTC"


@given(
    some.integers(0, 3599), some.integers(0, 9), some.lists(some.integers(-500, 500), max_size=9)
)
def test_the_time_shown_is_the_time_that_was_typed(
    second: int, tenth: int, jitter: list[int]
) -> None:
    """The pairs of clocks differ by what one reading of them costs."""
    steps = np.array([0, *jitter], np.int64)
    mono = BOOT + np.arange(len(steps)) * 400 * SECOND
    scale = Scale(Clock(mono, WALL + mono - BOOT + steps, 500), BOOT, timezone.utc)
    text = f"14:{second // 60:02}:{second % 60:02}.{tenth}"
    moment = scale.parse(text, BOOT, END)
    assert moment is not None
    assert scale.text(moment) == f"{text} UTC"


def test_a_time_the_clock_stepped_over_is_the_moment_of_the_step() -> None:
    mono = BOOT + np.array([0, 10, 20], np.int64) * SECOND
    clock = Clock(mono, WALL + np.array([0, 3600, 3610], np.int64) * SECOND, 1)
    assert clock.to_mono(WALL + 1800 * SECOND) == BOOT + 10 * SECOND
    assert clock.to_mono(WALL - SECOND) == BOOT - SECOND
    assert clock.to_mono(WALL + 3700 * SECOND) == BOOT + 110 * SECOND


def test_zones_come_from_the_zone_database_only() -> None:
    assert zone_of("UTC") is timezone.utc
    assert zone_of("Europe/Berlin") == ZoneInfo("Europe/Berlin")
    for hostile in ("../../etc/passwd", "/etc/passwd", "x/y", ""):
        assert zone_of(hostile) is None


def test_durations() -> None:
    assert duration("1m30s") == 90 * SECOND
    assert duration("1.5h") == 5400 * SECOND
    assert duration("60") == 60 * SECOND
    assert duration("1.5") == 3 * SECOND // 2
    assert duration("s") is None
    assert elapsed(3723 * SECOND, 0) == "+1:02:03"


@given(some.floats(0, 1e17), some.sampled_from(["%", "ns", "≤ns", "/s", "CPUs", "tasks", ""]))
def test_quantities_fit_their_column_and_say_their_size(value: float, unit: str) -> None:
    if unit == "%":
        value = math.fmod(value, 100)
    if unit == "CPUs":
        value = math.fmod(value, 4096)
    if unit in ("ns", "≤ns"):
        value = math.fmod(value, 1e15)
    if unit == "/s":
        value = math.fmod(value, 1e14)
    text = units.quantity(value, unit)
    assert 1 <= len(text) <= 8
    assert (text in ("0", "0%", "0ns", "≤0ns", "0/s", "0CPU")) == (value == 0), "only 0 reads 0"


@pytest.mark.parametrize(
    ("value", "unit", "text"),
    [
        (float("nan"), "%", "-"),
        (41.26, "%", "41.3%"),
        (1_048_576, "ns", "1.05ms"),
        (999_999, "ns", "1.00ms"),
        (12_345, "/s", "12.3k/s"),
        (999_999, "", "1.00M"),
        (3, "tasks", "3"),
        (0.004, "CPUs", "<0.01CPU"),
        (65536, "≤ns", "≤65.5us"),
        (2.0**32, "≤ns", "≥2.15s"),
        (float("nan"), "≤ns", "-"),
    ],
)
def test_quantities(value: float, unit: str, text: str) -> None:
    assert units.quantity(value, unit) == text


@pytest.mark.parametrize(
    ("ns", "text"),
    [
        (350_000_000, "350ms"),
        (5_500_000_000, "5.5s"),
        (12 * SECOND, "12s"),
        (245 * SECOND, "4m05s"),
        (9000 * SECOND, "2h30m"),
        (86400 * SECOND, "1d"),
    ],
)
def test_spans(ns: int, text: str) -> None:
    assert units.span(ns) == text


def test_a_bar_shows_the_least_something_and_never_mistakes_unknown_for_nothing() -> None:
    values = np.array([np.nan, 0.0, 1e-9, 50.0, 100.0, 1e9])
    for glyphs in (BLOCKS, ASCII):
        (row,) = glyphs.bars(values, 100.0)
        low, high = glyphs.levels[0], glyphs.levels[-1]
        assert row == " " + glyphs.zero + low + glyphs.levels[3] + high + high
        top, bottom = glyphs.bars(values, 100.0, 2)
        assert top == "   " + " " + high + high
        assert bottom == " " + glyphs.zero + low + high + high + high
    (flat,) = BLOCKS.bars(np.zeros(3), 0.0)
    assert flat == "..."


@pytest.mark.parametrize(
    ("environ", "glyphs"),
    [
        ({"LANG": "C.UTF-8", "TERM": "xterm"}, BLOCKS),
        ({"LANG": "C", "TERM": "xterm"}, ASCII),
        ({"TERM": "xterm"}, ASCII),
        ({"LANG": "de_DE.UTF-8", "LC_ALL": "POSIX"}, ASCII),
        ({"LC_CTYPE": "en_US.utf8", "LANG": "C", "TERM": "screen"}, BLOCKS),
        ({"LANG": "C.UTF-8", "TERM": "linux"}, ASCII),
    ],
)
def test_the_locale_chooses_the_characters(environ: dict[str, str], glyphs: object) -> None:
    assert choose(environ) is glyphs


@given(some.text())
def test_no_name_can_command_a_terminal_or_upset_the_columns(text: str) -> None:
    for glyphs in (BLOCKS, ASCII):
        clean = glyphs.clean(text)
        assert clean.isprintable()
    assert ASCII.clean(text).isascii()
    assert BLOCKS.clean("a\x1b[31m\u202e世e\u0301\n") == "a?[31m??é?"
