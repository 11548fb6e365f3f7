"""Viewers over a real socket: history, loss, misbehaviour."""

from __future__ import annotations

import contextlib
import resource
import socket
from collections import Counter

import pytest

from dsprobe.agent.server import MAX_VIEWERS
from dsprobe.recordings import wire
from dsprobe.recordings.connection import Connection, Refused
from dsprobe.recordings.errors import EXIT_VERSION
from dsprobe.recordings.live import LiveSession
from dsprobe.recordings.session import FOREVER
from dsprobe.recordings.streams import META_SESSION, SOFTIRQ_SLOW
from tests.agent.serving import SECOND, Serving, read_all, serving
from tests.support.wait import until

SLOW = SOFTIRQ_SLOW.name


def rss() -> int:
    with open("/proc/self/statm") as f:
        return int(f.read().split()[1]) * resource.getpagesize()


def held(live: LiveSession) -> int:
    live.wait(0.02)
    return len(live.read(SLOW, 0, FOREVER))


def test_late_viewer_sees_history_then_what_comes() -> None:
    with serving() as s:
        s.do(lambda: s.hub.publish(META_SESSION, META_SESSION.rows(t=1, key=["a"], value=["b"])))
        s.publish(rows=3, times=500)  # 5 s
        live = LiveSession(Connection(s.path, history=2 * SECOND))
        until(lambda: held(live) and live.caught_up, "history comes")
        first, last = live.span()
        assert last == s.now
        assert s.now - 2 * SECOND <= first <= s.now - 2 * SECOND + SECOND // 100
        assert held(live) == 3 * 201
        assert len(live.read("meta.session", 0, FOREVER)) == 1  # older than asked for
        s.publish(rows=5)
        until(lambda: held(live) == 3 * 201 + 5, "news come")
        live.close()


def test_no_history_asked_for_none_given() -> None:
    with serving() as s:
        s.publish(times=10)
        s.now += 1
        live = LiveSession(Connection(s.path, history=0))
        until(lambda: held(live) == 0 and live.caught_up, "it is live")
        s.publish()
        until(lambda: held(live) == 1, "news come")
        live.close()


def test_without_follow_history_and_good_bye() -> None:
    with serving() as s:
        s.publish(times=10)
        connection = Connection(s.path, follow=False)
        kinds = Counter[str]()
        while not connection.ended:
            kinds.update(m["m"] for m in connection.receive(0.1))
        assert connection.ended == "that is all"
        assert kinds == {"frame": 10}
        connection.close()
        until(lambda: not s.server.viewers, "it has left")


def test_viewer_that_stops_reading_loses_exactly_what_it_is_told() -> None:
    with serving(limit=4 << 20) as s:
        slow = Connection(s.path, history=0, queue=256 << 10)
        s.publish(rows=100, times=2000)  # 10 MB: fills queue, socket buffer and ring
        before = rss()
        s.publish(rows=100, times=8000)  # 38 MB more
        assert rss() - before < 8 << 20
        given, lost = Counter[str](), Counter[str]()

        def take() -> bool:
            for message in slow.receive(0.05):
                if message["m"] == "frame":
                    given[message["s"]] += message["n"]
                elif message["m"] == "lost":
                    lost.update(wire.to_lost(message))
            return given[SLOW] + lost[SLOW] >= s.hub.produced[SLOW]

        until(take, "it reads on and is told of the rest")
        assert lost[SLOW] > 500_000
        assert given[SLOW] > 1000
        s.publish(rows=7)
        until(take, "what comes now")
        assert given + lost == s.hub.produced
        slow.close()


def test_viewer_beside_one_that_stops_reading_misses_nothing() -> None:
    with serving() as s:
        slow = Connection(s.path, history=0, queue=256 << 10)
        beside = LiveSession(Connection(s.path, history=0))
        for _ in range(20):
            s.publish(rows=100, times=100)
            beside.wait(0.01)
        until(lambda: held(beside) == 200_000, "the one beside has it all")
        assert not beside.lost()
        for c in (beside, slow):
            c.close()


