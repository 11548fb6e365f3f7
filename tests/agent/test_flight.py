"""The flight ring: bounded by age and by bytes, whatever comes."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as some

from dsprobe.agent import flight
from dsprobe.agent.flight import KEPT, Flight, Sent

SPAN, LIMIT = 1000, 10_000

frames = some.builds(
    Sent,
    stream=some.sampled_from(["softirq.cpu", "meta.clock", "meta.session", "meta.coverage"]),
    t1=some.integers(0, 5000),
    rows=some.integers(1, 9),
    message=some.binary(max_size=4000),
)


@given(some.lists(frames, max_size=80))
def test_ring_is_bounded_and_tells_what_it_lets_go(came: list[Sent]) -> None:
    ring = Flight(SPAN, LIMIT)
    gone: list[Sent] = []
    for sent in came:
        gone += ring.add(sent)
        held = list(ring.since(0))
        assert ring.bytes == sum(s.cost for s in held) <= LIMIT
        if held and sent.stream not in KEPT and sent in held:
            assert held[0].t1 >= sent.t1 - SPAN
    passing = [s for s in came if s.stream not in KEPT]
    # Nothing vanishes, and order is that of arrival: what went and what is left is what came.
    assert [id(s) for s in gone + list(ring.since(0))] == [id(s) for s in passing]


@given(some.lists(frames, max_size=60), some.integers(0, 5000))
def test_history_is_what_ends_late_enough(came: list[Sent], t: int) -> None:
    ring = Flight(SPAN, 1 << 30)
    for sent in came:
        ring.add(sent)
    assert list(ring.since(t)) == [s for s in ring.since(0) if s.t1 >= t]


def test_what_gives_rows_their_meaning_outlives_the_ring() -> None:
    ring = Flight(SPAN, LIMIT)
    facts = Sent("meta.session", 1, 9, b"f" * 500)
    ring.add(facts)
    for t in range(100):
        ring.add(Sent("softirq.cpu", t * SPAN, 1, b"x" * 3000))
    assert list(ring.kept()) == [facts]
    assert ring.bytes <= LIMIT
    assert len(list(ring.since(0))) == 2


def test_a_stream_that_is_kept_is_bounded_and_leaves_the_others_alone() -> None:
    ring = Flight(SPAN, LIMIT)
    facts = Sent("meta.session", 1, 9, b"f" * 500)
    ring.add(facts)
    message = b"n" * 100_000
    for t in range(3 * flight.MAX_KEPT_BYTES // len(message)):
        ring.add(Sent("meta.netns", t, 1, message))
    kept = list(ring.kept())
    assert facts in kept
    names = [s for s in kept if s.stream == "meta.netns"]
    assert flight.MAX_KEPT_BYTES * 0.9 < sum(s.cost for s in names) <= flight.MAX_KEPT_BYTES
    assert names[-1].t1 == 3 * flight.MAX_KEPT_BYTES // len(message) - 1


def test_full_says_that_bytes_cut_the_span_short() -> None:
    ring = Flight(SPAN, LIMIT)
    ring.add(Sent("softirq.cpu", 0, 1, b""))
    ring.add(Sent("softirq.cpu", 2 * SPAN, 1, b""))
    assert not ring.full
    ring.add(Sent("softirq.cpu", 2 * SPAN, 1, b"x" * LIMIT))
    assert ring.full
