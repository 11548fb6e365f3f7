"""Who may open the socket, where it may lie, and who listens there."""

from __future__ import annotations

import os
import signal
import socket
import stat
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from dsprobe.agent import server
from dsprobe.agent.server import ServerError
from dsprobe.recordings import wire
from dsprobe.recordings.connection import NO_PRIVILEGE, Connection, Refused
from tests.agent.serving import Serving, read_all, serving
from tests.support.wait import until

NOBODY = 65534

_AS_NOBODY = """
import os, sys
from dsprobe.recordings.connection import Connection, Refused
os.setgroups([int(g) for g in sys.argv[2:]])
os.setresgid(65534, 65534, 65534)
os.setresuid(65534, 65534, 65534)
try:
    Connection(sys.argv[1])
    print("connected")
except Refused as e:
    print(e.exit_code, e)
"""


def as_nobody(path: str, *groups: int) -> str:
    """What a viewer that is nobody (in ``groups``) gets at ``path``."""
    command = [sys.executable, "-c", _AS_NOBODY, path, *map(str, groups)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=30, check=True)
    return done.stdout.strip()


@contextmanager
def folder(mode: int = 0o755) -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="dsprobe-") as name:
        Path(name).chmod(mode)
        yield Path(name)


def start(path: Path) -> Serving:
    return Serving(str(path), 10**9, 1 << 20)


@pytest.mark.root
def test_socket_mode_keeps_others_out() -> None:
    with folder() as where:
        s = start(where / "socket")
        assert stat.S_IMODE(os.stat(s.path).st_mode) & 0o007 == 0
        said = as_nobody(s.path)
        assert said.startswith(f"{NO_PRIVILEGE} ")
        assert "group dsprobe" in said
        s.end()


@pytest.mark.root
def test_credentials_keep_others_out_where_the_mode_does_not() -> None:
    with folder() as where:
        s = start(where / "socket")
        os.chmod(s.path, 0o666)
        assert "only root and group dsprobe may view" in as_nobody(s.path)
        assert not s.server.viewers
        s.end()


@pytest.mark.root
@pytest.mark.parametrize("member", [True, False])
def test_members_of_the_group_may_view(monkeypatch: pytest.MonkeyPatch, member: bool) -> None:
    monkeypatch.setattr(server, "_group", lambda: 4321)
    with folder() as where:
        s = start(where / "socket")
        info = os.stat(s.path)
        assert (info.st_gid, stat.S_IMODE(info.st_mode)) == (4321, 0o660)
        said = as_nobody(s.path, 1234, *([4321] if member else []))
        assert said == "connected" if member else said.startswith(f"{NO_PRIVILEGE} ")
        s.end()


@pytest.mark.root
def test_an_agent_of_another_user_is_not_believed() -> None:
    """Whoever can make root look at a path of theirs could else feed it anything."""
    with folder(0o777) as where:
        path = str(where / "socket")
        listener = subprocess.Popen(
            [sys.executable, "-c", "import os, sys, socket\n"
             "os.setgroups([]); os.setgid(65534); os.setuid(65534)\n"
             "s = socket.socket(socket.AF_UNIX); s.bind(sys.argv[1]); s.listen(1)\n"
             "print('ready', flush=True); sys.stdin.read()", path],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
        )  # fmt: skip
        assert listener.stdout
        listener.stdout.readline()
        with pytest.raises(Refused, match="neither root's nor yours"):
            Connection(path)
        listener.communicate()


@pytest.mark.parametrize("mode", [0o777, 0o775])
def test_directory_that_others_can_change_is_refused(mode: int) -> None:
    with folder(mode) as where, pytest.raises(ServerError, match="changed by other users"):
        start(where / "socket")


@pytest.mark.root
def test_directory_of_somebody_else_is_refused() -> None:
    with folder() as where:
        os.chown(where, NOBODY, NOBODY)
        with pytest.raises(ServerError, match="changed by other users"):
            start(where / "socket")


def test_link_to_a_directory_is_refused() -> None:
    with folder() as where:
        (where / "real").mkdir()
        (where / "link").symlink_to("real")
        with pytest.raises(ServerError):
            start(where / "link" / "socket")


