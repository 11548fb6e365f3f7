"""What a stream is: a name, typed fields with units, and how its rows are ordered in time.

Streams are declared once, in :mod:`dsprobe.recordings.streams`.  A file and a socket carry each
declaration along as JSON, so a reader needs no table of its own: streams and trailing fields that
this version does not know are kept as declared by whoever wrote them.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt

Rows = npt.NDArray[Any]
"""A numpy structured array with the dtype of one stream."""

TEXT = "str"
"""Type code of a variable-length text field (an object column in numpy, a list on the wire)."""

MAX_FIELDS = 256
MAX_NAMES = 4096
MAX_ITEMS = 4096  # elements of one fixed-size array field


class SchemaError(ValueError):
    """A stream declaration that is malformed or asks for more than a reader will allocate."""


@dataclass(frozen=True)
class Field:
    """One column.

    ``type`` is a little-endian numpy type code (``<u8``, ``S16``), or ``str`` for text.
    ``shape`` is the number of elements per row for array fields, else 0.
    ``unit`` is ``ns``, ``bytes``, ``count``, ``id``, ``enum``, ``text``, ``bool`` ...
    ``names`` gives the words for the values 0, 1, 2 ... of an enumeration.
    ``ref`` names the ``meta.*`` stream whose ``id`` column this field points into.
    """

    name: str
    type: str
    unit: str
    doc: str
    shape: int = 0
    names: tuple[str, ...] = ()
    ref: str = ""

    @property
    def is_text(self) -> bool:
        return self.type == TEXT

    @property
    def numpy_type(self) -> Any:
        base: Any = object if self.is_text else self.type
        return (base, (self.shape,)) if self.shape else base


@dataclass(frozen=True)
class Stream:
    """A named sequence of rows.  Field ``t`` (CLOCK_MONOTONIC ns) is always the first.

    A row of a *sampled* stream (one with a ``dt`` field) speaks for the interval ``(t - dt, t]``;
    any other row speaks for the instant ``t``.
    """

    name: str
    doc: str
    source: str
    fields: tuple[Field, ...]

    @cached_property
    def dtype(self) -> np.dtype[Any]:
        return np.dtype([(f.name, *_pair(f)) for f in self.fields])

    @cached_property
    def by_name(self) -> Mapping[str, Field]:
        return {f.name: f for f in self.fields}

    @property
    def is_meta(self) -> bool:
        return self.name.startswith("meta.")

    def empty(self, n: int = 0) -> Rows:
        """``n`` zeroed rows (text fields are empty strings)."""
        rows = np.zeros(n, self.dtype)
        for f in self.fields:
            if f.is_text:
                rows[f.name] = ""
        return rows

    def rows(self, **columns: Any) -> Rows:
        """Rows from equally long columns; scalars are repeated, absent fields are zero."""
        n = max((np.shape(c)[0] for c in columns.values() if np.ndim(c)), default=1)
        rows = self.empty(n)
        for name, values in columns.items():
            rows[name] = values
        return rows

    def to_json(self) -> str:
        fields = []
        for f in self.fields:
            d: dict[str, Any] = {"name": f.name, "type": f.type, "unit": f.unit, "doc": f.doc}
            if f.shape:
                d["shape"] = f.shape
            if f.names:
                d["names"] = list(f.names)
            if f.ref:
                d["ref"] = f.ref
            fields.append(d)
        return json.dumps(
            {"name": self.name, "doc": self.doc, "source": self.source, "fields": fields},
            separators=(",", ":"),
        )

    @classmethod
    def from_json(cls, text: str | bytes) -> Stream:
        """Read a declaration written by any version; raises :class:`SchemaError` on nonsense."""
        try:
            d = json.loads(text)
            fields = tuple(_field(f) for f in d["fields"])
            stream = cls(str(d["name"]), str(d["doc"]), str(d["source"]), fields)
            if not fields or len(fields) > MAX_FIELDS:
                raise SchemaError(f"{len(fields)} fields")
            if fields[0].name != "t" or fields[0].type != "<u8" or fields[0].shape:
                raise SchemaError("the first field is not t, <u8")
            stream.dtype  # noqa: B018  (built now so that a bad type is an error here)
        except SchemaError:
            raise
        except (ValueError, KeyError, TypeError, RecursionError) as e:
            raise SchemaError(f"unreadable stream declaration: {e}") from None
        return stream


def _pair(f: Field) -> tuple[Any, ...]:
    t = f.numpy_type
    return t if isinstance(t, tuple) else (t,)


def _field(d: Any) -> Field:
    code = str(d["type"])
    if code != TEXT:
        dtype = np.dtype(code)
        if dtype.kind not in "uifbS" or dtype.itemsize > 256 or dtype.itemsize == 0:
            raise SchemaError(f"type {code!r} is not a plain number or short byte string")
    shape = int(d.get("shape", 0))
    names = tuple(str(n) for n in d.get("names", ()))
    if not 0 <= shape <= MAX_ITEMS or len(names) > MAX_NAMES or (shape and code == TEXT):
        raise SchemaError("field too large")
    return Field(
        str(d["name"]), code, str(d["unit"]), str(d["doc"]), shape, names, str(d.get("ref", ""))
    )
