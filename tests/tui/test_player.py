"""The playhead alone: plain numbers, a clock that is set by hand, no session."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as some

from dsprobe.recordings.timeline import LADDER, SECOND
from dsprobe.tui.player import DEFAULT_WIDTH, FAR, SEEK, SPEEDS, Player

W = LADDER[DEFAULT_WIDTH]


class Hand:
    """A clock."""

    def __init__(self) -> None:
        self.now = 5

    def __call__(self) -> int:
        return self.now


def file_player(seconds: int = 100, columns: int = 40, speed: float = 1.0) -> tuple[Player, Hand]:
    hand = Hand()
    p = Player(hand, 0, seconds * SECOND, growing=False, live=False, speed=speed)
    p.resize(columns)
    return p, hand


def live_player(seconds: int = 100, columns: int = 40) -> tuple[Player, Hand]:
    hand = Hand()
    p = Player(hand, 0, seconds * SECOND, growing=True, live=True)
    p.resize(columns)
    return p, hand


def pass_time(p: Player, hand: Hand, seconds: float) -> None:
    hand.now += int(seconds * SECOND)
    p.tick()


def test_a_file_plays_from_its_start_at_the_speed_asked_for() -> None:
    p, hand = file_player(speed=4)
    pass_time(p, hand, 2.5)
    assert p.position == 10 * SECOND
    p.faster(1)
    pass_time(p, hand, 1)
    assert p.position == 18 * SECOND
    p.reverse()
    pass_time(p, hand, 0.5)
    assert p.position == 14 * SECOND


def test_a_file_stops_at_both_ends_and_goes_on_from_there() -> None:
    p, hand = file_player(seconds=10)
    pass_time(p, hand, 11)
    assert (p.position, p.playing) == (10 * SECOND, False)
    p.pause()
    assert (p.position, p.playing) == (0, True), "play at the end starts again"
    p.reverse()
    pass_time(p, hand, 1)
    assert (p.position, p.playing) == (0, False)
    p.pause()
    assert (p.position, p.playing) == (10 * SECOND, True)


def test_slow_motion_does_not_lose_the_parts_of_a_nanosecond() -> None:
    p, hand = file_player(speed=0.125)
    for _ in range(1000):
        hand.now += 1
        p.tick()
    assert p.position == 125


def test_live_follows_and_pause_holds_while_more_arrives() -> None:
    p, hand = live_player()
    p.extend(0, 101 * SECOND)
    assert p.position == 101 * SECOND
    assert p.behind == 0
    before = p.window()
    p.pause()
    p.extend(0, 150 * SECOND)
    pass_time(p, hand, 49)
    assert (p.position, p.behind) == (101 * SECOND, 49 * SECOND)
    assert p.window() == before, "nothing moves on a paused screen"
    p.pause()
    pass_time(p, hand, 1)
    assert p.position == 102 * SECOND, "goes on from where it stopped"
    p.live()
    assert p.following
    assert p.behind == 0


def test_playing_up_to_the_end_of_a_live_session_follows_it() -> None:
    p, hand = live_player()
    p.seek(-SEEK)
    assert not p.following
    pass_time(p, hand, 3)
    assert p.behind == 2 * SECOND
    pass_time(p, hand, 3)
    assert p.following
    assert p.behind == 0


def test_a_session_that_ends_is_not_live_any_more() -> None:
    p, hand = live_player()
    p.extend(0, 102 * SECOND, growing=False)
    assert not p.following
    assert not p.playing
    assert p.position == 100 * SECOND or p.position == 102 * SECOND
    p.live()
    pass_time(p, hand, 5)
    assert (p.position, p.following) == (102 * SECOND, False)


def test_what_the_ring_drops_pushes_the_playhead() -> None:
    p, _ = live_player()
    p.to_start()
    p.pause()
    p.extend(30 * SECOND, 130 * SECOND)
    assert p.position == 30 * SECOND


def test_seeks_are_fixed_seconds_but_never_less_than_a_column() -> None:
    p, _ = file_player(seconds=10_000)
    p.jump(5000 * SECOND)
    p.seek(SEEK)
    assert p.position == 5005 * SECOND
    p.seek(-FAR)
    assert p.position == 4945 * SECOND
    while p.width < FAR:
        p.zoom_by(-1)
    p.seek(SEEK)
    assert p.position == 4945 * SECOND + p.width


def test_steps_land_on_whole_columns() -> None:
    p, _ = file_player()
    p.jump(10 * SECOND + 1)
    p.step(1)
    assert p.position == 10 * SECOND + W
    p.step(-1)
    p.step(-1)
    assert p.position == 10 * SECOND - W
    assert not p.playing


def test_jump_says_whether_the_moment_is_held() -> None:
    p, _ = file_player()
    assert p.jump(7)
    assert not p.jump(-1)
    assert p.position == 0
    assert not p.jump(10**15)
    assert p.position == p.end


def test_zoom_keeps_the_cursor_in_its_column() -> None:
    p, _ = file_player(seconds=1000)
    p.jump(500 * SECOND)
    column = p.cursor
    p.zoom_by(1)
    p.zoom_by(1)
    assert p.width < W
    assert p.cursor == column
    for _ in range(50):
        p.zoom_by(1)
    assert p.width == LADDER[0]
    for _ in range(50):
        p.zoom_by(-1)
    assert p.width == LADDER[-1]


def test_fit_shows_all_of_it_with_the_shortest_columns_that_do() -> None:
    p, _ = file_player(seconds=1000, columns=50)
    p.fit()
    window = p.window()
    assert window.start <= p.start
    assert window.end >= p.end
    narrower = LADDER[LADDER.index(p.width) - 1]
    assert narrower * 48 < p.end


def test_markers_are_visited_in_order_of_time() -> None:
    p, _ = file_player()
    for t in (30, 10, 20):
        p.jump(t * SECOND)
        p.mark(str(t))
    p.to_start()
    seen = []
    while p.to_marker(1):
        seen.append(p.position // SECOND)
    assert seen == [10, 20, 30]
    assert p.to_marker(-1)
    assert p.position == 20 * SECOND
    p.jump(10 * SECOND)
    assert not p.to_marker(-1)


Motion = Callable[[Player], object]
motions: list[tuple[str, Motion]] = [
    ("pause", lambda p: p.pause()),
    ("live", lambda p: p.live()),
    ("start", lambda p: p.to_start()),
    ("back", lambda p: p.seek(-SEEK)),
    ("far", lambda p: p.seek(FAR)),
    ("step", lambda p: p.step(1)),
    ("step back", lambda p: p.step(-1)),
    ("jump", lambda p: p.jump(12345678901)),
    ("out", lambda p: p.jump(-5)),
    ("in", lambda p: p.zoom_by(1)),
    ("wide", lambda p: p.zoom_by(-3)),
    ("fit", lambda p: p.fit()),
    ("reverse", lambda p: p.reverse()),
    ("faster", lambda p: p.faster(1)),
    ("slower", lambda p: p.faster(-2)),
    ("mark", lambda p: p.mark("x")),
    ("next", lambda p: p.to_marker(1)),
    ("narrow", lambda p: p.resize(1)),
    ("broad", lambda p: p.resize(200)),
    ("nothing", lambda p: p.resize(0)),
]


@settings(max_examples=300, deadline=None)
@given(
    some.booleans(),
    some.lists(
        some.tuples(
            some.sampled_from(motions), some.integers(0, 10**12), some.integers(0, 10**11),
            some.integers(0, 10**11),
        ),
        max_size=30,
    ),
)  # fmt: skip
def test_whatever_one_does_the_cursor_is_in_view_and_in_bounds(
    growing: bool, moves: list[tuple[tuple[str, Motion], int, int, int]]
) -> None:
    hand = Hand()
    p = Player(hand, 10**9, 10**11, growing=growing, live=growing)
    for (_, motion), passed, grown, dropped in moves:
        motion(p)
        hand.now += passed
        if growing:
            end = p.end + grown
            p.extend(min(p.start + dropped, end), end)
        p.tick()
        assert p.start <= p.position <= p.end
        window = p.window()
        assert window.count == p.columns >= 1
        assert window.width in LADDER
        assert window.first <= p.bucket < window.first + window.count
        assert 0 <= p.cursor < window.count
        assert window.first + p.cursor == p.bucket
        assert SPEEDS[0] <= p.speed <= SPEEDS[-1]
        if p.following:
            assert growing
            assert p.behind == 0
            assert p.cursor == window.count - 1


def test_a_screen_opened_before_the_first_row_finds_it() -> None:
    hand = Hand()
    p = Player(hand, 0, 0, growing=False, live=False)
    p.resize(20)
    p.extend(50 * SECOND, 60 * SECOND)
    assert p.position == 50 * SECOND
    assert p.window().start >= 49 * SECOND


@pytest.mark.parametrize("speed", [0.001, 1000.0])
def test_speeds_asked_for_are_kept_within_what_there_is(speed: float) -> None:
    p, _ = file_player(speed=speed)
    assert SPEEDS[0] <= p.speed <= SPEEDS[-1]
