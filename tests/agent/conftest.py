"""An agent at its usual place, where nobody else's is."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from dsprobe.recordings.session import FOREVER
from tests.support.box import Box, Process, box, end, ready
from tests.support.wait import until

PROBES = ("softirq", "napi", "tcp", "runq", "cpu", "sockets", "netdev")


@pytest.fixture(scope="module")
def shared() -> Iterator[Box]:
    with box() as it:
        yield it


@pytest.fixture
def here(shared: Box) -> Iterator[Box]:
    yield shared
    shared.clear()


@pytest.fixture
def agent(here: Box) -> Iterator[Process]:
    """A daemon with all probes attached and rows of all that are never quiet."""
    process = here.agent()
    live = here.connect()
    ready(live, *PROBES)
    for stream in ("cpu.usage", "softirq.cpu"):
        until(lambda: (live.wait(0.05), len(live.read(stream, 0, FOREVER)))[1], stream)  # noqa: B023
    live.close()
    yield process
    if process.poll() is None:
        end(process)
