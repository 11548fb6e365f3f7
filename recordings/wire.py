"""What an agent and its viewers say to each other over the Unix socket.

Both sides send msgpack maps, one after another.  A viewer begins with ``hello``; the agent answers
with ``hello`` (protocol, stream declarations, limits of its flight ring), then the history that was
asked for as ``frame`` messages, then ``live``, then frames as they come.  ``lost`` says how many
frames and rows of each stream this viewer did not get because it did not read fast enough; ``bye``
says why the agent ends the connection.

Frames of one stream arrive in the order of their ``seq``.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import msgpack

from dsprobe.recordings.frames import MAX_FRAME_BYTES, Frame

PROTOCOL = 1
SOCKET = "/run/dsprobe/agent.sock"

MAX_REQUEST = 64 << 10
"""Bytes an agent reads from a viewer before it is a whole message."""

MAX_MESSAGE = MAX_FRAME_BYTES + (64 << 10)


class WireError(ValueError):
    """Bytes that are not the next message of this protocol."""


def pack(kind: str, **body: Any) -> bytes:
    """One message."""
    data: bytes = msgpack.packb({"m": kind, **body})
    return data


def frame(f: Frame) -> bytes:
    """A ``frame`` message."""
    return pack("frame", s=f.stream, q=f.seq, a=f.t0, b=f.t1, n=f.n, d=f.data)


def to_frame(message: dict[str, Any]) -> Frame:
    """The frame of a ``frame`` message; raises :class:`WireError` when it is none."""
    try:
        f = Frame(message["s"], message["q"], message["a"], message["b"], message["n"],
                  message["d"])  # fmt: skip
    except KeyError as e:
        raise WireError(f"a frame without {e}") from None
    numbers = (f.seq, f.t0, f.t1, f.n)
    if not all(isinstance(v, int) and 0 <= v < 1 << 63 for v in numbers):
        raise WireError("a frame with impossible numbers")
    if not isinstance(f.stream, str) or not isinstance(f.data, bytes) or f.t1 < f.t0:
        raise WireError("a frame of wrong types")
    return f


def to_lost(message: dict[str, Any]) -> dict[str, int]:
    """Rows by stream that a ``lost`` message tells of; what makes no sense in it is left out."""
    streams = message.get("streams")
    lost = {}
    for stream, pair in streams.items() if isinstance(streams, dict) else ():
        if isinstance(pair, list) and len(pair) == 2 and isinstance(pair[1], int) and pair[1] > 0:
            lost[str(stream)] = min(pair[1], 1 << 62)
    return lost


class Receiver:
    """Bytes in, messages out, of at most ``limit`` bytes each."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._fed = self._taken = 0
        self._unpacker = msgpack.Unpacker(
            max_buffer_size=2 * limit,
            max_bin_len=limit,
            max_str_len=limit,
            max_array_len=4096,
            max_map_len=4096,
            strict_map_key=True,
        )

    def feed(self, data: bytes) -> Iterator[dict[str, Any]]:
        """The whole messages that ``data`` completes.  Raises :class:`WireError`."""
        try:
            # The unpacker keeps what it has made of a message so far, and bounds only bytes it has
            # not looked at: a message without end would grow without end.
            self._fed += len(data)
            self._unpacker.feed(data)
            for message in self._unpacker:
                self._taken = self._unpacker.tell()
                if not isinstance(message, dict) or not isinstance(message.get("m"), str):
                    raise WireError("not a message")
                yield message
            if self._fed - self._taken > self._limit:
                raise WireError(f"a message of more than {self._limit} bytes")
        except WireError:
            raise
        except (ValueError, TypeError, msgpack.UnpackException, RecursionError) as e:
            raise WireError(f"not a message: {e}") from None
