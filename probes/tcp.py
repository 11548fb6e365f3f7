"""TCP retransmissions, one row per call, with addresses, kind and cause.

Source: tcp:tcp_retransmit_skb and tcp:tcp_retransmit_synack (include/trace/events/tcp.h).  The
tracepoints count calls, the kernel's RetransSegs counts segments: a row holds both, as itself and
as ``segments``.  The cause is the congestion state (enum tcp_ca_state in include/uapi/linux/tcp.h):
Loss means the retransmission timer, Recovery a fast retransmit, anything else a loss probe.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

from dsprobe.probes.btf import Btf
from dsprobe.probes.probe import Batch, BpfProbe, Program, need_btf
from dsprobe.recordings.streams import TCP_RETRANSMIT


class Tcp(BpfProbe):
    name = "tcp"
    doc = "TCP retransmissions with addresses, kind (data, SYN, SYN-ACK) and cause"
    streams = (TCP_RETRANSMIT,)
    source = "tcp.bpf.c"
    programs = (
        Program("tcp_retransmit_skb", "raw_tracepoint", "tcp_retransmit_skb"),
        Program("tcp_retransmit_synack", "raw_tracepoint", "tcp_retransmit_synack",
                required=False, otherwise="SYN-ACKs sent again are not seen"),
    )  # fmt: skip
    rings: ClassVar = {"tcp_retransmit": TCP_RETRANSMIT}

    def defines(self, btf: Btf | None) -> Mapping[str, int]:
        btf = need_btf(btf)
        ca = btf.member("inet_connection_sock", "icsk_ca_state")
        d = {
            "SOCK_FAMILY": btf.offset("sock_common", "skc_family"),
            "SOCK_STATE": btf.offset("sock_common", "skc_state"),
            "SOCK_NUM": btf.offset("sock_common", "skc_num"),
            "SOCK_DPORT": btf.offset("sock_common", "skc_dport"),
            "SOCK_SADDR": btf.offset("sock_common", "skc_rcv_saddr"),
            "SOCK_DADDR": btf.offset("sock_common", "skc_daddr"),
            "SOCK_SADDR6": btf.offset("sock_common", "skc_v6_rcv_saddr"),
            "SOCK_DADDR6": btf.offset("sock_common", "skc_v6_daddr"),
            "SOCK_NET": btf.offset("sock_common", "skc_net.net"),
            "NET_INUM": btf.offset("net", "ns.inum"),
            "SKB_CB": btf.offset("sk_buff", "cb"),
            "TCP_CB_GSO_SEGS": btf.offset("tcp_skb_cb", "tcp_gso_segs"),
            "ICSK_CA_STATE": ca.offset,
            "ICSK_CA_SHIFT": ca.shift,
            "ICSK_CA_MASK": ca.mask & 0xFF,
        }
        if btf.tracepoint_args("tcp_retransmit_skb") >= 3:
            d["TCP_RETRANSMIT_ERR"] = 1
        return d

    def collect(self, now: int) -> list[Batch]:
        return []  # the ring says it all
