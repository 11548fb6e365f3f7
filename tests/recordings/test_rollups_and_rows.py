"""A lane drawn from roll-ups and the same lane drawn from the rows below them are one curve."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path

import numpy as np
import pytest

from dsprobe.recordings import streams as st
from dsprobe.recordings.cut import cut
from dsprobe.recordings.filesession import FileSession, open_file
from dsprobe.recordings.lanes import LANES
from dsprobe.recordings.model import Rows, Stream
from dsprobe.recordings.session import FOREVER
from dsprobe.recordings.timeline import Timeline, Window

DEMO = Path(__file__).parents[2] / "recordings/demo.mcap"
SECOND = 10**9


class WithoutRollups:
    """A session that says it holds no roll-ups."""

    live = False

    def __init__(self, session: FileSession) -> None:
        self._session = session
        self.name, self.problems = session.name, session.problems

    @property
    def streams(self) -> Mapping[str, Stream]:
        return {k: v for k, v in self._session.streams.items() if k != st.ROLLUP_LANE.name}

    def refresh(self) -> bool:
        return self._session.refresh()

    def span(self) -> tuple[int, int]:
        return self._session.span()

    def read(self, stream: str, start: int, end: int) -> Rows:
        if stream == st.ROLLUP_LANE.name:
            return st.ROLLUP_LANE.empty()
        return self._session.read(stream, start, end)

    def lost(self) -> Mapping[str, int]:
        return self._session.lost()

    def close(self) -> None:
        self._session.close()


@pytest.fixture
def demo(tmp_path: Path) -> Iterator[FileSession]:
    """A real recording, with roll-ups made by the lanes of today."""
    path = tmp_path / "demo.mcap"
    with open_file(str(DEMO)) as session:
        cut(session, path, 0, FOREVER)
    with open_file(str(path)) as session:
        yield session


@pytest.mark.parametrize("seconds", [1, 2, 5, 10])
def test_both_give_the_same_values(demo: FileSession, seconds: int) -> None:
    begin, end = demo.span()
    width = seconds * SECOND
    first = begin // width + 1  # whole buckets inside the recording
    window = Window(first, end // width - first, width)
    assert window.count >= 5
    rolled = Timeline(demo, LANES).curves(window)
    rows = Timeline(WithoutRollups(demo), LANES).curves(window)
    for a, b in zip(rolled, rows, strict=True):
        np.testing.assert_allclose(a.values, b.values, rtol=1e-5, err_msg=a.lane.key)
    quiet = next(c for c in rolled if c.lane.key == "tcp.retransmits")
    assert 0 in quiet.values
    assert np.nanmax(quiet.values) > 0
