"""Every subscriber: given plus told lost is all there was, and nobody costs more than allowed."""

from __future__ import annotations

from collections import Counter

import msgpack
from hypothesis import given, settings
from hypothesis import strategies as some

from dsprobe.agent.flight import Flight
from dsprobe.agent.hub import Hub, Subscriber
from dsprobe.recordings import frames, wire
from dsprobe.recordings.streams import CPU_LOAD, MARKER, META_SESSION, SOFTIRQ_SLOW
from dsprobe.recordings.wire import Receiver

LIMIT = 64 << 10


def given_and_lost(s: Subscriber, most: int = 1 << 30) -> tuple[Counter[str], Counter[str]]:
    """Rows by stream that up to ``most`` messages bring, and that they say are lost."""
    given, lost = Counter[str](), Counter[str]()
    receiver = Receiver(wire.MAX_MESSAGE)
    while most > 0 and (data := s.take()) is not None:
        most -= 1
        for message in receiver.feed(data):
            if message["m"] == "frame":
                given[message["s"]] += message["n"]
            elif message["m"] == "lost":
                lost.update(wire.to_lost(message))
    return given, lost


steps = some.lists(
    some.one_of(
        some.tuples(some.just("publish"), some.integers(1, 700)),
        some.tuples(some.just("take"), some.integers(1, 30)),
    ),
    max_size=60,
)


@settings(max_examples=150, deadline=None)
@given(before=some.lists(some.integers(1, 400), max_size=8), steps=steps, cap=some.booleans())
def test_produced_is_given_plus_lost(
    before: list[int], steps: list[tuple[str, int]], cap: bool
) -> None:
    # The ring holds less than is published, so history goes while it is being sent.
    hub = Hub(Flight(1 << 60, 40_000))
    t = 0

    def publish(n: int) -> None:
        nonlocal t
        t += 1
        hub.publish(SOFTIRQ_SLOW, SOFTIRQ_SLOW.rows(t=[t] * n))
        hub.publish(CPU_LOAD, CPU_LOAD.rows(t=[t] * (n % 7 + 1)))

    for n in before:
        publish(n)
    history = Counter[str]()
    for sent in hub.flight.since(0):
        history[sent.stream] += sent.rows
    earlier = Counter(hub.produced)
    s = hub.subscribe(0, LIMIT if cap else 8 << 20, None, True)
    given, lost = Counter[str](), Counter[str]()
    for what, n in steps:
        if what == "publish":
            publish(n)
            assert s.queued <= LIMIT if cap else True
        else:
            g, missing = given_and_lost(s, n)
            given += g
            lost += missing
    g, missing = given_and_lost(s)
    assert given + g + lost + missing == history + hub.produced - earlier
    assert not s.waiting


def test_loss_is_told_before_good_bye() -> None:
    hub = Hub(Flight(1 << 60, 1 << 30))
    s = hub.subscribe(0, LIMIT, None, True)
    for t in range(100):
        hub.publish(SOFTIRQ_SLOW, SOFTIRQ_SLOW.rows(t=[t] * 100))
    s.end("over")
    kinds = []
    receiver = Receiver(wire.MAX_MESSAGE)
    while (data := s.take()) is not None:
        kinds += [m["m"] for m in receiver.feed(data)]
    assert kinds[-2:] == ["lost", "bye"]


def test_a_subscriber_that_reads_nothing_keeps_no_history_alive() -> None:
    hub = Hub(Flight(1 << 60, 100_000))
    for t in range(50):
        hub.publish(SOFTIRQ_SLOW, SOFTIRQ_SLOW.rows(t=[t] * 20))
    s = hub.subscribe(0, LIMIT, None, False)
    first = s.take()
    for t in range(50, 500):
        hub.publish(SOFTIRQ_SLOW, SOFTIRQ_SLOW.rows(t=[t] * 20))
    assert first is not None
    given, lost = given_and_lost(s)
    assert not given  # all of it had gone
    assert lost[SOFTIRQ_SLOW.name] == 49 * 20


def test_seq_counts_without_gaps_and_rows_survive() -> None:
    hub = Hub(Flight(1 << 60, 1 << 30))
    s = hub.subscribe(0, 64 << 20, None, True)
    rows = SOFTIRQ_SLOW.rows(t=list(range(frames.MAX_FRAME_ROWS // 16)), duration=7)
    hub.publish(SOFTIRQ_SLOW, rows)  # more than one frame's worth of bytes
    hub.publish(SOFTIRQ_SLOW, rows[:3])
    got, seqs = [], []
    while (data := s.take()) is not None:
        message = msgpack.unpackb(data)
        seqs.append(message["q"])
        got += frames.decode(SOFTIRQ_SLOW, message["d"])["t"].tolist()
    assert seqs == list(range(len(seqs)))
    assert got == [*rows["t"].tolist(), 0, 1, 2]


def test_only_what_was_asked_for_and_meta() -> None:
    hub = Hub(Flight(1 << 60, 1 << 30))
    hub.publish(META_SESSION, META_SESSION.rows(t=1, key=["host"], value=["here"]))
    s = hub.subscribe(0, LIMIT, frozenset({"marker"}), True)
    hub.publish(CPU_LOAD, CPU_LOAD.rows(t=2))
    hub.publish(MARKER, MARKER.rows(t=3, label=["now"]))
    given, lost = given_and_lost(s)
    assert given == {"meta.session": 1, "marker": 1}
    assert not lost
