"""Named is what leaks, and nothing else."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as some

from dsprobe.recordings.leaks import Findings, Thresholds, find_leaks
from dsprobe.recordings.stacks import Stacks, where, wrappers
from tests.recordings.cudahost import BOOT, MIB, SECOND, CudaHost, Stack

few = settings(max_examples=25, deadline=None)
USUAL = Thresholds()
LONG = USUAL.needed // SECOND + 5


def judged(host: CudaHost, thresholds: Thresholds = USUAL) -> Findings:
    stacks = Stacks(host.session)
    stacks.refresh()
    return find_leaks(host.session, *host.session.span(), stacks, thresholds)


def host() -> tuple[CudaHost, Stack]:
    made = CudaHost()
    made.process(1, 4242)
    return made, made.stack(1, ["remember@cache.py:7", "run@engine.py:3"])


def hold(stack: Stack, level: float, t: int) -> None:
    """Blocks of a MiB up to ``level`` MiB; the oldest go first."""
    while len(stack.held) > level:
        stack.free()
    while len(stack.held) + 1 <= level:
        stack.alloc(t, MIB)


@few
@given(some.floats(0.5, 20), some.floats(0, 2), some.integers(0, 30), some.integers(0, 1 << 32))
def test_a_leak_is_named_however_it_wavers(
    rate: float, noise: float, extra: int, seed: int
) -> None:
    made, leak = host()
    weights = made.stack(2, ["load@weights.py:1"])
    for _ in range(50):
        weights.alloc(made.now, 512 * MIB)
    draw = np.random.default_rng(seed)

    def act(second: int, t: int) -> None:
        hold(leak, rate * second + draw.uniform(0, noise * rate), t)

    made.run(LONG + extra, act)
    (found,) = judged(made).leaks
    assert (found.process, found.stack, found.kind) == (1, 1, "device")
    assert found.rate == pytest.approx(rate * MIB, rel=0.35)
    assert found.live == leak.live or found.end < made.now
    assert found.block_rate == pytest.approx(found.rate / MIB, rel=0.35)


@few
@given(some.integers(0, 500), some.integers(0, 100))
def test_what_stays_is_not(level: int, extra: int) -> None:
    made, stack = host()
    made.run(LONG + extra, lambda second, t: hold(stack, level, t))
    found = judged(made)
    assert not found.leaks
    assert found.judged == ((1,) if level else ())


@few
@given(some.integers(0, 200), some.integers(1, 60), some.integers(0, 200), some.integers(1, 300))
def test_what_grows_once_is_not(begin: int, ramp: int, before: int, more: int) -> None:
    made, stack = host()

    def act(second: int, t: int) -> None:
        hold(stack, before + more * min(max(second - begin, 0) / ramp, 1), t)

    # It must have stayed for as long as a window is.
    made.run(max(LONG, begin + ramp + 40), act)
    assert not judged(made).leaks


@few
@given(
    some.floats(0.7, 200), some.integers(2, 200), some.floats(0, 1), some.integers(0, 60),
    some.integers(0, 300),
)  # fmt: skip
def test_what_breathes_is_not(
    period: float, height: int, phase: float, extra: int, base: int
) -> None:
    assume((1 - phase) * period > 1)
    made, stack = host()
    at = [phase * height]

    def act(second: int, t: int) -> None:
        rest = height / period
        while at[0] + rest >= height:
            rest -= height - at[0]
            hold(stack, base + height, t)
            hold(stack, base, t)
            at[0] = 0
        at[0] += rest
        hold(stack, base + at[0], t)

    # It must have been seen to fall: before that it is as a leak is.
    made.run(max(LONG, int(period * (1 - phase)) + 12) + extra, act)
    assert not judged(made).leaks


def walk(seed: int) -> Callable[[int], float]:
    draw = np.random.default_rng(seed)
    top = int(draw.integers(5, 200))
    step = int(draw.integers(1, 2 + top // 4))
    at = [int(draw.integers(0, top))]

    def level(second: int) -> float:
        at[0] = int(np.clip(at[0] + draw.integers(-step, step + 1), 0, top))
        return at[0]

    return level


def test_what_wanders_within_bounds_is_not() -> None:
    for seed in range(100, 200):
        made, stack = host()
        level = walk(seed)
        made.run(LONG + seed % 50, lambda second, t: hold(stack, level(second), t))  # noqa: B023
        assert not judged(made).leaks, seed


def test_a_leak_that_breathes_too_is_named_by_its_floor() -> None:
    made, stack = host()

    def act(second: int, t: int) -> None:
        stack.alloc(t, 2 * MIB)  # stays
        for _ in range(4):
            stack.alloc(t, MIB // 4)
        if second % 5 == 4:
            small = [i for i, (size, _) in enumerate(stack.held) if size < MIB]
            for i in reversed(small):
                stack.free(i)

    made.run(LONG, act)
    (found,) = judged(made).leaks
    assert found.rate == pytest.approx(2 * MIB, rel=0.1)


def test_a_leak_that_began_late_is_named() -> None:
    made, stack = host()
    made.run(3 * LONG, lambda second, t: hold(stack, 100 + max(second - 2 * LONG, 0), t))
    (found,) = judged(made).leaks
    assert found.rate == pytest.approx(MIB, rel=0.1)
    assert found.window * found.windows < 1.1 * LONG * SECOND


def test_the_fastest_comes_first_however_large_others_are() -> None:
    made, slow = host()
    fast = made.stack(2, ["fast@a.py:1"])
    large = made.stack(3, ["large@a.py:1"])
    for _ in range(100):
        large.alloc(made.now, 1 << 30)

    def act(second: int, t: int) -> None:
        slow.alloc(t, MIB)
        fast.alloc(t, 3 * MIB)

    made.run(LONG, act)
    assert [leak.stack for leak in judged(made).leaks] == [2, 1]


def test_one_that_falls_between_any_two_looks_is_not() -> None:
    """Allocated and freed again 100 times a second: what is seen creeps up, but is never old."""
    made, stack = host()

    def act(second: int, t: int) -> None:
        hold(stack, 0, t)
        hold(stack, second, t)

    made.run(LONG, act)
    assert not judged(made).leaks


def test_too_short_a_time_is_said_and_nothing_guessed() -> None:
    made, stack = host()
    made.run(LONG - 20, lambda second, t: hold(stack, 10 * second, t))
    found = judged(made)
    assert not found.leaks
    assert not found.judged
    (short,) = found.unjudged
    assert short.process == 1
    assert short.seen == pytest.approx((LONG - 20) * SECOND, abs=2 * SECOND)


def test_thresholds_shorten_the_time() -> None:
    made, stack = host()
    made.run(20, lambda second, t: hold(stack, 10 * second, t))
    quick = Thresholds(warmup=2 * SECOND, window=2 * SECOND)
    assert len(judged(made, quick).leaks) == 1
    assert not judged(made, Thresholds(2 * SECOND, 2 * SECOND, min_bytes=1 << 30)).leaks


def test_of_a_process_that_ended_the_time_before_counts() -> None:
    made, stack = host()
    made.run(LONG, lambda second, t: hold(stack, second, t))
    made.end(1)
    made.run(30)
    (found,) = judged(made).leaks
    assert found.end <= BOOT + LONG * SECOND


def test_stacks_that_read_alike_are_one() -> None:
    made, stack = host()
    other = made.stack(2, [])
    for depth, frame in enumerate((100, 101)):
        made.session.append("meta.stack", t=made.now, id=2, depth=depth, frame=frame)

    def act(second: int, t: int) -> None:
        (stack if second // 20 % 2 else other).alloc(t, MIB)

    made.run(LONG, act)
    (found,) = judged(made).leaks
    assert found.stack == 1
    assert found.blocks == LONG


def test_it_is_named_by_what_others_do_not_go_through() -> None:
    """All of them allocate through the same helper."""
    made = CudaHost()
    made.process(1, 4242)
    leak = made.stack(
        1, ["call@driver.py:57", "get@driver.py:60", "remember@c.py:7", "main@c.py:1"]
    )
    other = made.stack(2, ["call@driver.py:57", "get@driver.py:60", "load@c.py:9", "main@c.py:1"])
    other.alloc(made.now, MIB)
    made.run(LONG, lambda second, t: leak.alloc(t, MIB))
    (found,) = judged(made).leaks
    assert found.place.text == "remember (c.py:7)"


def test_it_is_not_named_by_what_all_call_the_driver_through() -> None:
    """Also where a stack of another kind does not go through it."""
    host = CudaHost()
    inner = ("call@/lib/driver.py:57", "ok@/lib/driver.py:61")
    leak = host.stack(1, (*inner, "get@/lib/driver.py:70", "append@/srv/cache.py:88"))
    stays = [
        host.stack(2, (*inner, "get@/lib/driver.py:71", "load@/srv/weights.py:12")),
        host.stack(3, (*inner, "get@/lib/driver.py:70", "forward@/srv/model.py:9")),
        host.stack(4, (*inner, "stage@/srv/io.py:5")),
    ]
    other = host.stack(5, ())
    for s in (*stays, other):
        s.alloc(BOOT, MIB)
    host.run(400, lambda second, t: leak.alloc(t, MIB))
    [found] = judged(host).leaks
    assert found.place.function == "append"
    stacks = Stacks(host.session)
    stacks.refresh()
    frames = [stacks.frames(i) for i in range(1, 6)]
    assert set(stacks.every()) == set(frames[:4])
    names = {("call", "/lib/driver.py"), ("ok", "/lib/driver.py"), ("get", "/lib/driver.py")}
    assert wrappers(frames) == names
    assert [where(f, (), names).function for f in frames[:4]] == ["append", "load", "forward",
                                                                  "stage"]  # fmt: skip
    # One stack shares nothing with others, and what is all there is of one names it.
    assert wrappers(frames[:1]) == frozenset()
    assert where(frames[0][:2], (), names).function == "call"


def test_address_space_is_no_memory() -> None:
    made, _ = host()
    mapped = made.stack(2, ["grow@pool.py:1"], kind="mapped")
    made.run(LONG, lambda second, t: hold(mapped, second, t))
    assert not judged(made).leaks


def test_wild_rows_are_borne() -> None:
    made, stack = host()
    made.run(LONG, lambda second, t: hold(stack, second, t))
    n = 5000
    draw = np.random.default_rng(1)
    made.session.append(
        "gpu.stack", t=np.sort(draw.integers(BOOT, made.now, n, np.uint64)),
        dt=draw.integers(0, 1 << 63, n, np.uint64), process=draw.integers(0, 1 << 32, n),
        stack=draw.integers(0, 1 << 32, n), kind=draw.integers(11, 256, n),
        live=draw.integers(0, 1 << 63, n, np.uint64), born=draw.integers(0, 1 << 63, n, np.uint64),
    )  # fmt: skip
    made.session.append("meta.process", t=BOOT, id=9, ended=[1, 1 << 63])
    made.session.refresh()
    found = judged(made)
    assert [leak.stack for leak in found.leaks if leak.process == 1] == [1]
    assert found.left_out == n + 1 - 4096
