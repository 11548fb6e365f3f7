"""The C text of a probe: complete in itself, and in pieces of which a module keeps each once."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

from dsprobe.probes.btf import Btf, BtfError
from dsprobe.probes.probe import BpfProbe, Unavailable
from dsprobe.recordings.model import Stream

HERE = Path(__file__).resolve().parent

_C_TYPES = {"<u8": "u64", "<u4": "u32", "<u2": "u16", "u1": "u8",
            "<i8": "s64", "<i4": "s32", "<i2": "s16", "i1": "s8"}  # fmt: skip
_INCLUDE = re.compile(r'^#include "(\w+)\.bpf\.h"$', re.MULTILINE)


def c_struct(name: str, stream: Stream) -> str:
    """The C structure of one row of ``stream``, byte for byte its dtype."""
    lines = []
    for f in stream.fields:
        if f.type.startswith("S"):
            lines.append(f"char {f.name}[{f.type[1:]}];")
        else:
            lines.append(f"{_C_TYPES[f.type]} {f.name}{f'[{f.shape}]' if f.shape else ''};")
    body = "\n\t".join(lines)
    size = stream.dtype.itemsize
    return (
        f"struct {name} {{\n\t{body}\n}} __attribute__((packed));\n"
        f'_Static_assert(sizeof(struct {name}) == {size}, "{stream.name}");\n'
    )


def text(probe: BpfProbe, probes: Sequence[BpfProbe], btf: Btf | None) -> str:
    """``probe`` in C, after those of ``probes`` that it requires.

    Raises :class:`Unavailable`, or :class:`~dsprobe.probes.btf.BtfError`.
    """
    parts = []
    for needed in required(probe, probes):
        try:
            parts.append(text(needed, probes, btf))
        except (Unavailable, BtfError) as e:
            raise Unavailable(f"it needs the probe {needed.name}: {e}") from None
    own = "".join(f"#define {k} {v}\n" for k, v in dict(probe.defines(btf)).items())
    own += "".join(c_struct(name, stream) for name, stream in probe.rings.items())
    own += _included((HERE / probe.source).read_text())
    return "".join(parts) + _once(f"UNIT_{probe.name.upper()}", own)


def required(probe: BpfProbe, probes: Sequence[BpfProbe]) -> list[BpfProbe]:
    """Those of ``probes`` that it names in ``requires``.  Raises :class:`Unavailable`."""
    found = []
    for kind in probe.requires:
        them = [p for p in probes if isinstance(p, kind)]
        if not them:
            raise Unavailable(f"it needs the probe {kind.name}, which was not asked for")
        found.append(them[0])
    return found


def module(kind: type[BpfProbe]) -> str:
    """Name of the module that a probe is compiled into."""
    return module(kind.requires[0]) if kind.requires else kind.module


def in_order(probes: Sequence[BpfProbe]) -> list[BpfProbe]:
    """Each after those that it requires, otherwise as they are."""
    order: dict[BpfProbe, None] = {}

    def add(probe: BpfProbe) -> None:
        for kind in probe.requires:
            for needed in probes:
                if isinstance(needed, kind):
                    add(needed)
        order.setdefault(probe)

    for probe in probes:
        add(probe)
    return list(order)


def _once(guard: str, body: str) -> str:
    return f"#ifndef {guard}\n#define {guard}\n{body}\n#endif\n"


def _included(source: str) -> str:
    """``source`` with our headers in place: bcc rewrites only what stands in its one text."""
    return _INCLUDE.sub(
        lambda m: _once(f"HEADER_{m[1].upper()}", _included((HERE / f"{m[1]}.bpf.h").read_text())),
        source,
    )
