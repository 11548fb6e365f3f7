"""All benchmarks, in the order of the table."""

from __future__ import annotations

from benchlib import intake, throughput
from benchlib.model import Bench

BENCHES = (
    Bench("intake", "from a BPF ring to a frame, the same events by bcc's callback", intake.intake),
    Bench("udp", "64-byte UDP datagrams over a veth pair, share of the rate kept", throughput.udp),
    Bench("tcp", "TCP throughput over a veth pair, share of the rate kept", throughput.tcp),
)
