"""Fixtures of the tests that run on real kernel events."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.support import netns


@pytest.fixture
def pair() -> Iterator[netns.Pair]:
    """Two namespaces joined by a veth pair."""
    with netns.pair() as p:
        yield p