def test_directory_is_made_where_it_is_missing() -> None:
    with folder() as where:
        s = start(where / "a" / "socket")
        assert stat.S_IMODE((where / "a").stat().st_mode) == 0o755
        s.end()


def test_second_agent_is_refused_and_the_first_goes_on() -> None:
    with serving() as s:
        with pytest.raises(ServerError, match="already listens") as e:
            Serving(s.path, 1, 1)
        assert "\n" not in str(e.value)
        Connection(s.path).close()


def test_nothing_is_left_and_the_next_one_starts() -> None:
    with folder() as where:
        for _ in range(3):
            s = start(where / "socket")
            Connection(s.path).close()
            s.end()
            assert not list(where.iterdir())


def test_socket_of_a_killed_agent_is_replaced() -> None:
    with folder() as where:
        path = where / "socket"
        code = (
            "import sys, time; from tests.agent.serving import Serving;"
            "Serving(sys.argv[1], 1, 1); print('ready', flush=True); time.sleep(600)"
        )
        killed = subprocess.Popen(
            [sys.executable, "-c", code, str(path)], stdout=subprocess.PIPE, text=True
        )
        assert killed.stdout
        killed.stdout.readline()
        killed.send_signal(signal.SIGKILL)
        killed.communicate()
        assert path.is_socket()
        with pytest.raises(Refused, match="no agent listens"):
            Connection(str(path))
        s = start(path)
        Connection(s.path).close()
        s.end()


@pytest.mark.parametrize("kind", ["file", "directory", "link"])
def test_what_is_no_socket_is_never_removed(kind: str) -> None:
    with folder() as where:
        path, target = where / "precious", where / "target"
        target.write_text("keep me")
        if kind == "file":
            path.write_text("keep me")
        elif kind == "directory":
            path.mkdir()
        else:
            path.symlink_to(target)
        with pytest.raises(ServerError, match="is no socket"):
            start(path)
        assert path.exists()
        assert target.read_text() == "keep me"


def test_path_too_long_is_a_sentence() -> None:
    with folder() as where:
        path = str(where / ("x" * 120))
        with pytest.raises(ServerError, match="too long"):
            start(Path(path))
        with pytest.raises(Refused, match="too long"):
            Connection(path)


def test_link_in_place_of_the_lock_is_not_followed() -> None:
    with folder() as where:
        (where / "socket.lock").symlink_to(where / "elsewhere")
        with pytest.raises(ServerError):
            start(where / "socket")
        assert not (where / "elsewhere").exists()


def test_starting_at_once_leaves_exactly_one() -> None:
    """The lock is taken away as an agent ends: two that start meanwhile must not both get one."""
    with folder() as where:
        path = where / "socket"
        code = """
import os, sys, time
from dsprobe.agent.server import _claim, ServerError
sys.stdin.readline()
won = 0
end = time.monotonic() + 20
while won < 60 and time.monotonic() < end:
    try:
        lock = _claim(sys.argv[1])
    except ServerError:
        continue
    mine = os.open(sys.argv[1] + ".held", os.O_CREAT | os.O_EXCL)  # fails where another holds it
    os.close(mine)
    os.unlink(sys.argv[1] + ".held")
    os.unlink(sys.argv[1] + ".lock")
    os.close(lock)
    won += 1
print(won)
"""
        racers = [
            subprocess.Popen(
                [sys.executable, "-c", code, str(path)],
                stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
            )
            for _ in range(3)
        ]  # fmt: skip
        for r in racers:
            assert r.stdin
            r.stdin.write("\n")
            r.stdin.flush()
        for r in racers:
            out, err = r.communicate(timeout=30)
            assert r.returncode == 0, err
            assert int(out) == 60


def test_refused_viewer_reads_why_even_if_it_speaks_first() -> None:
    with serving() as s:
        for _ in range(50):
            with socket.socket(socket.AF_UNIX) as v:
                v.connect(s.path)
                v.sendall(wire.pack("hello", protocol=7))
                assert read_all(v)[-1]["m"] == "bye"
        until(lambda: not s.server.viewers, "all have left")
