"""What the compiling process hands over, and what it makes of logs."""

from __future__ import annotations

import json
import os
import socket
import threading
from collections.abc import Callable

import pytest

from dsprobe.probes import compiler
from dsprobe.probes.compiler import receive_result


def exchange(send: Callable[[socket.socket], None]) -> dict[str, object]:
    """What is received of what ``send`` sends; the other side then hangs up."""
    ours, theirs = socket.socketpair()
    ours.settimeout(10)

    def run() -> None:
        with theirs:
            send(theirs)

    thread = threading.Thread(target=run)
    thread.start()
    try:
        return receive_result(ours)
    finally:
        thread.join()
        ours.close()


def answer(n: int) -> bytes:
    maps = {f"m{i}": {"fd": i, "key_size": 4} for i in range(n)}
    return json.dumps({"errors": {}, "programs": {}, "maps": maps}).encode() + b"\n"


@pytest.mark.parametrize("n", [0, 1, 100, 101, 250])
def test_descriptors_arrive_in_place(n: int) -> None:
    made = [os.memfd_create(f"number {i}") for i in range(n)]
    batch = compiler._FDS_PER_MESSAGE

    def send(sock: socket.socket) -> None:
        for i in range(0, n, batch):
            socket.send_fds(sock, [b"+"], made[i : i + batch])
        for part in (answer(n)[:10], answer(n)[10:]):
            sock.sendall(part)

    result = exchange(send)
    for name, entry in result["maps"].items():  # type: ignore[attr-defined]
        target = os.readlink(f"/proc/self/fd/{entry['fd']}")
        assert target == f"/memfd:number {name[1:]} (deleted)"
        assert not os.get_inheritable(entry["fd"])
        os.close(entry["fd"])
    for fd in made:
        os.close(fd)


@pytest.mark.parametrize("rest", [b"", b"{", b"[]\n", b"nonsense\n", answer(4)])
def test_descriptors_without_an_answer_are_closed(rest: bytes) -> None:
    before = len(os.listdir("/proc/self/fd"))
    fd = os.memfd_create("x")

    def send(sock: socket.socket) -> None:
        socket.send_fds(sock, [b"+"], [fd, fd, fd])
        sock.sendall(rest)

    with pytest.raises((EOFError, ValueError, LookupError, TypeError)):
        exchange(send)
    os.close(fd)
    assert len(os.listdir("/proc/self/fd")) == before


CLANG = """\
/virtual/main.c:12:9: warning: unused variable 'x' [-Wunused-variable]
/virtual/main.c:40:12: error: use of undeclared identifier 'skc_family'
        return skc_family;
               ^
/virtual/main.c:44:1: error: another one
2 errors generated.
"""
VERIFIER = """\
bpf: Failed to load program: Permission denied
0: R1=ctx() R10=fp0
0: (b7) r1 = 1
7: (79) r0 = *(u64 *)(r0 +0)
R0 invalid mem access 'map_value_or_null'
processed 8 insns (limit 1000000) max_states_per_insn 0 total_states 0 peak_states 0
"""


@pytest.mark.parametrize(
    ("log", "reason"),
    [
        (CLANG, "use of undeclared identifier 'skc_family'"),
        (VERIFIER, "R0 invalid mem access 'map_value_or_null'"),
        ("", "no reason given"),
        ("\n\n", "no reason given"),
        ("just this", "just this"),
        ("processed 8 insns", "no reason given"),
    ],
    ids=["clang", "verifier", "nothing", "blank", "one line", "only figures"],
)
def test_the_line_that_tells_the_most(log: str, reason: str) -> None:
    assert compiler._reason(log) == reason


def test_reasons_are_short() -> None:
    assert len(compiler._reason("error: " + "x" * 10_000)) <= 300
