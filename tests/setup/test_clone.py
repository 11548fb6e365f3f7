"""Both README commands as written, on a clone in an empty folder, with an empty home."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import signal
import socket
import subprocess
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.setup.places import clean_env, clone, folder, readme_commands
from tests.setup.terminal import Terminal

pytestmark = pytest.mark.setup

NOBODY = ["setpriv", "--reuid=65534", "--regid=65534", "--clear-groups"]


@pytest.fixture(scope="module")
def place() -> Iterator[Path]:
    with folder() as path:
        yield path


@pytest.fixture(scope="module")
def checkout(place: Path) -> Path:
    """A clone that the first README command has set up: see the first test."""
    return clone(place / "a clone")


def run(command: list[str | Path], place: Path, **env: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        command, cwd=place, env=clean_env(place / "home", **env), capture_output=True, text=True
    )


def test_an_interrupted_set_up_is_redone_once_for_all_who_wait(checkout: Path, place: Path) -> None:
    script = checkout / "scripts/dsprobe"
    env = clean_env(place / "home", TMPDIR=str(place))
    first = subprocess.Popen(
        [script, "--version"], env=env, start_new_session=True,
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    assert first.stderr
    while "Python packages" not in (line := first.stderr.readline()):
        assert line, "the set-up ended before it could be interrupted"
    os.killpg(first.pid, signal.SIGKILL)
    first.communicate()
    assert not (checkout / ".venv/.stamp").exists()

    both = [
        subprocess.Popen(
            [script, "--version"], env=env,
            stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        )
        for _ in range(2)
    ]  # fmt: skip
    ends = [p.communicate() for p in both]
    assert [p.returncode for p in both] == [0, 0]
    assert all(out.startswith("dsprobe ") for out, _ in ends)
    making, waiting = sorted((err for _, err in ends), key=lambda err: "waiting" in err)
    assert "making" in making
    assert "making" not in waiting
    assert list((place / "home").iterdir()) == []


def test_the_second_call_needs_no_network(checkout: Path, place: Path) -> None:
    again = run(["unshare", "-n", checkout / "scripts/dsprobe", "--version"], place)
    assert (again.returncode, again.stderr) == (0, "")


def test_it_runs_from_anywhere_by_a_link_with_all_words_as_typed(
    checkout: Path, place: Path
) -> None:
    (place / "link").symlink_to(checkout / "scripts/dsprobe")
    done = run([place / "link", "info", "no such * file"], place)
    assert done.returncode == 1
    assert "no such * file" in done.stderr
    assert done.stderr.count("\n") == 1


@pytest.mark.bpf
def test_another_python_on_the_path_and_a_hostile_folder_change_nothing(
    checkout: Path, place: Path
) -> None:
    trap = place / "trap"
    trap.mkdir()
    for name in ("python", "python3", "pip"):
        (trap / name).write_text("#!/bin/sh\necho trapped; exit 1\n")
        (trap / name).chmod(0o755)
    for name in ("argparse", "bcc", "ctypes", "dsprobe", "json", "sitecustomize"):
        (trap / f"{name}.py").write_text("raise SystemExit('trapped')\n")
    path = f"{trap}:{clean_env(place / 'home')['PATH']}"
    env = clean_env(place / "home", PATH=path, PYTHONPATH=str(trap), PYTHONHOME=str(trap))
    own = place / "trap.sock"  # an agent of our own: it and its compiler are Pythons too
    for words in (["--version"], ["top", "--once", "--socket", own]):
        done = subprocess.run(
            [checkout / "scripts/dsprobe", *words],
            cwd=trap, env=env, capture_output=True, text=True,
        )  # fmt: skip
        assert (done.returncode, done.stderr) == (0, "")
        assert "trapped" not in done.stdout
    assert "net_rx" in done.stdout


def test_a_step_that_fails_is_one_sentence_with_the_place_of_its_log(
    checkout: Path, place: Path
) -> None:
    other = clone(place / "offline")
    done = run(
        ["unshare", "-n", other / "scripts/dsprobe", "--version"],
        place, PIP_RETRIES="0", TMPDIR=str(place),
    )  # fmt: skip
    assert done.returncode == 1
    last = done.stderr.splitlines()[-1]
    assert last.startswith("dsprobe: pip install failed: see ")
    assert "setuptools" in Path(last.split(" see ")[1]).read_text()
    shutil.rmtree(other)


def test_without_root_it_says_what_it_needs(checkout: Path, place: Path) -> None:
    done = run([*NOBODY, checkout / "scripts/dsprobe", "top", "--once"], place)
    assert done.returncode == 5
    assert done.stderr.count("\n") == 1
    for word in ("root", "sudo", "replay", "demo"):
        assert word in done.stderr
    outdated = clone(place / "not ours")
    done = run([*NOBODY, outdated / "scripts/dsprobe", "--version"], place)
    assert done.returncode == 5
    assert done.stderr.splitlines()[-1].startswith(f"dsprobe: cannot write in {outdated}: run sudo")


def test_a_user_without_root_sets_up_a_clone_of_their_own(place: Path) -> None:
    own = clone(place / "own")
    subprocess.run(["chown", "-R", "65534:65534", own], check=True)
    done = run([*NOBODY, own / "scripts/dsprobe", "info", own / "README.md"], place)
    assert done.returncode == 1, done.stderr
    *steps, error = done.stderr.splitlines()
    assert "making" in steps[0]
    assert "Python packages" in steps[-1]
    assert "README.md" in error
    assert (own / ".venv/bin/dsprobe").stat().st_uid == 65534
    shutil.rmtree(own)


def lane(screen: str, title: str) -> float:
    """The number that the screen shows for a lane now; 0 where it shows none yet."""
    found = re.search(rf"{title} +<?([\d.]+)", screen)
    return float(found[1]) if found else 0.0


@contextlib.contextmanager
def datagrams() -> Iterator[None]:
    """Datagrams over loopback, each one a NET_RX softirq's work, for at most 20 s."""
    over = threading.Event()

    def send() -> None:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as own:
            own.bind(("127.0.0.1", 0))
            end = time.monotonic() + 20
            while not over.is_set() and time.monotonic() < end:
                for _ in range(100):
                    own.sendto(b"x" * 64, own.getsockname())

    thread = threading.Thread(target=send)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


