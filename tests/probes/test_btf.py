"""Where members lie: against libbpf on this kernel, by hand on blobs made here, and on garbage."""

from __future__ import annotations

import ctypes
import struct
from ctypes.util import find_library

import pytest
from hypothesis import given, settings
from hypothesis import strategies as some

from dsprobe.probes.btf import VMLINUX, Btf, BtfError, Member

INT, PTR, STRUCT, UNION, TYPEDEF, CONST, FUNC_PROTO = 1, 2, 4, 5, 8, 10, 13


class Blob:
    """Makes BTF as Documentation/bpf/btf.rst describes it."""

    def __init__(self) -> None:
        self._types, self._strings, self._n = b"", b"\0", 0

    def _text(self, text: str) -> int:
        if not text:
            return 0
        at = len(self._strings)
        self._strings += text.encode() + b"\0"
        return at

    def add(
        self, kind: int, name: str, size: int, tail: bytes = b"", n: int = 0, flag: int = 0
    ) -> int:
        info = flag << 31 | kind << 24 | n
        self._types += struct.pack("<III", self._text(name), info, size) + tail
        self._n += 1
        return self._n

    def number(self, name: str, size: int) -> int:
        return self.add(INT, name, size, struct.pack("<I", size * 8))

    def structure(self, name: str, *members: tuple[str, int, int], kind: int = STRUCT) -> int:
        """Members as (name, type, offset in bits)."""
        tail = b"".join(struct.pack("<III", self._text(m), t, off) for m, t, off in members)
        bitfields = any(off >> 24 for *_, off in members)  # then bit 31 says so
        return self.add(kind, name, 64, tail, len(members) | bitfields << 31)

    def __bytes__(self) -> bytes:
        n = len(self._types)
        head = struct.pack("<HBBIIIII", 0xEB9F, 1, 0, 24, 0, n, n, len(self._strings))
        return head + self._types + self._strings


def sample() -> bytes:
    b = Blob()
    u32 = b.number("u32", 4)
    inner = b.structure("", ("a", u32, 0), ("b", u32, 32))
    either = b.structure("", ("", inner, 0), ("whole", u32, 0), kind=UNION)
    named = b.structure("named", ("x", u32, 64), ("deep", either, 128))
    alias = b.add(TYPEDEF, "alias_t", named)
    fixed = b.add(CONST, "", alias)
    b.structure("outer", ("first", u32, 0), ("", either, 32), ("tail", fixed, 256))
    b.structure("bits", ("low", u32, 3 << 24), ("high", u32, 5 << 24 | 3), ("n", u32, 32))
    proto = b.add(FUNC_PROTO, "", 0, struct.pack("<II", 0, u32) * 4, 4)
    b.add(TYPEDEF, "btf_trace_thing", b.add(PTR, "", proto))
    b.add(TYPEDEF, "outer", u32)  # a typedef may bear the name of a structure
    return bytes(b)


def test_members_by_hand() -> None:
    btf = Btf(sample())
    assert btf.offset("outer", "first") == 0
    assert btf.offset("outer", "a") == 4  # through two that have no name
    assert btf.offset("outer", "b") == 8
    assert btf.offset("outer", "whole") == 4
    assert btf.offset("outer", "tail.x") == 32 + 8  # through const and typedef
    assert btf.offset("outer", "tail.deep.b") == 32 + 16 + 4
    assert btf.member("bits", "low") == Member(0, 0, 3)
    assert btf.member("bits", "high") == Member(0, 3, 5)
    assert btf.member("bits", "high").mask == 31
    assert btf.member("bits", "n") == Member(4, 0, 0)
    assert btf.tracepoint_args("thing") == 3


@pytest.mark.parametrize("path", ["nothing", "first.x", "tail.deep.c", "", "a."])
def test_members_that_are_not_there(path: str) -> None:
    with pytest.raises(BtfError, match="has no"):
        Btf(sample()).member("outer", path)


