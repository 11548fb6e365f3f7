"""Network namespaces made here: with a process inside, with a name only, gone meanwhile."""

from __future__ import annotations

import os
import socket
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from dsprobe.probes import netns
from dsprobe.probes.netdev import Netdev
from dsprobe.probes.netns import RESCAN_NS, Namespace, discover, read
from dsprobe.probes.sockets import Sockets
from dsprobe.recordings.streams import META_NETNS, NET_DEVICE, TCP_SOCKETS
from tests.support import loads
from tests.support import netns as made

pytestmark = [pytest.mark.netns, pytest.mark.tools("ip", "nsenter")]

HOST = os.stat("/proc/self/ns/net").st_ino


@pytest.fixture(scope="module")
def pair() -> Iterator[made.Pair]:
    with made.pair() as p:
        yield p


@contextmanager
def living_in(ns: made.Namespace) -> Iterator[int]:
    """A process that lives in ``ns``; its PID."""
    process = ns.popen("sh", "-c", "echo in; exec cat", stdin=subprocess.PIPE)
    assert process.stdout
    assert process.stdout.readline() == "in\n"
    try:
        yield process.pid
    finally:
        process.kill()
        process.communicate()


def test_the_host_is_called_host() -> None:
    found = discover()
    assert found[HOST].name == "host"
    texts = read(found[HOST], "dev", "snmp")
    assert texts is not None
    assert " lo:" in texts[0]
    assert texts[1].startswith("Ip:")


def test_a_name_alone_is_enough(pair: made.Pair) -> None:
    """Read by entering; nothing of ours is left inside and this process has not moved."""
    ns = discover()[pair.left.inode]
    assert (ns.name, ns.pids, ns.path) == (pair.left.name, (), f"/run/netns/{pair.left.name}")
    texts = read(ns, "dev")
    assert texts is not None
    assert "veth0" in texts[0]
    assert os.stat("/proc/thread-self/ns/net").st_ino == HOST
    inside = subprocess.run(["ip", "netns", "pids", pair.left.name], capture_output=True, text=True)
    assert not inside.stdout.strip()


def test_a_process_inside_is_read_through(pair: made.Pair) -> None:
    with living_in(pair.right) as pid:
        ns = discover()[pair.right.inode]
        assert ns.pids == (pid,)
        assert ns.name == pair.right.name
        texts = read(Namespace(ns.inode, ns.name, ns.pids, ""), "dev")
        assert texts is not None
        assert "veth0" in texts[0]


def test_one_without_a_name_is_called_by_its_process() -> None:
    process = subprocess.Popen(
        ["unshare", "-n", "sh", "-c", "echo in; exec cat"],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
    )  # fmt: skip
    assert process.stdout
    process.stdout.readline()
    inode = os.stat(f"/proc/{process.pid}/ns/net").st_ino
    ns = discover()[inode]
    assert ns.name in (f"cat/{process.pid}", f"sh/{process.pid}")
    assert read(ns, "dev") is not None
    process.kill()
    process.communicate()
    assert read(ns, "dev") is None
    assert inode not in discover()


def test_removed_meanwhile(pair: made.Pair) -> None:
    name = f"dsp-t-{os.getpid()}-gone"
    subprocess.run(["ip", "netns", "add", name], check=True)
    inode = Path("/run/netns", name).stat().st_ino
    ns = discover()[inode]
    assert read(ns, "dev") is not None
    subprocess.run(["ip", "netns", "delete", name], check=True)
    assert read(ns, "dev") is None
    assert inode not in discover()


def test_a_pid_used_again_does_not_pass_off_other_numbers(pair: made.Pair) -> None:
    """The process we knew is gone and its number belongs to somebody in another namespace."""
    with living_in(pair.left) as pid:
        other = Namespace(pair.right.inode, "right", (pid,), "")
        assert read(other, "dev") is None
        through_name = Namespace(pair.right.inode, "right", (pid,), f"/run/netns/{pair.right.name}")
        assert read(through_name, "dev") is not None


def test_a_name_used_again_does_not_either(pair: made.Pair) -> None:
    stale = Namespace(pair.left.inode, "left", (), f"/run/netns/{pair.right.name}")
    assert read(stale, "dev") is None


def test_a_plain_file_among_the_names_is_none(tmp_path: Path) -> None:
    (tmp_path / "left-behind").touch()
    (tmp_path / "dangling").symlink_to("nowhere")
    assert all(not ns.path for ns in discover(named=tmp_path).values())


