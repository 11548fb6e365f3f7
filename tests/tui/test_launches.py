"""The screen of launches: what it says of sessions written by hand, at every size."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest

from dsprobe.recordings import streams as st
from dsprobe.tui.draw import columns, draw
from dsprobe.tui.glyphs import ASCII, BLOCKS, Glyphs
from dsprobe.tui.launches import LaunchesScreen, histogram
from dsprobe.tui.launchrows import LaunchRow
from dsprobe.tui.lines import ROLES, text_of
from dsprobe.tui.observer import Observer
from dsprobe.tui.player import Player
from dsprobe.tui.snapshot import Snapshot
from dsprobe.tui.treescreen import TreeBody
from tests.recordings.cudahost import hist
from tests.tui.cudascene import BOOT, ENGINE, MAIN, SECOND, WORKER, Scene, recording
from tests.tui.golden import compare
from tests.tui.memory import MemorySession
from tests.tui.test_draw import SIZES

SESSION = recording(150)


def look(session: MemorySession, screen: LaunchesScreen, width: int = 80, height: int = 24,
         at: int | None = None) -> Snapshot:  # fmt: skip
    player = Player(lambda: 0, *session.span(), growing=session.live, live=session.live)
    player.resize(columns(screen, width, height))
    player.jump(at or session.span()[1])
    return Observer(session, player, screen).look()


def lines(session: MemorySession, width: int = 80, height: int = 24, glyphs: Glyphs = BLOCKS,
          at: int | None = None, **kw: object) -> list[str]:  # fmt: skip
    screen = LaunchesScreen(**kw)  # type: ignore[arg-type]
    snap = look(session, screen, width, height, at)
    return [text_of(line) for line in draw(snap, screen, glyphs, width, height)]


def rows(session: MemorySession, at: int | None = None, **kw: object) -> list[LaunchRow]:
    body = look(session, LaunchesScreen(**kw), at=at).body  # type: ignore[arg-type]
    assert isinstance(body, TreeBody)
    return [row for row in body.rows if isinstance(row, LaunchRow)]


@pytest.mark.parametrize(("width", "height"), SIZES)
@pytest.mark.parametrize("glyphs", [BLOCKS, ASCII], ids=["blocks", "ascii"])
def test_every_size_is_filled_to_the_cell(width: int, height: int, glyphs: Glyphs) -> None:
    for session in (SESSION, MemorySession()):
        screen = LaunchesScreen()
        drawn = draw(look(session, screen, width, height), screen, glyphs, width, height)
        assert [len(text_of(line)) for line in drawn] == [width] * height
        assert {role for line in drawn for _, role in line} <= set(ROLES)
        if glyphs is ASCII:
            assert all(text_of(line).isascii() for line in drawn)


def test_numbers_are_those_of_the_rows() -> None:
    found = {row.text.partition(":")[0] + str(row.depth): row for row in rows(SESSION)}
    engine = next(row for row in rows(SESSION) if row.key == (1, ENGINE, None))
    assert engine.rate == 40_000
    assert (engine.p50, engine.p99) == (2**14, 2**21)
    assert engine.longest == 2_000_000 + 149
    # 30,000 of 40,000 were left out in the seconds 140 to 149 alone, of the 25 in view.
    assert engine.shed == pytest.approx(0.75 * 10 / 25)
    server = found["python30"]
    assert (server.rate, server.p99, server.longest) == (engine.rate, engine.p99, engine.longest)
    streams = [row for row in rows(SESSION) if "stream" in row.text and row.rate > 20]
    assert [(row.text, row.rate) for row in streams] == [
        ("stream default", 30_000), ("stream 0x55d000001000", 10_000)]  # fmt: skip
    assert all(math.isnan(row.shed) for row in streams)


def test_who_waits_is_said_with_where_and_for_how_long() -> None:
    said = lines(SESSION)
    assert "! worker:4712 in cuStreamSynchronize for 9.20s" in "\n".join(said)
    main = next(row for row in rows(SESSION) if row.key == (WORKER, MAIN, None))
    assert main.text == "worker:4712: in cuStreamSynchronize for 9.20s"
    before = "\n".join(lines(SESSION, at=BOOT + 15 * SECOND))
    assert "cuStreamSynchronize for" not in before


def test_a_thread_that_only_waits_is_there_too() -> None:
    session = MemorySession(live=False)
    end = BOOT + 60 * SECOND
    session.append("meta.coverage", t=BOOT, probe=["launches", "calls"], program="", status=0)
    session.append("meta.process", t=BOOT, id=1, pid=77, comm="stuck")
    session.append("meta.string", t=BOOT, id=1, text="cuCtxSynchronize")
    session.append("cpu.load", t=BOOT + np.arange(61) * SECOND, dt=SECOND)
    session.append("cuda.open", t=end, process=1, thread=5, function=1, since=BOOT)
    session.refresh()
    (process, thread) = rows(session)
    assert process.text == "stuck:77: 1 thread waiting"
    assert thread.text == "thread 5: in cuCtxSynchronize for 60.0s"
    assert "-" in lines(session)[7]


def test_the_longest_gaps_say_what_the_thread_was_in() -> None:
    said = "\n".join(lines(SESSION, 120, 40))
    gap = "gap of 2.00ms until 14:02:29.999, engine:4720, 1.50ms of it in cuStreamSynchronize"
    assert gap in said
    assert "cuStreamSynchronize: 0.40 threads in it on average, 100/s, P99" in said


@pytest.mark.parametrize(
    ("order", "first"),
    [("rate", "python3"), ("P99", "worker"), ("longest", "worker"), ("shed", "python3")],
)
def test_rows_are_in_the_order_chosen(order: str, first: str) -> None:
    found = rows(SESSION, order=order)
    assert found[0].text.startswith(first)
    assert f"{order}*" in "\n".join(lines(SESSION, order=order))


def test_a_filter_finds_processes_threads_and_streams() -> None:
    for words, want in (
        ("engine", {"engine:4720"}),
        ("0x55d", {"stream 0x55d000001000"}),
        ("python3 default", {"stream default"}),
        ("nothing", set()),
    ):
        found = {row.text for row in rows(SESSION, filter=words) if row.depth}
        assert found == want, words
    assert any("nothing matches xyz" in line for line in lines(SESSION, filter="xyz"))


def test_shedding_stands_in_the_header_of_every_screen() -> None:
    assert "SHED launch events of PID 4711" in lines(SESSION)[0]
    assert "SHED" not in lines(SESSION, at=BOOT + 50 * SECOND)[0]
    assert "launches without a row of their own" in "\n".join(lines(SESSION, 120, 30))


def test_live_and_replay_show_the_same_at_the_same_moment() -> None:
    scene = Scene(live=True)
    scene.advance(120)
    screen = LaunchesScreen()
    player = Player(lambda: 0, *scene.session.span(), growing=True, live=True)
    player.resize(columns(screen, 80, 24))
    observer = Observer(scene.session, player, screen)
    observer.look()
    player.pause()
    at = player.position
    scene.advance(30)
    live, replay = observer.look(), look(recording(150), LaunchesScreen(), at=at)
    nan = lambda body: [replace(r, shed=0 if math.isnan(r.shed) else r.shed) for r in body.rows]  # noqa: E731
    assert nan(live.body) == nan(replay.body)
    assert live.body.total == replay.body.total  # type: ignore[attr-defined]
    assert live.body.notes == replay.body.notes  # type: ignore[attr-defined]


def test_one_in_a_million_is_seen_in_the_histogram() -> None:
    drawn = histogram(tuple(hist(s10=1_000_000, s25=1)), BLOCKS)
    assert len(drawn) == 12
    assert drawn[1] == "█"
    assert drawn[8] == "▁"
    assert drawn.replace(" ", "") == "█▁"
    assert histogram((), BLOCKS) == " " * 12
    assert histogram(tuple(hist(s0=1, s31=1)), BLOCKS) == "█" + " " * 10 + "█"


def test_why_there_is_nothing() -> None:
    off = MemorySession(live=False)
    off.append("meta.coverage", t=BOOT, probe="launches", program="", reason="not asked for",
               status=st.STATUSES.index("off"))  # fmt: skip
    off.append("cpu.load", t=BOOT + np.arange(90) * SECOND, dt=SECOND)
    off.refresh()
    assert any("off: not asked for" in line for line in lines(off))


@pytest.mark.parametrize(("width", "height"), [(80, 24), (160, 50), (40, 12)])
def test_the_screen_looks_as_it_did(width: int, height: int) -> None:
    shown = lines(SESSION, width, height)
    compare.text(f"launches-{width}x{height}.txt", "\n".join(shown) + "\n")
