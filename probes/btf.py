"""Where members lie in the running kernel's structures, from its own type information.

Source: /sys/kernel/btf/vmlinux (Documentation/bpf/btf.rst), present since Linux 5.4 where
CONFIG_DEBUG_INFO_BTF is set.  Members of anonymous structures and unions are found by name alone.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

VMLINUX = Path("/sys/kernel/btf/vmlinux")

_STRUCT, _UNION, _FWD, _TYPEDEF, _FUNC_PROTO, _PTR = 4, 5, 7, 8, 13, 2
_MODIFIERS = {_TYPEDEF, 9, 10, 11, 18}  # typedef, volatile, const, restrict, type tag
_MAX_CHAIN = 64  # of typedefs and qualifiers
_BROKEN = (struct.error, IndexError, ValueError, RecursionError)
_HEADER = struct.Struct("<HBBIIIII")
_TYPE = struct.Struct("<III")
# Bytes that follow a type record, by kind: (fixed, per vlen).
_TAIL = {1: (4, 0), 3: (12, 0), 4: (0, 12), 5: (0, 12), 6: (0, 8), 13: (0, 8), 14: (4, 0),
         15: (0, 12), 17: (4, 0), 19: (0, 12)}  # fmt: skip


class BtfError(LookupError):
    """No type information, or no such member in this kernel."""


@dataclass(frozen=True)
class Member:
    """Position of a member: byte offset, and for a bitfield its shift and width in bits."""

    offset: int
    shift: int
    bits: int

    @property
    def mask(self) -> int:
        return (1 << self.bits) - 1 if self.bits else -1


class Btf:
    """One parsed BTF blob; parsing ~100,000 types takes about 0.1 s."""

    def __init__(self, blob: bytes) -> None:
        try:
            magic, _, _, header, type_off, type_len, str_off, _ = _HEADER.unpack_from(blob)
        except struct.error as e:
            raise BtfError(f"unreadable BTF: {e}") from None
        if magic != 0xEB9F:
            raise BtfError("not BTF")
        self._types_at, self._types_end = header + type_off, header + type_off + type_len
        self._blob = blob
        self._strings_at = header + str_off

    @classmethod
    def running(cls) -> Btf:
        try:
            return cls(VMLINUX.read_bytes())
        except OSError as e:
            raise BtfError(f"{VMLINUX}: {e.strerror}") from None

    @cached_property
    def _index(self) -> tuple[list[int], dict[bytes, list[int]]]:
        """Position of each type by id, and ids of structures and typedefs by name."""
        blob, pos, end = self._blob, self._types_at, self._types_end
        where, names = [0], {}  # type: ignore[var-annotated]
        strings, unpack = self._strings_at, _TYPE.unpack_from
        while pos < end:
            name, info, _ = unpack(blob, pos)
            kind, vlen = info >> 24 & 31, info & 0xFFFF
            if name and kind in (_STRUCT, _TYPEDEF):
                at = strings + name
                names.setdefault(blob[at : blob.index(0, at)], []).append(len(where))
            where.append(pos)
            fixed, each = _TAIL.get(kind, (0, 0))
            pos += 12 + fixed + each * vlen
        return where, names

    def _named(self, name: str, kind: int) -> int:
        for type_id in self._index[1].get(name.encode(), []):
            if self._type(type_id)[1] == kind:
                return type_id
        raise BtfError(f"this kernel has no {name}")

    def _type(self, type_id: int) -> tuple[int, int, int, bool, int]:
        """(position, kind, vlen, kind flag, size or referred type), modifiers skipped."""
        for _ in range(_MAX_CHAIN):
            pos = self._index[0][type_id]
            _, info, ref = _TYPE.unpack_from(self._blob, pos)
            kind = info >> 24 & 31
            if kind not in _MODIFIERS or (kind == _TYPEDEF and ref == 0):
                return pos, kind, info & 0xFFFF, bool(info >> 31), ref
            type_id = ref
        raise BtfError("unreadable BTF: a type that goes round in circles")

    def _text(self, offset: int) -> bytes:
        at = self._strings_at + offset
        return self._blob[at : self._blob.index(0, at)]

    def _find(self, type_id: int, name: bytes) -> tuple[int, int, int] | None:
        """(bit offset, bitfield width, type id) of ``name`` in a structure or union."""
        pos, kind, vlen, flag, _ = self._type(type_id)
        if kind not in (_STRUCT, _UNION):
            return None
        for i in range(vlen):
            member, mtype, off = _TYPE.unpack_from(self._blob, pos + 12 + 12 * i)
            bit, width = (off & 0xFFFFFF, off >> 24) if flag else (off, 0)
            if member:
                if self._text(member) == name:
                    return bit, width, mtype
            elif inner := self._find(mtype, name):
                return bit + inner[0], inner[1], inner[2]
        return None

    def member(self, struct_name: str, path: str) -> Member:
        """Position of a dotted member path such as ``member("sock", "__sk_common.skc_net.net")``.

        Raises :class:`BtfError` when this kernel has no such structure or member.
        """
        try:
            type_id, bits, width = self._named(struct_name, _STRUCT), 0, 0
            for part in path.split("."):
                found = self._find(type_id, part.encode())
                if found is None:
                    raise BtfError(f"struct {struct_name} has no {path} in this kernel")
                bits, width, type_id = bits + found[0], found[1], found[2]
        except _BROKEN as e:
            raise BtfError(f"unreadable BTF: {e}") from None
        return Member(bits // 8, bits % 8, width)

    def offset(self, struct_name: str, path: str) -> int:
        """Byte offset of a member that is not a bitfield."""
        return self.member(struct_name, path).offset

    def tracepoint_args(self, name: str) -> int:
        """How many arguments a raw tracepoint passes (typedef ``btf_trace_<name>``).

        Raises :class:`BtfError` when this kernel has no such tracepoint.
        """
        try:
            for type_id in self._index[1].get(f"btf_trace_{name}".encode(), []):
                _, kind, _, _, ref = self._type(type_id)
                if kind == _PTR:
                    _, kind, vlen, _, _ = self._type(ref)
                    if kind == _FUNC_PROTO:
                        return vlen - 1  # the first is the probe's private data
        except _BROKEN as e:
            raise BtfError(f"unreadable BTF: {e}") from None
        raise BtfError(f"this kernel has no tracepoint {name}")