def test_viewer_that_stops_in_history_costs_no_memory() -> None:
    with serving(limit=32 << 20) as s:
        s.publish(rows=100, times=6000)  # 28 MB of history
        viewers = [s.raw() for _ in range(8)]
        for v in viewers:
            v.sendall(wire.pack("hello", protocol=wire.PROTOCOL, history=-1))
        s.turn()
        before = rss()
        s.publish(rows=100, times=20_000)  # the ring turns over three times
        assert rss() - before < 24 << 20  # one ring for each would be 250 MB
        for v in viewers:
            v.close()


def test_more_viewers_than_allowed_are_told() -> None:
    with serving() as s:
        all_in = [Connection(s.path) for _ in range(MAX_VIEWERS)]
        with pytest.raises(Refused, match=f"it has {MAX_VIEWERS} viewers"):
            Connection(s.path)
        all_in.pop().close()
        until(lambda: s.server.viewers == MAX_VIEWERS - 1, "one has left")
        all_in.append(Connection(s.path))
        for c in all_in:
            c.close()


def test_another_protocol_is_told_and_let_go() -> None:
    with serving() as s:
        v = s.raw()
        v.sendall(wire.pack("hello", protocol=99, history=-1))
        said = read_all(v)
        assert [m["m"] for m in said] == ["hello", "bye"]
        assert said[0]["protocol"] == wire.PROTOCOL
        assert "protocol 1" in said[1]["why"]
        v.close()


def test_our_side_says_so_too(monkeypatch: pytest.MonkeyPatch) -> None:
    with serving() as s:
        monkeypatch.setattr(wire, "PROTOCOL", 1)
        hello = s.server._hello

        def older(viewer: object, message: dict[str, object]) -> None:
            wire.PROTOCOL = 2
            try:
                hello(viewer, message)  # type: ignore[arg-type]
            finally:
                wire.PROTOCOL = 1

        monkeypatch.setattr(s.server, "_hello", older)
        with pytest.raises(Refused, match="same version on both sides") as e:
            Connection(s.path)
        assert e.value.exit_code == EXIT_VERSION


DEEP = b"\x82\xa1m\xa5hello\xa1x" + b"\x91" * 60_000
WIDE = b"\x82\xa1m\xa5hello\xa1x" + b"\xdc\x10\x00" * 2 + b"\x90" * 4096

GARBAGE = {
    "bytes": bytes(range(256)) * 40,
    "a number": b"\x01",
    "not a map": b"\x93\x01\x02\x03",
    "no kind": b"\x81\xa1x\x01",
    "kind is a number": b"\x81\xa1m\x01",
    "nested": DEEP,
    "promises 4 GB": b"\xc6\xff\xff\xff\xff",
    "promises 4 G elements": b"\xdd\xff\xff\xff\xff",
    "too many keys": b"\xde\x20\x00" + b"\xa1m\x01" * 8192,
    "number as key": b"\x81\x01\x02",
    "not text": b"\x82\xa1m\xa4mark\xa5label\xa2\xff\xfe",
    "extension": b"\xc7\x0c\xff" + b"\0" * 12,
}


@pytest.mark.parametrize("data", GARBAGE.values(), ids=GARBAGE)
def test_garbage_ends_that_connection_alone(data: bytes) -> None:
    with serving() as s:
        live = LiveSession(Connection(s.path))
        v = s.raw()
        v.sendall(data)
        v.shutdown(socket.SHUT_WR)
        assert read_all(v) == []
        v.close()
        s.publish()
        until(lambda: held(live) == 1, "the other one goes on")
        assert not s.marks
        live.close()


def test_message_without_end_is_cut_off_early() -> None:
    """Arrays within arrays stay under every limit for one value, and grow without end."""
    with serving() as s:
        v = s.raw()
        before = rss()
        v.sendall(WIDE[:16] + b"\xdc\x10\x00")
        sent = 0
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):
            while sent < 64 << 20:
                v.sendall(b"\x90" * 4096 + b"\xdc\x10\x00")
                sent += 4099
        assert sent < 2 << 20
        assert rss() - before < 32 << 20
        v.close()


