"""One viewer's connection to an agent."""

from __future__ import annotations

import contextlib
import os
import select
import socket
import struct
import time
from collections.abc import Iterator
from typing import Any

from dsprobe.recordings import wire
from dsprobe.recordings.errors import EXIT_ERROR, EXIT_VERSION, RecordingError
from dsprobe.recordings.model import SchemaError, Stream

NO_PRIVILEGE = 5
_RECEIVE = 1 << 20
HELLO_SECONDS = 10.0


class Refused(RecordingError):
    """No connection: no agent listens, it may not be used, or it speaks another protocol."""


class Connection:
    """Connects to ``path``, says hello and reads the agent's answer.

    ``history``: how many ns back (None: all the agent holds).  ``follow``: go on with what comes.
    ``queue``: bytes the agent may queue for us.  ``streams``: only these and ``meta.*``.
    Raises :class:`Refused`.
    """

    def __init__(
        self,
        path: str = wire.SOCKET,
        *,
        history: int | None = None,
        follow: bool = True,
        queue: int | None = None,
        streams: tuple[str, ...] | None = None,
    ) -> None:
        self.path = path
        self._ended = ""
        self._sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._sock.settimeout(HELLO_SECONDS)
        try:
            self._sock.connect(path)
            self._check_peer()
        except (FileNotFoundError, ConnectionRefusedError):
            self._sock.close()
            raise Refused(f"no agent listens at {path}: start one with dsprobe agent") from None
        except BlockingIOError:  # more wait to be taken than it listens for
            self._sock.close()
            raise Refused(f"the agent at {path} does not answer: restart it") from None
        except OSError as e:
            self._sock.close()
            code = NO_PRIVILEGE if isinstance(e, PermissionError) else EXIT_ERROR
            fix = "; run this as root or as a member of group dsprobe" if code != EXIT_ERROR else ""
            raise Refused(f"{path}: {e.strerror or e}{fix}", code) from None
        self._receiver = wire.Receiver(wire.MAX_MESSAGE)
        self._waiting: list[dict[str, Any]] = []
        self.send(
            "hello", protocol=wire.PROTOCOL, history=-1 if history is None else history,
            follow=follow, queue=queue, streams=None if streams is None else list(streams),
        )  # fmt: skip
        self.hello = self._hello()
        self.streams: dict[str, Stream] = {}
        try:
            for text in self.hello["streams"]:
                stream = Stream.from_json(text)
                self.streams[stream.name] = stream
        except (KeyError, TypeError, SchemaError) as e:
            self.close()
            raise Refused(f"the agent at {path} declares no usable streams: {e}") from None

    @property
    def ended(self) -> str:
        """Why the connection is over; empty while it is not, or has brought more than was taken."""
        return "" if self._waiting else self._ended

    def give_up(self, why: str) -> None:
        """Take nothing more from an agent that sent what makes no sense."""
        self._waiting.clear()
        self._ended = why

    def _check_peer(self) -> None:
        """Believe only what root or our own user says (SO_PEERCRED, unix(7))."""
        data = self._sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("iII"))
        uid = struct.unpack("iII", data)[1]
        if uid not in (0, os.geteuid()):
            self._sock.close()
            raise Refused(f"the agent at {self.path} is neither root's nor yours: name another one")

    def _hello(self) -> dict[str, Any]:
        deadline = time.monotonic() + HELLO_SECONDS
        while not self._waiting and not self.ended:
            if time.monotonic() > deadline:
                self.close()
                raise Refused(f"the agent at {self.path} does not answer: restart it")
            self._waiting += self.receive(0.1)
        hello = self._waiting.pop(0) if self._waiting else {"m": "bye", "why": self.ended}
        if hello["m"] != "hello":
            self.close()
            raise Refused(
                f"the agent at {self.path} refuses: {hello.get('why', 'no reason given')}"
            )
        if hello.get("protocol") != wire.PROTOCOL:
            self.close()
            raise Refused(
                f"the agent at {self.path} speaks protocol {hello.get('protocol')}, this dsprobe"
                f" {wire.PROTOCOL}: use the same version on both sides",
                EXIT_VERSION,
            )
        return hello

    def fileno(self) -> int:
        return self._sock.fileno()

    def send(self, kind: str, **body: Any) -> None:
        """Send a message; an agent that has gone is noticed at the next :meth:`receive`, as it may
        have said why."""
        with contextlib.suppress(OSError):
            self._sock.sendall(wire.pack(kind, **body))

    def receive(self, seconds: float = 0.0, limit: int = 16 << 20) -> Iterator[dict[str, Any]]:
        """Messages that have come, about ``limit`` bytes, waiting up to ``seconds`` for the first.

        Ends quietly when the connection does: see :attr:`ended`.
        """
        if self._waiting:
            waiting, self._waiting = self._waiting, []
            yield from waiting
        taken = 0
        while not self._ended and taken < limit:
            if not select.select([self._sock], [], [], 0 if taken else seconds)[0]:
                return
            try:
                data = self._sock.recv(_RECEIVE)
                if not data:
                    self._ended = "the agent has gone"
                    return
                taken += len(data)
                for message in self._receiver.feed(data):
                    if message["m"] == "bye":
                        self._ended = str(message.get("why") or "that is all")
                        return
                    yield message
            except ConnectionResetError:
                self._ended = "the agent has gone"
            except OSError as e:
                self._ended = f"the connection broke: {e.strerror or e}"
            except wire.WireError as e:
                self._ended = f"the agent sent what is no message ({e})"

    def close(self) -> None:
        """Hang up."""
        self._sock.close()
        self._ended = self._ended or "closed"
