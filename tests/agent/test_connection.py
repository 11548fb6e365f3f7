"""A viewer's side of the socket against agents that misbehave."""

from __future__ import annotations

import contextlib
import os
import socket
import tempfile
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from dsprobe.recordings import connection, frames, wire
from dsprobe.recordings.connection import Connection, Refused
from dsprobe.recordings.live import LiveSession
from dsprobe.recordings.session import FOREVER
from dsprobe.recordings.streams import CPU_LOAD, META_COVERAGE, SOFTIRQ_SLOW, STREAMS
from dsprobe.recordings.wire import pack
from tests.support.wait import until

DECLARED = [s.to_json() for s in STREAMS.values()]
HELLO = pack("hello", protocol=wire.PROTOCOL, span=10**10, limit=1 << 20, streams=DECLARED)


@contextlib.contextmanager
def fake(talk: Callable[[socket.socket], None]) -> Iterator[str]:
    """Something that listens, takes one hello and then does what it likes."""
    with tempfile.TemporaryDirectory(prefix="dsprobe-") as folder:
        path = str(Path(folder, "socket"))
        listener = socket.socket(socket.AF_UNIX)
        listener.bind(path)
        listener.listen(1)

        def run() -> None:
            sock, _ = listener.accept()
            with sock, contextlib.suppress(OSError):
                sock.recv(1 << 16)
                talk(sock)

        thread = threading.Thread(target=run, daemon=True)
        thread.start()
        try:
            yield path
        finally:
            thread.join(20)
            listener.close()
            assert not thread.is_alive()


def says(*data: bytes) -> Callable[[socket.socket], None]:
    return lambda sock: sock.sendall(b"".join(data))


@pytest.mark.parametrize(
    ("data", "why"),
    [
        (b"", "has gone"),
        (b"HTTP/1.1 400 Bad Request\r\n\r\n", "no message"),
        (b"\xdd\xff\xff\xff\xff", "no message"),
        (b"\x91" * 100_000, "no message"),
        (pack("frame"), "no reason given"),
        (pack("bye", why="I am old"), "I am old"),
        (pack("hello", protocol=7), "same version on both sides"),
        (pack("hello", protocol="x"), "same version on both sides"),
        (pack("hello", protocol=1), "no usable streams"),
        (pack("hello", protocol=1, streams=7), "no usable streams"),
        (pack("hello", protocol=1, streams=["{"]), "no usable streams"),
        (pack("hello", protocol=1, streams=[3]), "no usable streams"),
        (pack("hello", protocol=1, streams=["[" * 100_000]), "no usable streams"),
    ],
    ids=range(13),
)
def test_refusal_is_one_sentence(data: bytes, why: str) -> None:
    with fake(says(data)) as path, pytest.raises(Refused, match=why) as e:
        Connection(path)
    assert path in str(e.value)
    assert "\n" not in str(e.value)


def test_agent_that_never_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connection, "HELLO_SECONDS", 0.2)
    over = threading.Event()
    with fake(lambda _: over.wait(20) and None) as path:
        with pytest.raises(Refused, match="does not answer: restart it"):
            Connection(path)
        over.set()


def test_agent_whose_queue_is_full_is_not_waited_for() -> None:
    with tempfile.TemporaryDirectory(prefix="dsprobe-") as folder:
        path = str(Path(folder, "socket"))
        listener = socket.socket(socket.AF_UNIX)
        listener.bind(path)
        listener.listen(0)
        waiting = socket.socket(socket.AF_UNIX)
        waiting.connect(path)
        with pytest.raises(Refused, match="does not answer"):
            Connection(path)
        waiting.close()
        listener.close()


def test_why_is_read_even_when_our_hello_finds_nobody() -> None:
    """One that refuses may say so and hang up before we have spoken."""
    with tempfile.TemporaryDirectory(prefix="dsprobe-") as folder:
        path = str(Path(folder, "socket"))
        listener = socket.socket(socket.AF_UNIX)
        listener.bind(path)
        listener.listen(1)
        met = threading.Barrier(2)

        def run() -> None:
            sock, _ = listener.accept()
            sock.send(pack("bye", why="full up"))
            sock.close()
            met.wait(10)

        class Late(Connection):
            def _check_peer(self) -> None:
                met.wait(10)

        thread = threading.Thread(target=run, daemon=True)
        thread.start()
        with pytest.raises(Refused, match="full up"):
            Late(path)
        thread.join()
        listener.close()


def frame(t: int, count: int = 1, seq: int = 0, **change: object) -> bytes:
    rows = SOFTIRQ_SLOW.rows(t=[t] * count)
    f = frames.make(SOFTIRQ_SLOW, seq, rows)
    body: dict[str, object] = {"s": f.stream, "q": f.seq, "a": f.t0, "b": f.t1, "n": f.n}
    return pack("frame", **(body | {"d": f.data} | change))


STRANGE = {
    "no data": pack("frame", s="softirq.slow", q=1, a=1, b=2, n=1),
    "numbers": frame(5, q=-1),
    "huge": frame(5, b=1 << 63),
    "float": frame(5, n=1.5),
    "text for data": frame(5, d="text"),
    "garbage for data": frame(5, d=b"\xff\xfe"),
    "stream is a number": frame(5, s=7),
    "backwards": frame(5, a=9),
}