def test_silence_and_strange_hellos_are_borne() -> None:
    with serving() as s:
        silent = s.raw()
        odd = [
            {"protocol": 1, "history": 1 << 62, "queue": -5, "streams": ["x", 3, None]},
            {"protocol": 1, "history": "yes", "queue": "much", "streams": {"a": 1}},
            {"protocol": 1, "history": -(1 << 63), "queue": 1 << 62, "follow": 0},
        ]
        sockets = [s.raw() for _ in odd]
        for v, hello in zip(sockets, odd, strict=True):
            v.sendall(wire.pack("hello", **hello))
            assert v.recv(100)
            v.sendall(wire.pack("hello", **hello))  # a second one means nothing
        s.turn()
        assert s.server.viewers == 3
        for v in (silent, *sockets):
            v.close()
        until(lambda: not s.server.viewers, "they have left")


def test_who_says_nothing_loses_its_place() -> None:
    with serving() as s:
        silent = [s.raw() for _ in range(MAX_VIEWERS)]
        s.turn()
        with pytest.raises(Refused):
            Connection(s.path)
        s.now += 11 * SECOND
        assert all(read_all(v) == [] for v in silent)
        live = LiveSession(Connection(s.path))
        s.now += 11 * SECOND
        s.publish()
        until(lambda: held(live) == 1, "who has said hello may stay")
        live.close()
        for v in silent:
            v.close()


def test_marks_are_short_text() -> None:
    with serving() as s:
        v = s.raw()
        v.sendall(wire.pack("mark", label="x" * 1000) + wire.pack("mark", label=7))
        v.sendall(wire.pack("mark", label="here"))
        until(lambda: len(s.marks) == 2, "marks come")
        assert s.marks == ["x" * 200, "here"]
        v.close()


def test_stop_is_for_the_last_viewer() -> None:
    with serving() as s:
        one, two = Connection(s.path), Connection(s.path)
        stranger = s.raw()  # has not said hello, so it is no viewer
        for v in (one, stranger):
            (v.send("stop") if isinstance(v, Connection) else v.sendall(wire.pack("stop")))
        s.turn()
        assert s.stops == 0
        two.close()
        until(lambda: s.server.viewers == 1, "one is left")
        stranger.sendall(wire.pack("stop"))
        s.turn()
        assert s.stops == 0
        one.send("stop")
        until(lambda: s.stops == 1, "it is heard")
        one.close()
        stranger.close()


def test_stop_is_not_for_others_than_root(monkeypatch: pytest.MonkeyPatch) -> None:
    from dsprobe.agent import server

    monkeypatch.setattr(server, "_peer", lambda sock: (1234, {77}))
    with serving() as s:
        s.server._group = 77
        one = Connection(s.path)
        one.send("stop")
        one.send("mark", label="heard")
        until(lambda: s.marks, "what came after it was heard")
        assert s.stops == 0
        one.close()


def ends(s: Serving) -> float:
    import time

    began = time.monotonic()
    s.end()
    return time.monotonic() - began


def test_last_words_reach_who_reads_and_do_not_wait_for_who_does_not() -> None:
    with serving() as s:
        stuck = [Connection(s.path, history=0, queue=1 << 20) for _ in range(10)]
        silent = s.raw()
        s.publish(rows=100, times=1000)
        reader = LiveSession(Connection(s.path, history=None))
        until(lambda: held(reader) == 100_000, "it has read all")
        s.publish(rows=3)
        took = ends(s)
        until(lambda: held(reader) == 100_003 and not reader.live, "the last rows and good-bye")
        assert reader.problems == ("over",)
        assert took < 5  # one second in all, not one for each
        for c in stuck:
            given = lost = 0
            while not c.ended:
                for m in c.receive(1.0):
                    given += m["n"] if m["m"] == "frame" else 0
                    lost += sum(wire.to_lost(m).values()) if m["m"] == "lost" else 0
            assert given > 0
            c.close()
        silent.close()
        reader.close()
        s.end = lambda: None  # type: ignore[method-assign]
