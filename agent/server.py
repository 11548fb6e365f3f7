"""The Unix socket that viewers connect to: non-blocking, bounded, one thread.

A viewer is trusted to see what root sees on this host, so the socket is for root and the group
``dsprobe``; the peer's credentials are checked too (SO_PEERCRED, unix(7)).  A viewer can ask the
agent to end only when it is root.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import grp
import os
import selectors
import socket
import stat
import struct
import time
from array import array
from collections.abc import Callable
from pathlib import Path
from typing import Any

from dsprobe.agent.hub import Hub, Subscriber
from dsprobe.recordings import wire
from dsprobe.recordings.streams import STREAMS

GROUP = "dsprobe"
MAX_VIEWERS = 32
QUEUE_BYTES = 8 << 20
MAX_QUEUE_BYTES = 128 << 20
HELLO_NS = 10_000_000_000
LAST_WORDS_SECONDS = 1.0
_SEND_AT_ONCE = 1 << 20
_SO_PEERGROUPS = 59  # asm-generic/socket.h, Linux 4.13


class ServerError(Exception):
    """The socket cannot be opened: why, and what to do.  Ends the command with code 1."""

    exit_code = 1


class _Viewer:
    def __init__(self, sock: socket.socket, uid: int, since: int) -> None:
        self.sock, self.uid, self.since = sock, uid, since
        self.receiver = wire.Receiver(wire.MAX_REQUEST)
        self.subscriber: Subscriber | None = None
        self.pending = memoryview(b"")
        self.watches_writes = False

    @property
    def follows(self) -> bool:
        return self.subscriber is not None and self.subscriber.follow


class Server:
    """Listens at ``path``.  ``facts`` is sent with every hello.

    ``on_mark`` gets the label of a marker, ``on_stop`` is called when a viewer asks the agent to
    end and no other one is there.
    """

    def __init__(
        self,
        path: str,
        hub: Hub,
        selector: selectors.BaseSelector,
        now: Callable[[], int],
        on_mark: Callable[[str], None],
        on_stop: Callable[[], None],
    ) -> None:
        self._path, self._hub, self._selector, self._now = path, hub, selector, now
        self._on_mark, self._on_stop = on_mark, on_stop
        self._viewers: dict[int, _Viewer] = {}
        self.served = 0
        """How many have ever come."""
        self._group = _group()
        self._lock = _claim(path)
        try:
            self._listener = _listen(path, self._group)
        except OSError as e:
            os.close(self._lock)
            raise ServerError(f"{path}: {e.strerror or e}") from None
        selector.register(self._listener, selectors.EVENT_READ, self._accept)

    @property
    def viewers(self) -> int:
        """How many follow."""
        return sum(v.follows for v in self._viewers.values())

    # -- one viewer ---------------------------------------------------------------------------

    def _accept(self, _: int) -> None:
        try:
            sock, _address = self._listener.accept()
        except OSError:
            return
        sock.setblocking(False)
        uid, groups = _peer(sock)
        allowed = uid in (0, os.geteuid()) or self._group in groups
        if not allowed or len(self._viewers) >= MAX_VIEWERS:
            why = f"it has {MAX_VIEWERS} viewers, and takes no more"
            if not allowed:
                why = f"only root and group {GROUP} may view"
            with contextlib.suppress(OSError):
                sock.send(wire.pack("bye", why=why))
            sock.close()
            return
        viewer = _Viewer(sock, uid, self._now())
        self._viewers[sock.fileno()] = viewer
        self._selector.register(sock, selectors.EVENT_READ, lambda mask: self._ready(viewer, mask))

    def _ready(self, viewer: _Viewer, mask: int) -> None:
        if mask & selectors.EVENT_READ:
            try:
                data = viewer.sock.recv(wire.MAX_REQUEST)
                if not data:
                    raise ConnectionError
                for message in viewer.receiver.feed(data):
                    self._handle(viewer, message)
            except BlockingIOError:
                pass
            except (OSError, wire.WireError):
                self._drop(viewer)
                return
        self._send(viewer)

    def _handle(self, viewer: _Viewer, message: dict[str, Any]) -> None:
        kind = message["m"]
        if kind == "hello" and viewer.subscriber is None:
            self._hello(viewer, message)
        elif kind == "mark" and isinstance(message.get("label"), str):
            self._on_mark(message["label"][:200])
        elif kind == "stop" and viewer.uid == 0 and not self._others(viewer):
            self._on_stop()

    def _others(self, viewer: _Viewer) -> bool:
        return any(v.follows for v in self._viewers.values() if v is not viewer)

    def _hello(self, viewer: _Viewer, message: dict[str, Any]) -> None:
        history, queue = message.get("history"), message.get("queue")
        names = message.get("streams")
        since = self._now() - history if isinstance(history, int) and history >= 0 else 0
        limit = queue if isinstance(queue, int) else QUEUE_BYTES
        limit = min(max(limit, 64 << 10), MAX_QUEUE_BYTES)
        wanted = (
            frozenset(n for n in names if isinstance(n, str)) if isinstance(names, list) else None
        )
        follow = message.get("follow") is not False
        s = viewer.subscriber = self._hub.subscribe(since, limit, wanted, follow)
        self.served += 1
        f = self._hub.flight
        hello = wire.pack(
            "hello",
            protocol=wire.PROTOCOL,
            pid=os.getpid(),
            now=self._now(),
            span=f.span,
            limit=f.limit,
            begins=f.begins,
            streams=[d.to_json() for d in STREAMS.values() if s.wants(d.name)],
        )
        s.put_first(hello)
        if message.get("protocol") != wire.PROTOCOL:
            s.end(f"this agent speaks protocol {wire.PROTOCOL}")
        elif follow:
            s.put(wire.pack("live"))
        else:
            s.end("")

    def _send(self, viewer: _Viewer) -> None:
        """Send what the socket takes now, at most a megabyte, so that no viewer holds the loop."""
        s, sent = viewer.subscriber, 0
        try:
            while sent < _SEND_AT_ONCE:
                if not viewer.pending:
                    message = s.take() if s else None
                    if message is None:
                        if s and not s.follow:
                            self._drop(viewer)  # it has all it asked for
                            return
                        break
                    viewer.pending = memoryview(message)
                n = viewer.sock.send(viewer.pending)
                viewer.pending = viewer.pending[n:]
                sent += n
        except BlockingIOError:
            pass
        except OSError:
            self._drop(viewer)
            return
        more = bool(viewer.pending) or bool(s and s.waiting)
        if more != viewer.watches_writes:
            viewer.watches_writes = more
            events = selectors.EVENT_READ | (selectors.EVENT_WRITE if more else 0)
            self._selector.modify(viewer.sock, events, lambda mask: self._ready(viewer, mask))

    def _drop(self, viewer: _Viewer) -> None:
        self._selector.unregister(viewer.sock)
        self._viewers.pop(viewer.sock.fileno(), None)
        viewer.sock.close()
        if viewer.subscriber:
            self._hub.unsubscribe(viewer.subscriber)

    # -- all of them --------------------------------------------------------------------------

    def flush(self) -> None:
        """Send what has been queued to viewers that were idle; those that never say what they want
        must not keep their places."""
        late = self._now() - HELLO_NS
        for viewer in list(self._viewers.values()):
            if viewer.subscriber is None and viewer.since < late:
                self._drop(viewer)
            elif not viewer.watches_writes and viewer.subscriber:
                self._send(viewer)

    def close(self, why: str) -> None:
        """Say good-bye, give all viewers a last second to take what they were promised, and go."""
        self._selector.unregister(self._listener)
        self._listener.close()
        with contextlib.suppress(OSError):
            os.unlink(self._path)
        for viewer in list(self._viewers.values()):
            if viewer.subscriber is None:
                self._drop(viewer)
                continue
            if viewer.follows:
                viewer.subscriber.end(why)
            self._send(viewer)
        deadline = time.monotonic() + LAST_WORDS_SECONDS
        while self._viewers and (left := deadline - time.monotonic()) > 0:
            for key, mask in self._selector.select(left):
                key.data(mask)
        for viewer in list(self._viewers.values()):
            self._drop(viewer)
        with contextlib.suppress(OSError):
            os.unlink(f"{self._path}.lock")
        os.close(self._lock)


def _peer(sock: socket.socket) -> tuple[int, set[int]]:
    """User and groups of the other side, as the kernel noted them when it connected: names would
    have to be looked up, and a directory service that hangs must not hang the agent."""
    data = sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("iII"))
    _, uid, gid = struct.unpack("iII", data)
    groups = {gid}
    with contextlib.suppress(OSError):  # more groups than fit
        groups.update(array("I", sock.getsockopt(socket.SOL_SOCKET, _SO_PEERGROUPS, 1024)))
    return uid, groups


def _group() -> int:
    """The group that may view; -1 where there is none."""
    try:
        return grp.getgrnam(GROUP).gr_gid
    except KeyError:
        return -1


def _claim(path: str) -> int:
    """Hold the lock beside the socket, so that one agent at a time listens there.

    The directory must be ours alone to write: else somebody could put a socket or a link there.
    """
    directory = Path(path).parent
    try:
        directory.mkdir(mode=0o755, parents=True, exist_ok=True)
        info = os.lstat(directory)
        writable = info.st_mode & 0o022 and not info.st_mode & stat.S_ISVTX
        if not stat.S_ISDIR(info.st_mode) or info.st_uid != os.geteuid() or writable:
            raise ServerError(
                f"{directory} can be changed by other users: choose another --socket, or make it"
                " a directory of your own with mode 0755"
            )
        while True:
            lock = _lock(f"{path}.lock")
            if lock is None:
                raise ServerError(
                    f"an agent already listens at {path}: use it with dsprobe top, or stop it first"
                )
            with contextlib.suppress(FileNotFoundError):
                if os.path.samestat(os.fstat(lock), os.lstat(f"{path}.lock")):
                    return lock
            os.close(lock)  # of an agent that took it away as it ended
    except OSError as e:
        raise ServerError(f"{directory}: {e.strerror}") from None


def _lock(path: str) -> int | None:
    """The locked file; None where somebody else holds it."""
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(fd)
        return None
    return fd


def _listen(path: str, group: int) -> socket.socket:
    """A listening socket, mode 0660, of the group where there is one."""
    with contextlib.suppress(FileNotFoundError):
        if not stat.S_ISSOCK(os.lstat(path).st_mode):
            raise FileExistsError(errno.EEXIST, "exists and is no socket: choose another --socket")
        os.unlink(path)  # of an agent that was killed: the lock says that none lives
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_NONBLOCK)
    old = os.umask(0o177)
    try:
        sock.bind(path)
        if group >= 0:
            os.chown(path, -1, group)
            os.chmod(path, 0o660)
        sock.listen(MAX_VIEWERS)
    except OSError:
        sock.close()
        raise
    finally:
        os.umask(old)
    return sock