def test_processes_that_cannot_be_looked_into_are_left_out(tmp_path: Path) -> None:
    """hidepid, or a container without the right to look: what can be seen is shown."""
    for pid in ("1", "77"):
        (tmp_path / pid / "ns").mkdir(parents=True)
    (tmp_path / "77" / "ns" / "net").symlink_to("not what it should be")
    (tmp_path / "self" / "ns").mkdir(parents=True)
    (tmp_path / "self" / "ns" / "net").symlink_to("/proc/self/ns/net")
    assert discover(proc=tmp_path, named=tmp_path / "none") == {}


def test_text_is_bounded_and_ends_with_a_whole_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(netns, "MAX_FILE", 100)
    path = tmp_path / "dev"
    path.write_bytes(b"x" * 29 + b"\n" + b"y" * 29 + b"\n" + b"z" * 200)
    assert netns._text(str(path)) == "x" * 29 + "\n" + "y" * 29 + "\n"


HOSTILE = ("esc\x1b[2J", "gs\x1dx", "nel\u0085x", "ls\u2028x", "a;$(id)", "-rf")


def test_interfaces_with_hostile_names(pair: made.Pair) -> None:
    """Anybody can make a namespace and such interfaces in it; the others must still be seen."""
    names = [n.encode() for n in HOSTILE] + [b"bad\xff\xfe", b"bad\xfe\xff"]
    for i, name in enumerate(names):
        command = [b"ip", b"link", b"add", b"name", name, b"type", b"veth"]
        peer = [b"peer", b"name", b"peer%d" % i]
        subprocess.run([*pair.left.argv(), *command, *peer], check=True)
    netdev = Netdev()
    netdev.start()
    for name in names:
        subprocess.run([*pair.left.argv(), b"ip", b"link", b"set", b"dev", name, b"up"], check=True)
    with loads.udp_socket(pair.left, (pair.right.ipv4, 9)) as sock:
        sock.send(b"x")
    rows = dict(netdev.collect(1))[NET_DEVICE]
    mine = rows[rows["netns"] == pair.left.inode]
    assert b"veth0" in mine["device"]
    found = netdev._read_devices()
    assert {(pair.left.inode, n) for n in names} <= found.keys()
    for name in names:
        subprocess.run([*pair.left.argv(), b"ip", b"link", b"del", b"dev", name], check=True)


def test_sockets_by_namespace_and_its_name(pair: made.Pair) -> None:
    """Only namespaces that have sockets or traffic; each new name is told once."""
    sockets = Sockets()
    sockets.start()
    batches = dict(sockets.collect(time.monotonic_ns()))
    names = {int(r["id"]): r["name"] for r in batches[META_NETNS]}
    assert names[HOST] == "host"
    assert names[pair.left.inode] == pair.left.name

    def listen() -> socket.socket:
        s = socket.socket()
        s.bind((pair.right.ipv4, 0))
        s.listen(5)
        return s

    server = pair.right.call(listen)
    client = pair.left.call(lambda: socket.create_connection(server.getsockname(), 5))
    client.sendall(b"x")
    batches = dict(sockets.collect(time.monotonic_ns()))
    assert META_NETNS not in batches
    rows = {int(r["netns"]): r for r in batches[TCP_SOCKETS]}
    left, right = rows[pair.left.inode], rows[pair.right.inode]
    assert (left["inuse"], left["established"]) == (1, 1)
    assert (right["inuse"], right["established"]) == (2, 1)
    assert left["out_segs"] >= 3  # SYN, ACK, data
    assert right["in_segs"] >= 3
    assert left["retrans_segs"] == 0
    client.close()
    server.close()


def test_a_namespace_that_goes_and_one_that_comes(pair: made.Pair) -> None:
    name = f"dsp-t-{os.getpid()}-new"
    sockets = Sockets()
    sockets.start()
    now = 10 * RESCAN_NS
    sockets.collect(now)
    subprocess.run(["ip", "netns", "add", name], check=True)
    inode = Path("/run/netns", name).stat().st_ino
    assert META_NETNS not in dict(sockets.collect(now + RESCAN_NS - 1))
    told = dict(sockets.collect(now + RESCAN_NS))[META_NETNS]
    assert told[["id", "name"]].tolist() == [(inode, name)]
    subprocess.run(["ip", "netns", "delete", name], check=True)
    rows = dict(sockets.collect(now + RESCAN_NS + 1))[TCP_SOCKETS]
    assert inode not in rows["netns"]  # its numbers cannot be read any more, the others' can
    assert META_NETNS not in dict(sockets.collect(now + 3 * RESCAN_NS))