@contextlib.contextmanager
def connections(n: int) -> Iterator[None]:
    """``n`` TCP connections over loopback: twice as many sockets in use."""
    with contextlib.ExitStack() as held, socket.create_server(("127.0.0.1", 0)) as server:
        for _ in range(n):
            held.enter_context(socket.create_connection(server.getsockname()))
            held.enter_context(server.accept()[0])
        yield


@pytest.mark.bpf
def test_the_first_command_of_the_readme_and_its_lanes_move_under_load(
    checkout: Path, place: Path
) -> None:
    first = readme_commands()[0]
    assert first == "sudo scripts/dsprobe top"
    bin = place / "bin"
    bin.mkdir()
    if not shutil.which("sudo"):  # root's own machine may lack it
        (bin / "sudo").write_text('#!/bin/sh\nexec "$@"\n')
        (bin / "sudo").chmod(0o755)
    env = clean_env(place / "home")
    env["PATH"] += f":{bin}"
    with Terminal(place, ["sh", "-c", first], env=env, cwd=checkout) as t:
        before = lane(t.wait(lambda screen: lane(screen, "TCP sockets")), "TCP sockets")
        with datagrams():
            t.wait(lambda screen: lane(screen, "net_rx worst CPU") > 2)
        with connections(150):
            t.wait(lambda screen: lane(screen, "TCP sockets") >= before + 200)
        t.wait(lambda screen: lane(screen, "TCP sockets") < before + 200)
        t.press("q")
        assert t.exit_code() == 0


@pytest.mark.slow
def test_the_second_command_of_the_readme(checkout: Path, place: Path) -> None:
    second = readme_commands()[1]
    assert second == "scripts/test"
    started = time.time()
    done = subprocess.run(
        # One test stands for all: this one is among them.
        [*second.split(), "-q", "tests/commands/test_values.py"],
        cwd=checkout, env=clean_env(place / "home", CI="true"), capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    for step in ("ruff check", "ruff format", "mypy"):
        assert f"== {step}" in done.stderr
    assert " passed" in done.stdout
    assert (checkout / ".venv/.stampdev").stat().st_mtime >= started - 1
