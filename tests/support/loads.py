"""Traffic over a pair of namespaces: UDP floods and TCP streams, all bounded in time."""

from __future__ import annotations

import json
import socket
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from tests.support.native import program
from tests.support.netns import Namespace, Pair
from tests.support.wait import until

SMALLEST = 18
"""UDP payload (bytes) of a 64-byte Ethernet frame: 64 - 14 - 20 - 8 - 4 of checksum."""


@dataclass(frozen=True)
class Flood:
    """What a flood did: datagrams ``sent`` in ``seconds``."""

    sent: int
    seconds: float

    @property
    def rate(self) -> float:
        return self.sent / self.seconds


@contextmanager
def udp_sink(ns: Namespace, port: int = 9) -> Iterator[socket.socket]:
    """A UDP port nobody reads: datagrams are taken in until its small buffer is full."""

    def bound() -> socket.socket:
        s = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
        s.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        s.bind((ns.ipv4, port))
        return s

    sock = ns.call(bound)
    try:
        yield sock
    finally:
        sock.close()


def udp_socket(ns: Namespace, to: tuple[str, int]) -> socket.socket:
    """A UDP socket of ``ns``, connected to ``to`` (IPv4)."""

    def connected() -> socket.socket:
        s = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
        s.connect(to)
        return s

    return ns.call(connected)


def udp_flood(
    pair: Pair, seconds: float, *, cpu: int = -1, per_second: float = 0, payload: int = SMALLEST
) -> Flood:
    """Datagrams from left to right as fast as CPU ``cpu`` can send them (-1: any CPU).

    veth hands each to the receiving stack on the CPU that sent it, in a NET_RX softirq of its own:
    the rate is what that CPU manages of system call, softirq and whoever watches it.
    """
    with udp_sink(pair.right):
        words = [pair.right.ipv4, "9", seconds, payload, cpu, per_second]
        out = pair.left.run(str(program("flood")), *map(str, words), timeout=seconds + 30)
    sent, took = out.split()
    return Flood(int(sent), float(took))


@contextmanager
def iperf_server(ns: Namespace, port: int = 5201, cpu: int = -1) -> Iterator[int]:
    """iperf3 listening in ``ns`` (IPv6 socket, takes IPv4 too); its port."""
    pin = ("-A", str(cpu)) if cpu >= 0 else ()
    server = ns.popen("iperf3", "-s", "-p", str(port), *pin, stdout=subprocess.DEVNULL)
    try:
        listening = f":{port:04X} 00000000000000000000000000000000:0000 0A"
        until(lambda: listening in ns.proc("tcp6"), f"iperf3 listens on {port}")
        yield port
    finally:
        server.kill()
        server.wait()
        if server.stderr:
            server.stderr.close()


def iperf(
    client: Namespace, address: str, seconds: float, *options: str, port: int = 5201
) -> dict[str, Any]:
    """The JSON report of one iperf3 run against a server that listens (see iperf3(1), -J)."""
    out = client.run(
        "iperf3", "-c", address, "-p", str(port), "-t", f"{seconds:g}", "-J", *options,
        timeout=seconds + 60, check=False,
    )  # fmt: skip
    report: dict[str, Any] = json.loads(out)
    if "error" in report:
        raise RuntimeError(f"iperf3: {report['error']}")
    return report


def tcp_throughput(pair: Pair, seconds: float, cpus: tuple[int, int] = (-1, -1)) -> float:
    """Bits per second from left to right over one IPv4 connection.

    ``cpus`` are the CPUs of client and server (-1: any).
    """
    pin = ("-A", str(cpus[0])) if cpus[0] >= 0 else ()
    with iperf_server(pair.right, cpu=cpus[1]):
        report = iperf(pair.left, pair.right.ipv4, seconds, *pin)
    return float(report["end"]["sum_received"]["bits_per_second"])
