"""The screen of memory: what it says of sessions written by hand, at every size."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from dsprobe.recordings import streams as st
from dsprobe.tui.draw import columns, draw
from dsprobe.tui.glyphs import ASCII, BLOCKS, Glyphs
from dsprobe.tui.lines import ROLES, text_of
from dsprobe.tui.memory import MemoryScreen
from dsprobe.tui.memoryrows import MemoryRow
from dsprobe.tui.observer import Observer
from dsprobe.tui.player import Player
from dsprobe.tui.snapshot import Snapshot
from dsprobe.tui.text import once
from dsprobe.tui.treescreen import TreeBody
from tests.recordings.cudahost import CudaHost
from tests.tui.cudascene import BOOT, MIB, SECOND, SERVER, WORKER, Scene, recording
from tests.tui.golden import compare
from tests.tui.memory import MemorySession
from tests.tui.test_draw import SIZES

SHED = st.STATUSES.index("shed")
LEAKING = recording(150)
HEALTHY = recording(150, leaking=False)


def look(session: MemorySession, screen: MemoryScreen, width: int = 80, height: int = 24,
         at: int | None = None) -> Snapshot:  # fmt: skip
    player = Player(lambda: 0, *session.span(), growing=session.live, live=session.live)
    player.resize(columns(screen, width, height))
    player.jump(at or session.span()[1])
    return settled(Observer(session, player, screen))


def settled(observer: Observer) -> Snapshot:
    """What is shown once all of it is known."""
    while (snap := observer.look()).body.pending:
        pass
    return snap


def lines(session: MemorySession, width: int = 80, height: int = 24, glyphs: Glyphs = BLOCKS,
          at: int | None = None, **kw: object) -> list[str]:  # fmt: skip
    screen = MemoryScreen(**kw)  # type: ignore[arg-type]
    snap = look(session, screen, width, height, at)
    return [text_of(line) for line in draw(snap, screen, glyphs, width, height)]


def rows(session: MemorySession, at: int | None = None, **kw: object) -> list[MemoryRow]:
    body = look(session, MemoryScreen(**kw), at=at).body  # type: ignore[arg-type]
    assert isinstance(body, TreeBody)
    return [row for row in body.rows if isinstance(row, MemoryRow)]


@pytest.mark.parametrize(("width", "height"), SIZES)
@pytest.mark.parametrize("glyphs", [BLOCKS, ASCII], ids=["blocks", "ascii"])
def test_every_size_is_filled_to_the_cell(width: int, height: int, glyphs: Glyphs) -> None:
    for session in (LEAKING, MemorySession()):
        shown = lines(session, width, height, glyphs, all_open=True)
        assert [len(line) for line in shown] == [width] * height
        if glyphs is ASCII:
            assert all(line.isascii() for line in shown)


def test_the_leak_comes_first_and_is_named_in_words() -> None:
    shown = lines(LEAKING)
    first = next(line for line in shown if "LEAK 1.00M/s" in line and "▲" in line)
    assert "append_kv (cache.py:88)" in first
    assert "1 LEAK 1.00M/s" in shown[3], "the sums say it as well"
    leaf = next(row for row in rows(LEAKING) if row.leaks and row.opened is None)
    assert (leaf.live, leaf.blocks) == (150 * MIB, 150)
    assert [f.function for f in leaf.frames] == ["append_kv", "decode", "serve", "main"]
    roles = {role for text, role in draw(look(LEAKING, MemoryScreen()), MemoryScreen(), BLOCKS, 80,
                                         24)[8] if "▲" in text}  # fmt: skip
    assert roles == {"bad"}


def test_a_healthy_run_has_no_leak_on_the_screen() -> None:
    assert not any("LEAK" in line or "▲" in line for line in lines(HEALTHY))
    assert not any(row.leaks for row in rows(HEALTHY, all_open=True))


def test_what_stands_in_a_row_is_what_was_allocated() -> None:
    end = LEAKING.span()[1]
    found = {row.text.split(" ")[0]: row for row in rows(LEAKING, all_open=True)}
    assert found["load"].live == 900 * MIB
    assert found["load"].grown == 0
    assert found["load"].age == end - BOOT
    # One MiB a second over the 25 s that are in view.
    assert found["append_kv"].grown == 25 * MIB
    server = next(row for row in rows(LEAKING) if row.depth == 0 and "4711" in row.text)
    assert server.live == sum(row.live for n, row in found.items() if n in ("load", "append_kv",
                                                                           "forward"))  # fmt: skip
    assert "64.0M on host" in server.text


def test_kinds_of_memory_are_not_added_up() -> None:
    host = rows(LEAKING, kind="host", all_open=True)
    assert [row.live for row in host if not row.depth] == [64 * MIB]
    assert any("stage (io.py:5)" in row.text for row in host)
    assert rows(LEAKING, kind="address space") == []
    said = lines(LEAKING, kind="address space")
    assert any("no address space is allocated" in line for line in said)


@pytest.mark.parametrize(
    ("order", "first"),
    [("growth", "append_kv"), ("live", "load"), ("blocks", "append_kv"), ("age", "work")],
)
def test_siblings_are_in_the_order_chosen(order: str, first: str) -> None:
    leaves = [r.text for r in rows(LEAKING, order=order, all_open=True) if r.opened is None]
    assert leaves[0].startswith(first)
    assert f"{order}*" in "\n".join(lines(LEAKING, order=order))


def test_a_filter_finds_by_function_file_and_process() -> None:
    for words, want in (
        ("append", {"append_kv"}),
        ("CACHE.py", {"append_kv"}),
        ("engine.py", {"append_kv", "forward"}),
        ("worker:4712", {"work"}),
        ("python3 load", {"load"}),
        ("no such thing", set()),
    ):
        leaves = {r.text.split(" ")[0] for r in rows(LEAKING, filter=words) if r.opened is None}
        assert leaves == want, words
    assert any("nothing matches xyz" in line for line in lines(LEAKING, filter="xyz"))


def test_growth_is_since_marker_a() -> None:
    session = recording(150)
    session.append("marker", t=BOOT + 100 * SECOND, label="deploy")
    session.append("marker", t=BOOT + 149 * SECOND, label="")
    session.refresh()
    at = BOOT + 140 * SECOND
    since = {r.text.split(" ")[0]: r.grown for r in rows(session, at, marked=True, all_open=True)}
    assert since["append_kv"] == 40 * MIB
    said = "\n".join(lines(session, 100, at=at, marked=True))
    assert "growth since A, 14:01:40.0 UTC (deploy)" in said
    chosen = rows(session, at, marked=True, since=BOOT + 120 * SECOND, all_open=True)
    assert {r.text.split(" ")[0]: r.grown for r in chosen}["append_kv"] == 20 * MIB
    early = "\n".join(lines(session, 120, at=BOOT + 90 * SECOND, marked=True))
    assert "no marker A before, growth over" in early


def test_live_and_replay_show_the_same_at_the_same_moment() -> None:
    scene = Scene(live=True)
    scene.advance(120)
    screen = MemoryScreen(all_open=True)
    player = Player(lambda: 0, *scene.session.span(), growing=True, live=True)
    player.resize(columns(screen, 80, 24))
    observer = Observer(scene.session, player, screen)
    observer.look()
    player.pause()
    at = player.position
    scene.advance(30)
    live = settled(observer)
    replay = look(recording(150), MemoryScreen(all_open=True), at=at)
    assert live.time == replay.time
    # Numbers of nodes are a viewer's own.
    assert isinstance(live.body, TreeBody)
    assert isinstance(replay.body, TreeBody)
    assert [replace(r, key=0) for r in live.body.rows] == [
        replace(r, key=0) for r in replay.body.rows
    ]
    assert live.body.total == replay.body.total
    assert live.body.over == replay.body.over


def test_what_is_not_known_is_said() -> None:
    scene = Scene()
    scene.advance(20)
    t = scene.now
    scene.session.append("gpu.memory", t=t, dt=SECOND, process=SERVER, kind=0, live=2000 * MIB,
                         blocks=900, unknown=12, shed=3000, failed=2)  # fmt: skip
    scene.session.append("meta.coverage", t=t, probe="memory", program="", status=SHED,
                         reason="the table of stacks is full")  # fmt: skip
    scene.session.refresh()
    said = "\n".join(lines(scene.session, 120, 40))
    for part in (
        "! memory: shed: the table of stacks is full",
        "! 2 allocations and frees failed (python3:4711)",
        "! 12 frees of memory from before the probes were attached (python3:4711)",
        "3.00k calls without a row",
        "no stack is known: the table of stacks was full",
        "[no stack is known, as",
    ):
        assert part in said, part
    narrow = "\n".join(lines(scene.session, 120, 14))
    assert "more) memory: shed" in narrow
    assert "SHED allocations of PID 4711" in said.splitlines()[0]


def test_memory_from_before_the_probes_is_not_passed_over() -> None:
    scene = Scene(leaking=False)
    scene.process(SERVER, 4711, "python3", late=BOOT)
    scene.process(3, 4713, "idle", late=BOOT + SECOND)
    scene.advance(20)
    said = "\n".join(lines(scene.session, 140, 40, kind="address space"))
    assert "seen since 14:00:00.0 UTC, 2 processes: 1.46G on device" in said
    assert "! memory from before they were seen is not counted: python3:4711, idle:4713" in said
    assert "no address space is allocated of what was seen since 14:00:00.0 UTC" in said
    [row] = [r for r in rows(scene.session) if not r.depth and "4711" in r.text]
    assert row.text.startswith("python3:4711 (since 14:00:00.0 UTC): ")
    once_said = once(scene.session, 140, BLOCKS)
    assert "is not counted" in once_said
    scene.process(SERVER, 4711, "python3", late=BOOT, ended=scene.now)
    scene.process(3, 4713, "idle", late=BOOT + SECOND, ended=scene.now)
    scene.session.append("cpu.load", t=scene.now + SECOND, dt=SECOND)
    scene.session.refresh()
    assert "is not counted" not in "\n".join(lines(scene.session, 140, 40))


def test_the_leak_stays_in_the_header_whatever_kind_is_shown() -> None:
    for kind in ("device", "host", "address space"):
        assert "1 LEAK 1.00M/s" in lines(LEAKING, kind=kind)[3]


def test_the_header_counts_who_lives_and_tells_of_who_ended_apart() -> None:
    scene = Scene(leaking=False)
    scene.advance(20)
    for s in [s for s in scene.stacks if s.process == WORKER]:
        while s.held:
            s.free()
    scene.session.append("gpu.memory", t=scene.now, dt=SECOND, process=WORKER, kind=0, live=0,
                         allocs=50_000, frees=50_000)  # fmt: skip
    scene.process(WORKER, 4712, "worker", ended=scene.now)
    scene.session.append("cpu.load", t=scene.now, dt=SECOND)
    scene.session.refresh()
    body = look(scene.session, MemoryScreen(), 120).body
    assert isinstance(body, TreeBody)
    whole, _, gone = body.total.partition("; ")
    assert whole.startswith("1 process: ")
    assert float(whole.rpartition(", ")[2].split()[0]) < 10
    assert gone.startswith("1 ended, 2.")
    assert gone.endswith("k allocs/s")


def test_before_the_probes_came_nothing_is_claimed() -> None:
    session = MemorySession(live=True)
    session.append("cpu.load", t=BOOT + np.arange(90) * SECOND, dt=SECOND)
    session.append("meta.coverage", t=BOOT + 60 * SECOND, probe="memory", program="", status=0)
    session.refresh()
    early = "\n".join(lines(session, 120, at=BOOT + 30 * SECOND))
    assert "not known: the probes of memory were not attached yet" in early
    assert "0 processes" not in early
    assert "not part of this session" not in early
    assert "no process uses CUDA" in "\n".join(lines(session, 120, at=BOOT + 89 * SECOND))


def test_stacks_that_go_through_one_binding_are_told_apart() -> None:
    """A row in each of three servers; the process comes first."""
    scene = CudaHost()
    inner = ("call@/lib/driver.py:57", "ok@/lib/driver.py:61", "get@/lib/driver.py:70")
    held = []
    for process in (1, 2, 3):
        scene.process(process, 4700 + process, "server")
        for i, name in enumerate(("load", "grow", "step")):
            frames = (*inner, f"{name}@/srv/llm.py:{10 * i}", "main@/srv/llm.py:90")
            held.append(scene.stack(10 * process + i, frames, process=process))
        held.append(scene.stack(10 * process + 9, ("stage@/srv/io.py:5",), process=process))
    scene.run(30, lambda second, t: [s.alloc(t, MIB) for s in held] and None)
    leaves = [r.text for r in rows(scene.session, all_open=True) if r.opened is None]
    assert {text.split(" ")[0] for text in leaves} == {"load", "grow", "step", "stage"}
    shown = [line for line in once(scene.session, 100, BLOCKS).splitlines() if "live, " in line]
    assert len(shown) == 5
    assert all(", server:470" in line and "call (" not in line for line in shown)


def test_a_process_of_one_stack_is_compared_with_the_others() -> None:
    scene = CudaHost()
    inner = ("call@/lib/driver.py:57", "ok@/lib/driver.py:61")
    for process, name in ((1, "load"), (2, "grow"), (3, "step")):
        scene.process(process, 4700 + process, "server")
        frames = (*inner, f"{name}@/srv/{name}.py:9", "main@/srv/llm.py:90")
        scene.stack(process, frames, process=process).alloc(BOOT, MIB)
    scene.run(5)
    leaves = [r.text.split(" ")[0] for r in rows(scene.session, all_open=True) if r.depth]
    assert set(leaves) == {"load", "grow", "step"}


def test_why_there_is_nothing() -> None:
    off = MemorySession(live=False)
    off.append("meta.coverage", t=BOOT, probe="memory", program="", status=st.STATUSES.index("off"),
               reason="not asked for")  # fmt: skip
    off.append("cpu.load", t=BOOT + np.arange(90) * SECOND, dt=SECOND)
    off.refresh()
    assert any("off: not asked for" in line for line in lines(off))
    old = MemorySession(live=False)
    old.append("cpu.load", t=BOOT + np.arange(90) * SECOND, dt=SECOND)
    old.refresh()
    assert any("not part of this session" in line for line in lines(old)[5:])
    quiet = MemorySession(live=False)
    quiet.append("meta.coverage", t=BOOT, probe="memory", program="", status=0)
    quiet.append("cpu.load", t=BOOT + np.arange(90) * SECOND, dt=SECOND)
    quiet.refresh()
    assert any("no process uses CUDA" in line for line in lines(quiet))


def test_hostile_names_do_not_reach_the_terminal() -> None:
    scene = Scene()
    scene.stack(9, ("\x1b[2J世evil\n@/srv/\x1b]0;x\x07.py:1",)).alloc(BOOT, MIB)
    scene.process(SERVER, 4711, "a\x1b[31m")
    scene.advance(20)
    for width, height in SIZES:
        assert all(x.isprintable() for x in lines(scene.session, width, height, all_open=True))
    assert once(scene.session, 100, BLOCKS).replace("\n", "").isprintable()


def test_roles_are_known() -> None:
    screen = MemoryScreen(all_open=True)
    drawn = draw(look(LEAKING, screen), screen, BLOCKS, 80, 24)
    assert {role for line in drawn for _, role in line} <= set(ROLES)


@pytest.mark.parametrize(("width", "height"), [(80, 24), (160, 50), (40, 12)])
def test_the_screen_looks_as_it_did(width: int, height: int) -> None:
    shown = lines(LEAKING, width, height)
    compare.text(f"memory-{width}x{height}.txt", "\n".join(shown) + "\n")


def test_once_names_the_leak_first() -> None:
    text = once(LEAKING, 100, BLOCKS)
    stacks = [line for line in text.splitlines() if "live, " in line]
    assert "LEAK 1.00M/s" in stacks[0]
    assert "append_kv (cache.py:88)" in stacks[0]
    assert text.index("GPU memory:") < text.index(" lane ")
    for part in ("python3:4711: 1.22G on device", "64.0M on host", "launches: 2 processes",
                 "threads 0.40 in sync", "worker:4712 in cuStreamSynchronize for"):  # fmt: skip
        assert part in text
    assert "LEAK" not in once(HEALTHY, 100, BLOCKS)
    assert once(LEAKING, 100, ASCII).isascii()
    compare.text("once-cuda.txt", "\n".join(text.split("\n\n")[:2]) + "\n")


def test_a_row_is_named_by_what_no_other_stack_goes_through() -> None:
    scene = Scene()
    for i, function in enumerate(("grow", "fill"), 20):
        frames = ("alloc@/srv/pool.py:1", f"{function}@/srv/x.py:2", "loop@/srv/x.py:9")
        scene.stack(i, frames).alloc(BOOT, MIB)
    scene.advance(20)
    names = [row.text for row in rows(scene.session, filter="pool", all_open=True)]
    assert {name.split(" ")[0] for name in names} >= {"grow", "fill"}
    assert not any(name.startswith("alloc") for name in names)


def test_a_frame_after_a_jump_does_not_wait_for_leaks() -> None:
    session = recording(150)
    player = Player(lambda: 0, *session.span(), growing=False, live=False)
    observer = Observer(session, player, MemoryScreen())
    for second in (149, 139, 119):
        player.jump(BOOT + second * SECOND)
        session.reads.clear()
        snap = observer.look()
        assert snap.body.pending
        assert isinstance(snap.body, TreeBody)
        assert "leaks are being looked for" in snap.body.notes
        oldest = min(start for stream, start, *_ in session.reads if stream == "gpu.stack")
        assert oldest > BOOT + (second - 60) * SECOND
    assert "LEAK" in settled(observer).body.total  # type: ignore[attr-defined]
