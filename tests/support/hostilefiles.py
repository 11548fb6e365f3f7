"""Shared libraries that are made to cost whoever reads them."""

from __future__ import annotations

import struct
from pathlib import Path

import numpy as np

from dsprobe.probes.elf import _SYMBOL

DYNSYM, NOTE, SYMTAB = 11, 7, 2
_FUNC = 0x12
_CODE, _NAMES = 0x1000, 0x2000


def library(
    path: Path, count: int, sections: int = 1, names: bytes = b"", kind: int = DYNSYM,
    code: bytes = b"\x48\x8d\x04\x06" * 16, segments: int = 1,
) -> Path:  # fmt: skip
    """An ELF file of x86_64 with ``sections`` tables that are all the same one of ``count``
    symbols; without ``names`` they are cuInit, cu000001, cu000002 ..."""
    symbols = np.zeros(count, _SYMBOL)
    if not names:
        names = b"cuInit\0\0\0" + b"".join(b"cu%06x\0" % i for i in range(1, count))
        symbols["name"] = np.arange(count, dtype="<u4") * 9
    symbols["info"], symbols["section"], symbols["value"], symbols["size"] = _FUNC, 1, _CODE, 64
    symbols_at = _NAMES + len(names)
    sections_at = symbols_at + symbols.nbytes
    headers = [(0, 3, 0, 0, _NAMES, len(names), 0, 0, 1, 0)]
    headers += [(0, kind, 0, 0, symbols_at, symbols.nbytes, 0, 0, 8, 24)] * sections
    total = sections_at + 64 * len(headers)
    ident = b"\x7fELF\x02\x01\x01" + bytes(9)
    head = (3, 62, 1, 0, 64, sections_at, 0, 64, 56, segments, 64, len(headers), 0)
    with open(path, "wb") as f:
        f.write(struct.pack("<16sHHIQQQIHHHHHH", ident, *head))
        f.write(struct.pack("<IIQQQQQQ", 1, 5, 0, 0, 0, total, total, 0x1000))
        f.seek(_CODE)
        f.write(code)
        f.seek(_NAMES)
        f.write(names)
        f.write(symbols.tobytes())
        for header in headers:
            f.write(struct.pack("<IIQQQQIIQQ", *header))
    return path