def test_structures_and_tracepoints_that_are_not_there() -> None:
    with pytest.raises(BtfError, match="this kernel has no gone"):
        Btf(sample()).member("gone", "x")
    with pytest.raises(BtfError, match="no tracepoint gone"):
        Btf(sample()).tracepoint_args("gone")


def test_circles_end() -> None:
    b = Blob()
    b.add(CONST, "", 2)
    b.add(CONST, "", 1)
    b.structure("holds", ("", 1, 0))
    b.structure("self", ("", 4, 0))
    for name in ("holds", "self"):
        with pytest.raises(BtfError, match="unreadable"):
            Btf(bytes(b)).member(name, "x")


@settings(max_examples=400, deadline=None)
@given(
    some.lists(some.tuples(some.integers(0, len(sample()) - 1), some.integers(0, 255)), max_size=8),
    some.integers(0, len(sample())),
)
def test_garbage_is_an_error_that_says_so(flips: list[tuple[int, int]], cut: int) -> None:
    blob = bytearray(sample())
    for at, value in flips:
        blob[at] = value
    for data in (bytes(blob), bytes(blob[:cut])):
        try:
            btf = Btf(data)
        except BtfError:
            continue
        for name, path in (("outer", "tail.deep.b"), ("outer", "a"), ("bits", "high")):
            try:
                assert btf.member(name, path).offset >= 0
            except BtfError:
                pass
        try:
            assert btf.tracepoint_args("thing") < 1 << 16
        except BtfError:
            pass


needs_btf = pytest.mark.skipif(not VMLINUX.exists(), reason="this kernel has no BTF")


class Libbpf:
    """The same questions put to libbpf (bpf/btf.h)."""

    def __init__(self) -> None:
        name = find_library("bpf") or "libbpf.so.1"
        self._lib = ctypes.CDLL(name)
        for f in ("btf__load_vmlinux_btf", "btf__type_by_id", "btf__name_by_offset"):
            getattr(self._lib, f).restype = ctypes.c_void_p
        self._btf = ctypes.c_void_p(self._lib.btf__load_vmlinux_btf())

    def _type(self, type_id: int) -> tuple[int, int, int, int]:
        at = self._lib.btf__type_by_id(self._btf, type_id)
        _, info, _ = struct.unpack("<III", ctypes.string_at(at, 12))
        return at, info >> 24 & 31, info & 0xFFFF, info >> 31

    def offset(self, name: str, member: str) -> int:
        """Byte offset of a direct member."""
        type_id = self._lib.btf__find_by_name_kind(self._btf, name.encode(), STRUCT)
        assert type_id > 0
        at, _, n, flag = self._type(type_id)
        for text, _, bit in struct.iter_unpack("<III", ctypes.string_at(at + 12, 12 * n)):
            p = self._lib.btf__name_by_offset(self._btf, text)
            if ctypes.string_at(p) == member.encode():
                return int(bit & 0xFFFFFF if flag else bit) // 8
        raise KeyError(member)


@needs_btf
@pytest.mark.parametrize(
    ("name", "member"),
    [("sk_buff", "cb"), ("net_device", "ifindex"), ("net_device", "name"), ("napi_struct", "dev"),
     ("rq", "nr_running"), ("cfs_rq", "rq"), ("sock_common", "skc_family"), ("net", "ns"),
     ("task_struct", "comm"), ("sock_common", "skc_v6_daddr"), ("task_struct", "se")],
)  # fmt: skip
def test_this_kernel_as_libbpf_sees_it(name: str, member: str) -> None:
    assert Btf.running().offset(name, member) == Libbpf().offset(name, member)


@needs_btf
def test_facts_that_hold_on_every_kernel() -> None:
    btf = Btf.running()
    # include/net/sock.h keeps these first, as asserted there for the sake of look-ups.
    assert btf.offset("sock_common", "skc_daddr") == 0
    assert btf.offset("sock_common", "skc_rcv_saddr") == 4
    # TP_PROTO of irq.h and napi.h
    assert btf.tracepoint_args("softirq_entry") == 1
    assert btf.tracepoint_args("napi_poll") == 3
    assert btf.tracepoint_args("tcp_retransmit_synack") == 2
