"""The Unix socket that viewers connect to: non-blocking, bounded, one thread.

A viewer is trusted to see what root sees on this host, so the socket is for root and the group
``dsprobe``; the peer's credentials are checked too (SO_PEERCRED, unix(7)).  A viewer can ask the
agent to end only when it is root.
"""

from __future__ import annotations

import contextlib
import fcntl
import grp
import os
import selectors
import socket
import stat
import struct
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
_SEND_AT_ONCE = 1 << 20


class ServerError(Exception):
    """The socket cannot be opened: why, and what to do.  Ends the command with code 1."""

    exit_code = 1


class _Viewer:
    def __init__(self, sock: socket.socket, uid: int) -> None:
        self.sock, self.uid = sock, uid
        self.receiver = wire.Receiver(wire.MAX_REQUEST)
        self.subscriber: Subscriber | None = None
        self.follow = True
        self.pending = memoryview(b"")
        self.watches_writes = False


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
        self._lock = _claim(path)
        try:
            self._listener = _listen(path)
        except OSError as e:
            os.close(self._lock)
            raise ServerError(f"{path}: {e.strerror}") from None
        selector.register(self._listener, selectors.EVENT_READ, self._accept)

    @property
    def viewers(self) -> int:
        """How many follow."""
        return sum(v.subscriber is not None and v.follow for v in self._viewers.values())

    # -- one viewer ---------------------------------------------------------------------------

    def _accept(self, _: int) -> None:
        try:
            sock, _address = self._listener.accept()
        except OSError:
            return
        sock.setblocking(False)
        uid = _peer_uid(sock)
        if not _may_view(uid) or len(self._viewers) >= MAX_VIEWERS:
            why = "too many viewers" if _may_view(uid) else f"only root and group {GROUP} may view"
            with contextlib.suppress(OSError):
                sock.send(wire.pack("bye", why=why))
            sock.close()
            return
        viewer = _Viewer(sock, uid)
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
        elif kind == "stop" and viewer.uid == 0 and self.viewers <= 1:
            self._on_stop()

    def _hello(self, viewer: _Viewer, message: dict[str, Any]) -> None:
        history, queue = message.get("history"), message.get("queue")
        names = message.get("streams")
        since = self._now() - history if isinstance(history, int) and history >= 0 else 0
        limit = queue if isinstance(queue, int) else QUEUE_BYTES
        limit = min(max(limit, 64 << 10), MAX_QUEUE_BYTES)
        wanted = (
            frozenset(n for n in names if isinstance(n, str)) if isinstance(names, list) else None
        )
        viewer.follow = message.get("follow") is not False
        s = viewer.subscriber = self._hub.subscribe(since, limit, wanted, viewer.follow)
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
        s.backlog.appendleft(hello)
        if message.get("protocol") != wire.PROTOCOL:
            s.backlog.clear()
            s.backlog.append(hello)
            s.backlog.append(wire.pack("bye", why=f"this agent speaks protocol {wire.PROTOCOL}"))
            viewer.follow = False
            self._hub.unsubscribe(s)
        elif viewer.follow:
            s.backlog.append(wire.pack("live"))
        else:
            s.backlog.append(wire.pack("bye", why=""))

    def _send(self, viewer: _Viewer) -> None:
        """Send what the socket takes now, at most a megabyte, so that no viewer holds the loop."""
        s, sent = viewer.subscriber, 0
        try:
            while sent < _SEND_AT_ONCE:
                if not viewer.pending:
                    message = s.take() if s else None
                    if message is None:
                        if s and not viewer.follow:
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
        more = bool(viewer.pending) or bool(s and (s.backlog or s.queued))
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
        """Send what has been queued to viewers that were idle."""
        for viewer in list(self._viewers.values()):
            if not viewer.watches_writes and viewer.subscriber:
                self._send(viewer)

    def close(self, why: str) -> None:
        """Say good-bye, give each viewer a last second to take what it was promised, and go."""
        for viewer in list(self._viewers.values()):
            if viewer.subscriber and viewer.follow:
                viewer.subscriber.put(wire.pack("bye", why=why))
            with contextlib.suppress(OSError):
                viewer.sock.settimeout(1.0)
                self._finish(viewer)
            viewer.sock.close()
        self._viewers.clear()
        self._listener.close()
        with contextlib.suppress(OSError):
            os.unlink(self._path)
        os.close(self._lock)

    def _finish(self, viewer: _Viewer) -> None:
        if viewer.pending:
            viewer.sock.sendall(viewer.pending)
        while viewer.subscriber and (message := viewer.subscriber.take()) is not None:
            viewer.sock.sendall(message)


def _peer_uid(sock: socket.socket) -> int:
    data = sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("iII"))
    uid: int = struct.unpack("iII", data)[1]
    return uid


def _may_view(uid: int) -> bool:
    """Root, the agent's own user, and members of the group; the socket's mode says so as well."""
    if uid in (0, os.geteuid()):
        return True
    import pwd

    try:
        group, user = grp.getgrnam(GROUP), pwd.getpwuid(uid)
    except KeyError:
        return False
    return user.pw_name in group.gr_mem or user.pw_gid == group.gr_gid


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
        lock = os.open(f"{path}.lock", os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    except OSError as e:
        raise ServerError(f"{directory}: {e.strerror}") from None
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(lock)
        raise ServerError(
            f"an agent already listens at {path}: use it with dsprobe top, or stop it first"
        ) from None
    return lock


def _listen(path: str) -> socket.socket:
    """A listening socket, mode 0660, of the group where there is one."""
    with contextlib.suppress(FileNotFoundError):
        os.unlink(path)  # of an agent that was killed: the lock says that none lives
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_NONBLOCK)
    old = os.umask(0o177)
    try:
        sock.bind(path)
    finally:
        os.umask(old)
    with contextlib.suppress(KeyError, PermissionError):
        os.chown(path, -1, grp.getgrnam(GROUP).gr_gid)
        os.chmod(path, 0o660)
    sock.listen(MAX_VIEWERS)
    return sock
