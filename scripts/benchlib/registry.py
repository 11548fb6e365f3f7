"""All benchmarks, in the order of the table."""

from __future__ import annotations

from benchlib import cost, cudatargets, discovery, files, hits, intake, refresh, screen, throughput
from benchlib.model import Bench

BENCHES = (
    Bench("intake", "from a BPF ring to a frame, the same events by bcc's callback", intake.intake),
    Bench("hits", "what a probe costs by where it sits, on the genuine driver library", hits.hits),
    Bench("launches", "what tracing costs a thread that only launches", cudatargets.launches),
    Bench("attaching", "how soon a running server is traced", cudatargets.attaching),
    Bench("discovery", "how processes using CUDA are found, 2,000 running", discovery.discovery),
    Bench("udp", "64-byte UDP datagrams over a veth pair, share of the rate kept", throughput.udp),
    Bench("tcp", "TCP throughput over a veth pair, share of the rate kept", throughput.tcp),
    Bench("agent", "CPU and memory of the agent with all host probes", cost.cost),
    Bench("screen", "the live screen in a terminal, all lanes moving", screen.screen),
    Bench("refresh", "one refresh of each screen, many processes using CUDA", refresh.refresh),
    Bench("files", "size of recordings, and time to open, seek and draw them", files.files),
)
