"""Packets that get lost, and connections that fall into a hole.

Packets are dropped where they arrive (netdev ingress): a drop where they leave would be told to
the sending TCP as an error, which is not what loss on a wire looks like.  The kernel drops whole
packets as they cross the veth, so with segmentation offload one drop loses many segments.
"""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager

from tests.support.netns import Namespace

_TABLE = "dsprobe_test"

Dropping = AbstractContextManager[Callable[[], int]]


@contextmanager
def drop(ns: Namespace, match: str) -> Iterator[Callable[[], int]]:
    """Drop what arrives at ``ns`` and fits the nft expression ``match``.

    Gives a function that tells how many packets have been dropped so far.
    """
    chain = f'type filter hook ingress device "{ns.device}" priority 0; policy accept;'
    rules = f"table netdev {_TABLE} {{ chain in {{ {chain} {match} counter drop\n}}\n}}\n"
    _nft(ns, "add", rules)
    try:
        yield lambda: _dropped(ns)
    finally:
        _nft(ns, "delete", f"table netdev {_TABLE}")


def loss(ns: Namespace, percent: float, match: str = "") -> Dropping:
    """Lose ``percent`` % of the packets that arrive at ``ns`` (and fit ``match``), at random."""
    return drop(ns, f"{match} numgen random mod 10000 < {round(percent * 100)}")


def black_hole(ns: Namespace, port: int) -> Dropping:
    """Whoever connects to TCP ``port`` of ``ns`` never hears an answer, over IPv4 and IPv6."""
    return drop(ns, f"tcp dport {port}")


def lose_syn_acks(ns: Namespace) -> Dropping:
    """``ns`` sends SYN and never sees the answer to it."""
    return drop(ns, "tcp flags & (syn | ack) == (syn | ack)")


def _nft(ns: Namespace, verb: str, rules: str) -> None:
    text = rules if verb == "add" else f"{verb} {rules}"
    done = subprocess.run(
        ns.argv("nft", "-f", "-"), input=text, capture_output=True, text=True, timeout=20
    )
    if done.returncode:
        raise RuntimeError(f"nft: {done.stderr.strip()}")


def _dropped(ns: Namespace) -> int:
    listing = json.loads(ns.run("nft", "-j", "list", "table", "netdev", _TABLE))
    for entry in listing["nftables"]:
        for expression in entry.get("rule", {}).get("expr", ()):
            if "counter" in expression:
                return int(expression["counter"]["packets"])
    raise RuntimeError("the rule has no counter")
