"""Tables beside the lanes: what they say where there is something, and where there is nothing."""

from __future__ import annotations

import numpy as np

from dsprobe.recordings import streams as st
from dsprobe.tui.glyphs import BLOCKS
from dsprobe.tui.grid import squeeze
from dsprobe.tui.grid import table as draw_table
from dsprobe.tui.lanes import LanesScreen, TablesBody
from dsprobe.tui.lines import text_of
from dsprobe.tui.observer import Observer
from dsprobe.tui.player import Player
from dsprobe.tui.tables import Table
from tests.tui.memory import MemorySession
from tests.tui.scenario import BOOT, SECOND, live, recording
from tests.tui.test_draw import observe, screen


def tables_in(observer: Observer) -> dict[str, Table]:
    body = observer.look().body
    assert isinstance(body, TablesBody)
    return body.tables


def seen(session: MemorySession, at: int | None = None) -> dict[str, Table]:
    body = observe(session, 160, 50, LanesScreen(), at).body
    assert isinstance(body, TablesBody)
    return body.tables


def test_rows_that_come_late_reach_a_table_that_is_paused() -> None:
    session, scenario = live(20)
    player = Player(lambda: 0, *session.span(), growing=True, live=True)
    observer = Observer(session, player)
    observer.look()
    player.pause()
    assert tables_in(observer)["cpus"].rows[0][0] == "1"
    session.append("softirq.cpu", t=scenario.now, dt=9 * SECOND, cpu=3, vec=3, count=1,
                   busy=9 * SECOND)  # fmt: skip
    scenario.run(1)
    assert tables_in(observer)["cpus"].rows[0][0] == "3"


def tables_of(session: MemorySession, at: int | None = None) -> dict[str, str]:
    found = seen(session, at)
    return {name: "" if table.rows else table.empty for name, table in found.items()}


def test_an_empty_table_says_nothing_happened_only_where_all_was_seen() -> None:
    quiet = MemorySession(live=False)
    quiet.append("meta.coverage", t=BOOT, probe=["softirq", "tcp"], program="", status=0)
    quiet.append("cpu.load", t=BOOT + np.arange(90) * SECOND, dt=SECOND)
    quiet.refresh()
    assert tables_of(quiet, BOOT + 80 * SECOND) == {
        "cpus": "no net_rx softirq ran",
        "flows": "nothing was sent again",
        "vectors": "no softirq ran",
        "slow": "none took 1ms or longer",
    }
    at_the_start = tables_of(quiet, BOOT)
    assert set(at_the_start.values()) == {"not known here"}
    assert set(tables_of(MemorySession(live=False)).values()) == {"not known here"}
    nobody = MemorySession(live=False)
    nobody.append("cpu.load", t=BOOT + np.arange(90) * SECOND, dt=SECOND)
    nobody.refresh()
    assert set(tables_of(nobody, BOOT + 80 * SECOND).values()) == {"not known here"}


def test_a_table_says_why_it_has_nothing() -> None:
    session = MemorySession(live=False)
    off, missing = st.STATUSES.index("off"), st.STATUSES.index("missing")
    session.append("meta.coverage", t=BOOT, probe=["softirq", "tcp"], program="",
                   status=[off, missing], reason=["not asked for", "no tracepoint"])  # fmt: skip
    session.append("cpu.load", t=BOOT + np.arange(90) * SECOND, dt=SECOND)
    session.refresh()
    found = tables_of(session, BOOT + 80 * SECOND)
    assert found["cpus"] == found["vectors"] == found["slow"] == "off: not asked for"
    assert found["flows"] == "missing: no tracepoint"
    assert "off: not asked for" in "\n".join(screen(session, 160, 50))
    part = recording(60)
    part.append("meta.coverage", t=BOOT + 50 * SECOND, probe="tcp", program="", status=missing,
                reason="taken off")  # fmt: skip
    part.append("meta.coverage", t=BOOT + 55 * SECOND, probe="tcp", program="", status=0)
    part.refresh()
    part._frames.pop("tcp.retransmit")
    assert tables_of(part, BOOT + 59 * SECOND)["flows"] == "not known here"


def test_a_narrow_table_of_flows_keeps_what_was_sent_and_where() -> None:
    session, _ = live(60)
    table = seen(session)["flows"]
    names = {}
    for width in (120, 62, 50, 44, 30):
        title, heads, *_ = (text_of(x) for x in draw_table(table, BLOCKS, width, 5))
        names[width] = heads.split()
        assert ("~" in title) == (len(names[width]) < 6), "what is left out is marked"
    assert names[120] == ["segs", "calls", "from", "to", "what", "netns"]
    assert names[50] == ["segs", "from", "to", "what", "netns"]
    assert names[30][0] == "segs"
    rows = [text_of(x) for x in draw_table(table, BLOCKS, 47, 5)]
    assert "data/fast" in rows[2]
    assert "10.0.0.1 " in rows[2], "the local port goes before what says more"


def test_the_slowest_softirqs_have_their_task_and_time() -> None:
    session, _ = live(60)
    session.append("softirq.slow", t=BOOT + 55 * SECOND + 123_000_000, duration=7_000_000, cpu=2,
                   vec=1, kind=1, pid=0, tid=0, comm=b"swapper/2")  # fmt: skip
    session.refresh()
    table = seen(session)["slow"]
    assert table.rows[0] == ("7.00ms", "wait", "2", "TIMER", "14:00:55.123", "idle")
    assert table.rows[1][5] == "python3:78"


def test_squeezing_takes_from_the_widest() -> None:
    assert squeeze([10, 3, 3], 12) == [6, 3, 3]
    assert sum(squeeze([5, 5], 3)) == 3
    assert squeeze([1, 1], 0) == [0, 0]
