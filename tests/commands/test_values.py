"""Durations, sizes and lists as people type them."""

from __future__ import annotations

from argparse import ArgumentTypeError
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as hst

from dsprobe.agent.commands import values


@pytest.mark.parametrize(
    ("text", "ns"),
    [
        ("10s", 10_000_000_000),
        ("5m", 300_000_000_000),
        ("1h", 3_600_000_000_000),
        ("250ms", 250_000_000),
        ("1h30m", 5_400_000_000_000),
        ("1.5m", 90_000_000_000),
        ("3", 3_000_000_000),
        ("7us", 7_000),
        ("1ns", 1),
        ("1800000000000ns", 1800 * 10**9),
        ("366d", 366 * 86_400 * 10**9),
    ],
)
def test_duration(text: str, ns: int) -> None:
    assert values.duration(text) == ns


@pytest.mark.parametrize(
    "text", ["", "s", "-5s", "5x", "1e9s", "0s", "367d", "10 s 5", "inf", "nan", "9" * 30, "५s"]
)
def test_no_duration(text: str) -> None:
    with pytest.raises(ArgumentTypeError, match="is not"):
        values.duration(text)


@pytest.mark.parametrize(
    ("text", "n"),
    [("4096", 4096), ("64k", 65536), ("256M", 256 << 20), ("1.5GiB", 3 << 29), ("2 MB", 2 << 20)],
)
def test_size(text: str, n: int) -> None:
    assert values.size(text) == n


@pytest.mark.parametrize("text", ["", "k", "-1", "0", "1X", "9999999T", "1 0"])
def test_no_size(text: str) -> None:
    with pytest.raises(ArgumentTypeError, match="is not"):
        values.size(text)


@pytest.mark.parametrize(("text", "x"), [("2", 2), ("1/4", 0.25), ("-8x", -8), ("0.5", 0.5)])
def test_speed(text: str, x: float) -> None:
    assert values.speed(text) == x


@pytest.mark.parametrize("text", ["0", "1/0", "65", "1/65", "fast", ""])
def test_no_speed(text: str) -> None:
    with pytest.raises(ArgumentTypeError):
        values.speed(text)


def test_names() -> None:
    assert values.names("softirq, tcp,softirq") == ("softirq", "tcp")
    for bad in ("", "a,,b", "../x", "a b"):
        with pytest.raises(ArgumentTypeError):
            values.names(bad)


@given(hst.text(max_size=60), hst.sampled_from([values.duration, values.size, values.speed]))
def test_any_text_is_a_value_or_a_sentence(text: str, parse: Callable[[str], float]) -> None:
    try:
        assert parse(text)
    except ArgumentTypeError as e:
        sentence = str(e)
    else:
        return
    assert repr(text) in sentence