@pytest.mark.parametrize("data", STRANGE.values(), ids=STRANGE)
def test_a_bad_frame_is_counted_and_the_rest_goes_on(data: bytes) -> None:
    with fake(says(HELLO, data, frame(6, 3), pack("live"))) as path:
        live = LiveSession(Connection(path))
        until(lambda: live.wait(0.05) or live.caught_up, "all has come")
        until(lambda: len(live.read("softirq.slow", 6, FOREVER)) == 3, "the good frame is there")
        live.read("softirq.slow", 0, FOREVER)
        assert "1 frames from the agent could not be read" in live.problems
        live.close()


def test_strange_losses_and_unknown_messages_are_borne() -> None:
    odd = [
        pack("lost"), pack("lost", streams=3), pack("lost", streams={"a": 1}),
        pack("lost", streams={"a": [1, "x"]}), pack("lost", streams={"a": [1, -5]}),
        pack("lost", streams={"softirq.slow": [1, 40]}), pack("news", x=1),
        pack("frame", s="unknown.stream", q=0, a=1, b=1, n=1, d=b""),
    ]  # fmt: skip
    with fake(says(HELLO, *odd, pack("live"))) as path:
        live = LiveSession(Connection(path))
        until(lambda: live.wait(0.05) and live.caught_up, "all has come")
        assert live.lost() == {"softirq.slow": 40}
        live.close()


def test_what_came_with_the_hello_is_not_lost_with_the_good_bye() -> None:
    """All of a short history may be there at once, before anybody has asked for it."""

    def talk(sock: socket.socket) -> None:
        sock.sendall(HELLO + frame(5) + frame(6, 3, seq=1) + pack("bye", why=""))

    with fake(talk) as path:
        c = Connection(path)
        got = []
        while not c.ended:
            got += list(c.receive(1.0))
        assert [m["n"] for m in got] == [1, 3]
        assert c.ended == "that is all"
        c.close()


def test_agent_that_dies_in_the_middle_of_a_message() -> None:
    with fake(says(HELLO, frame(5), frame(6, 1000)[:700])) as path:
        live = LiveSession(Connection(path))
        until(lambda: (live.wait(0.05), not live.live)[1], "the end is seen")
        assert live.problems == ("the agent has gone",)
        assert len(live.read("softirq.slow", 0, FOREVER)) == 1
        assert not live.refresh()
        live.close()


def test_a_message_larger_than_any_is_refused_before_it_is_kept() -> None:
    def talk(sock: socket.socket) -> None:
        sock.sendall(HELLO)
        sock.sendall(b"\x82\xa1m\xa5frame\xa1d" + b"\xc6" + (1 << 30).to_bytes(4, "big"))
        for _ in range(100):
            sock.sendall(b"\0" * (1 << 20))

    with fake(talk) as path:
        live = LiveSession(Connection(path))
        until(lambda: (live.wait(0.05), not live.live)[1], "the end is seen")
        assert "no message" in live.problems[0]
        live.close()


# -- what a live session holds -----------------------------------------------------------------


def held(*data: bytes, limit: int = 1 << 20, span: int = 10**10) -> LiveSession:
    """A session that has taken ``data``."""
    hello = pack("hello", protocol=1, span=span, limit=limit, streams=DECLARED)
    with fake(says(hello, *data, pack("live"))) as path:
        live = LiveSession(Connection(path))
        until(lambda: (live.wait(0.05), live.caught_up)[1], "all has come")
        return live


def test_oldest_goes_first_whatever_its_stream() -> None:
    def load(t: int) -> bytes:
        f = frames.make(CPU_LOAD, t, CPU_LOAD.rows(t=t))
        return wire.frame(f)

    data = [d for t in range(1, 400) for d in (frame(t, seq=t), load(t))]
    live = held(*data, limit=100_000)
    slow = live.read("softirq.slow", 0, FOREVER)["t"]
    loads = live.read("cpu.load", 0, FOREVER)["t"]
    assert slow[-1] == loads[-1] == 399
    assert 50 < len(slow) < 300
    assert abs(int(slow[0]) - int(loads[0])) <= 1
    assert live.span()[0] >= int(loads[0]) - 1
    live.close()


def test_age_bounds_it_and_meaning_stays() -> None:
    row = META_COVERAGE.rows(t=1, probe=["cpu"], program=[""], status=0, reason=[""])
    facts = wire.frame(frames.make(META_COVERAGE, 0, row))
    live = held(
        facts, frame(10), frame(10**9, seq=1), frame(2 * 10**9 + 50, seq=2), span=10**9 + 60
    )
    assert live.read("softirq.slow", 0, FOREVER)["t"].tolist() == [10**9, 2 * 10**9 + 50]
    assert len(live.read("meta.coverage", 0, FOREVER)) == 1
    assert 10 <= live.span()[0] <= 10**9
    assert live.span()[1] == 2 * 10**9 + 50
    live.close()


def test_stop_and_mark_after_the_agent_has_gone_say_nothing() -> None:
    with fake(says(HELLO)) as path:
        live = LiveSession(Connection(path))
        until(lambda: (live.wait(0.05), not live.live)[1], "the end is seen")
        live.mark("x")
        live.stop_agent()
        live.close()
        assert live.problems == ("the agent has gone",)


def test_descriptors_are_given_back() -> None:
    def count() -> int:
        return len(os.listdir("/proc/self/fd"))

    before = count()
    for data in (b"", b"\xff", pack("hello", protocol=2), pack("bye", why="no"), pack("hello")):
        with fake(says(data)) as path, contextlib.suppress(Refused):
            Connection(path).close()
    with contextlib.suppress(Refused):
        Connection("/nonexistent/socket")
    assert count() == before
