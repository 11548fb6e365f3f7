"""`dsprobe record` and `save` as people run them."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from dsprobe.recordings.filesession import open_file
from dsprobe.recordings.session import FOREVER, coverage
from dsprobe.recordings.streams import STREAMS
from tests.support import programs
from tests.support.box import WORKS, Box, Process, box, end, ready
from tests.support.wait import until

pytestmark = pytest.mark.bpf

PROBES = ("softirq", "napi", "tcp", "runq", "cpu", "sockets", "netdev")
SECOND = 10**9


@pytest.fixture(scope="module")
def shared() -> Iterator[Box]:
    with box() as it:
        yield it


@pytest.fixture
def here(shared: Box) -> Iterator[Box]:
    yield shared
    shared.clear()


@pytest.fixture
def agent(here: Box) -> Iterator[Process]:
    """A daemon with all probes attached and rows of all that are never quiet."""
    process = here.agent()
    live = here.connect()
    ready(live, *PROBES)
    for stream in ("cpu.usage", "softirq.cpu"):
        until(lambda: (live.wait(0.05), len(live.read(stream, 0, FOREVER)))[1], stream)  # noqa: B023
    live.close()
    yield process
    if process.poll() is None:
        end(process)


def recorder(here: Box, path: Path, *words: str, **options: Any) -> Process:
    return here.popen("record", "-o", str(path), *words, stdout=subprocess.DEVNULL, **options)


def last(path: Path, *streams: str) -> int:
    """``t`` of the last row of ``streams`` (default: of all but meta)."""
    with open_file(str(path)) as f:
        names = streams or [n for n in f.streams if n in STREAMS and "." in n and n[:4] != "meta"]
        ts = [f.read(n, 0, FOREVER)["t"] for n in names if not n.startswith("rollup")]
        return max((int(t[-1]) for t in ts if len(t)), default=0)


def info(here: Box, path: Path) -> tuple[int, dict[str, Any], str]:
    code, out, err = here.run("info", "--json", str(path))
    assert "Traceback" not in err
    return code, json.loads(out), err


def assert_whole(here: Box, path: Path) -> dict[str, Any]:
    code, said, err = info(here, path)
    assert (code, err) == (0, "")
    assert not said["truncated"]
    assert said["streams"]["cpu.usage"]["rows"] > 0
    assert said["streams"]["softirq.cpu"]["rows"] > 0
    assert os.stat(path).st_mode & 0o777 == 0o600
    return said


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_signals_leave_a_whole_file(here: Box, tmp_path: Path, number: int) -> None:
    path = tmp_path / "r.mcap"
    process = recorder(here, path)
    until(lambda: path.exists() and last(path, "softirq.cpu"), "rows are written")
    asked = time.monotonic_ns()
    code, err = end(process, number)
    assert code == 0, err
    assert err.splitlines()[-1].startswith(f"{path}: ")
    assert_whole(here, path)
    assert last(path) > asked - SECOND // 2
    until(lambda: not here.pids(), "its agent has ended", timeout=5)


def test_signal_while_it_starts(here: Box, tmp_path: Path) -> None:
    path = tmp_path / "r.mcap"
    process = recorder(here, path)
    until(lambda: path.exists(), "it has begun")
    code, err = end(process, signal.SIGINT)
    assert code == 0, err
    assert "Traceback" not in err
    assert info(here, path)[0] == 0


def test_duration_and_what_is_in_it(here: Box, agent: Process, tmp_path: Path) -> None:
    path = tmp_path / "r.mcap"
    code, out, err = here.run("record", "-o", str(path), "--duration", "2s")
    assert (code, out) == (0, ""), err
    said = assert_whole(here, path)
    assert 1.5 < said["duration_s"] < 4.5
    assert said["coverage"]["softirq"]["status"] in WORKS
    with open_file(str(path)) as f:
        overhead = f.read("meta.overhead", 0, FOREVER)
        assert len(f.read("meta.clock", 0, FOREVER)) >= 2
    assert len(overhead) >= 2
    assert agent.poll() is None


def test_file_that_exists_is_left_alone(here: Box, agent: Process, tmp_path: Path) -> None:
    path = tmp_path / "r.mcap"
    path.write_text("mine")
    code, _, err = here.run("record", "-o", str(path), "--duration", "1s")
    assert code == 1
    assert err == f"dsprobe: {path} exists: name another file, or use --force\n"
    assert path.read_text() == "mine"


# -- record -- CMD -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("script", "code"), [("exit 0", 0), ("exit 7", 7), ("kill -9 $$", 137), ("kill -15 $$", 143)]
)
def test_exit_code_of_the_command_is_passed_on(
    here: Box, agent: Process, tmp_path: Path, script: str, code: int
) -> None:
    path = tmp_path / "r.mcap"
    got, out, err = here.run("record", "-o", str(path), "--", "sh", "-c", f"echo hello; {script}")
    assert (got, out) == (code, "hello\n"), err
    assert info(here, path)[0] == 0


def test_command_is_seen_from_its_start(here: Box, tmp_path: Path) -> None:
    path, ran = tmp_path / "r.mcap", tmp_path / "ran"
    script = f"python3 -c 'import time; print(time.monotonic_ns())' > {ran}"
    code, _, err = here.run("record", "-o", str(path), "--", "sh", "-c", script)
    assert code == 0, err
    with open_file(str(path)) as f:
        attached = f.read("meta.coverage", 0, FOREVER)
        probes = attached[(attached["program"] == "") & (attached["status"] == 0)]
        assert {*PROBES} <= set(probes["probe"])
        assert int(probes["t"].max()) < int(ran.read_text())
        rows = f.read("softirq.cpu", 0, FOREVER)
    assert int(rows["t"][-1]) > int(ran.read_text())


def test_command_that_does_not_exist(here: Box, agent: Process, tmp_path: Path) -> None:
    code, _, err = here.run("record", "-o", str(tmp_path / "r.mcap"), "--", "/no/such/thing")
    assert code == 1
    assert "dsprobe: /no/such/thing cannot be run: No such file or directory\n" in err


def test_command_outlives_duration_and_file_is_whole_at_once(
    here: Box, agent: Process, tmp_path: Path
) -> None:
    path, fifo = tmp_path / "r.mcap", tmp_path / "fifo"
    os.mkfifo(fifo)
    process = recorder(here, path, "--duration", "1s", "--", "sh", "-c", f"cat {fifo}; exit 5")
    until(lambda: path.exists() and info(here, path)[0] == 0 and not info(here, path)[1]["live"],
          "the file is whole")  # fmt: skip
    assert process.poll() is None  # the command goes on, and we wait for it
    fifo.write_text("done\n")
    _, err = process.communicate(timeout=20)
    assert process.returncode == 5, err


def test_ctrl_c_reaches_both(here: Box, agent: Process, tmp_path: Path) -> None:
    path = tmp_path / "r.mcap"
    process = recorder(
        here, path, "--", "sh", "-c", "trap 'exit 9' INT; while :; do sleep 0.1; done"
    )
    until(lambda: path.exists() and last(path), "rows are written")
    for pid in here.pids() - {agent.pid}:
        os.kill(pid, signal.SIGINT)
    _, err = process.communicate(timeout=20)
    assert process.returncode == 9, err
    assert info(here, path)[0] == 0


@pytest.mark.root
def test_command_runs_as_who_called_sudo(here: Box, agent: Process, tmp_path: Path) -> None:
    tmp_path.chmod(0o755)
    env = os.environ | {"SUDO_UID": "65534", "SUDO_GID": "65534"}
    process = here.popen("record", "-o", str(tmp_path / "r.mcap"), "--", "id", "-u", "-n", env=env)
    out, err = process.communicate(timeout=30)
    assert (process.returncode, out) == (0, "nobody\n"), err


# -- what goes wrong ---------------------------------------------------------------------------


def small_disk(here: Box, folder: Path, size: str) -> None:
    """A tmpfs of ``size`` at ``folder``, in the box."""
    subprocess.run(here.argv("mount", "-t", "tmpfs", "-o", f"size={size}", "none", str(folder)),
                   check=True)  # fmt: skip


@pytest.mark.parametrize("with_command", [False, True])
def test_full_disk(here: Box, agent: Process, tmp_path: Path, with_command: bool) -> None:
    small_disk(here, tmp_path, "32k")
    inside = str(tmp_path / "r.mcap")
    words = ["--", "sh", "-c", "read x; exit 4"] if with_command else []
    process = here.popen("record", "-o", inside, *words, stdin=subprocess.PIPE)
    assert process.stderr
    said = ""
    while "No space left" not in said:
        said = process.stderr.readline()
        assert said, "it ended without a word"
    assert said.startswith(f"dsprobe: {inside}: No space left on device: the recording ends here")
    assert "can be read" in said
    if with_command:
        assert said.endswith("; sh goes on\n")
        assert process.poll() is None
    process.communicate("x\n", timeout=20)
    assert process.returncode == 3
    path = Path(here.path(inside))
    with open_file(str(path)) as f:
        assert len(f.read("cpu.usage", 0, FOREVER)) > 0
        assert f.read("cpu.usage", 0, FOREVER)["dt"].all()
    assert agent.poll() is None
    here.connect().close()
    code, _, err = here.run("info", inside)
    assert code == 3
    assert "Traceback" not in err
    subprocess.run(here.argv("umount", "-l", str(tmp_path)), check=True)


def test_agent_killed_while_recording(here: Box, agent: Process, tmp_path: Path) -> None:
    path = tmp_path / "r.mcap"
    process = recorder(here, path)
    until(lambda: path.exists() and last(path), "rows are written")
    died = time.monotonic_ns()
    agent.kill()
    agent.communicate()
    _, err = process.communicate(timeout=10)
    assert process.returncode == 3
    assert err.endswith("dsprobe: recording ended early: the agent has gone\n")
    code, said, _ = info(here, path)
    assert code == 3  # it holds less than was asked for, and says so
    assert said["streams"]["cpu.usage"]["rows"] > 0
    assert last(path) > died - SECOND


def test_probes_of_its_own_beside_a_running_agent(
    here: Box, agent: Process, tmp_path: Path
) -> None:
    path = tmp_path / "r.mcap"
    before = programs.held_by(agent.pid)
    code, _, err = here.run("record", "-o", str(path), "--probes", "softirq", "--duration", "1s")
    assert code == 0, err
    with open_file(str(path)) as f:
        said = coverage(f)
        assert said["softirq", ""].status in WORKS
        assert said["tcp", ""].status == "off"
        assert len(f.read("softirq.cpu", 0, FOREVER)) > 0
        assert not len(f.read("cpu.usage", 0, FOREVER))
    assert programs.held_by(agent.pid) == before
    until(lambda: here.pids() == {agent.pid}, "its own agent has ended", timeout=5)
    assert sorted(os.listdir(here.path("/run/dsprobe"))) == ["agent.sock", "agent.sock.lock"]


def killed_at_random(here: Box, paths: list[Path], dice: random.Random) -> dict[Path, int]:
    """When each of these recorders, once all of them record, was killed."""
    running = [(path, recorder(here, path)) for path in paths]
    until(lambda: all(p.exists() and last(p) for p in paths), "all record", timeout=60)
    dice.shuffle(running)
    began = time.monotonic()
    moments = sorted(dice.uniform(0, 2.5) for _ in paths)
    killed = {}
    for (path, process), moment in zip(running, moments, strict=True):
        time.sleep(max(0.0, began + moment - time.monotonic()))
        process.kill()
        killed[path] = time.monotonic_ns()
        process.communicate()
    return killed


def test_twenty_kills(here: Box, agent: Process, tmp_path: Path) -> None:
    """At random moments: every file opens, less than a second is missing, exit 3 and why."""
    seed = random.SystemRandom().randrange(1 << 32)
    print("seed", seed)
    for wave in "ab":  # twenty at once would be more viewers than an agent takes
        paths = [tmp_path / f"{wave}{i}.mcap" for i in range(10)]
        for path, when in killed_at_random(here, paths, random.Random(seed)).items():
            assert last(path) > when - SECOND, f"{(when - last(path)) / 1e9:.2f} s missing"
            with open_file(str(path)) as f:
                assert f.problems
                assert len(f.read("meta.session", 0, FOREVER)) > 5
    code, said, err = info(here, tmp_path / "a0.mcap")
    assert code == 3
    assert said["truncated"]
    assert err.startswith(f"dsprobe: {tmp_path}/a0.mcap: ")
    assert agent.poll() is None


def test_kill_before_anything_is_in_it(here: Box, agent: Process, tmp_path: Path) -> None:
    path = tmp_path / "r.mcap"
    process = recorder(here, path)
    until(lambda: path.exists() and path.stat().st_size, "it is there")
    process.kill()
    process.communicate()
    code, said, err = info(here, path)
    assert code == 3
    assert said["truncated"]
    assert err.startswith("dsprobe: ")


def test_own_agent_ends_when_its_recorder_is_killed(here: Box, tmp_path: Path) -> None:
    path = tmp_path / "r.mcap"
    process = recorder(here, path)
    until(lambda: path.exists() and last(path, "softirq.cpu"), "rows are written")
    (own,) = here.pids() - {process.pid}
    ours = programs.held_by(own)
    assert len(ours) == 7
    process.kill()
    process.communicate()
    until(lambda: not here.pids(), "its agent has ended", timeout=6)
    assert not ours & programs.loaded()


def test_own_agent_outlives_the_terminal(here: Box, tmp_path: Path) -> None:
    """When SSH drops, the whole session gets SIGHUP, but not the agent: it is in another one."""
    path = tmp_path / "r.mcap"
    process = recorder(here, path, start_new_session=True)
    until(lambda: path.exists() and last(path, "softirq.cpu"), "rows are written")
    (own,) = here.pids() - {process.pid}
    assert os.getsid(own) == own != os.getsid(process.pid)
    again = here.connect()
    os.killpg(process.pid, signal.SIGHUP)
    process.communicate(timeout=20)
    assert process.returncode == 0
    t = again.span()[1]
    until(lambda: again.wait(0.05) and again.span()[1] > t + SECOND, "it goes on for who looks")
    again.close()
    until(lambda: not here.pids(), "and ends after them", timeout=6)


# -- save --------------------------------------------------------------------------------------


def test_save_what_just_happened(here: Box, agent: Process, tmp_path: Path) -> None:
    live = here.connect()
    until(lambda: live.wait(0.1) and live.span()[1] - live.span()[0] > 2 * SECOND, "2 s have gone")
    live.close()
    now = time.monotonic_ns()
    code, _, err = here.run("save", "--last", "1s", "-o", str(tmp_path / "s.mcap"))
    assert code == 0, err
    said = assert_whole(here, tmp_path / "s.mcap")
    assert 0.7 < said["duration_s"] < 1.8
    assert last(tmp_path / "s.mcap") > now - SECOND // 2
    assert "holds no more" not in err
    with open_file(str(tmp_path / "s.mcap")) as f:
        assert coverage(f)["softirq", ""].status in WORKS  # said long before


def test_save_of_more_than_is_held_says_so(here: Box, agent: Process, tmp_path: Path) -> None:
    code, _, err = here.run("save", "--last", "5m", "-o", str(tmp_path / "s.mcap"))
    assert code == 0
    assert "the agent holds no more than that; 300 s were asked for" in err
    assert_whole(here, tmp_path / "s.mcap")


def test_save_while_recording(here: Box, tmp_path: Path) -> None:
    """Beside the recorder's own agent; neither disturbs the other."""
    path = tmp_path / "r.mcap"
    process = recorder(here, path)
    until(lambda: path.exists() and last(path, "cpu.usage"), "rows are written")
    until(lambda: last(path, "softirq.cpu"), "and of softirqs")
    code, _, err = here.run("save", "--last", "10s", "-o", str(tmp_path / "s.mcap"))
    assert code == 0, err
    assert end(process, signal.SIGINT)[0] == 0
    assert_whole(here, path)
    assert_whole(here, tmp_path / "s.mcap")
    # What both hold is the same, row for row.
    with open_file(str(path)) as r, open_file(str(tmp_path / "s.mcap")) as s:
        for stream in ("cpu.usage", "softirq.cpu"):
            mine, theirs = r.read(stream, 0, FOREVER), s.read(stream, 0, FOREVER)
            first, final = int(mine["t"][0]), int(theirs["t"][-1])
            assert first <= final
            both = [x[(x["t"] >= first) & (x["t"] <= final)] for x in (mine, theirs)]
            assert len(both[0]) > 0
            assert (both[0] == both[1]).all()
            assert len(both[0]) == len(both[1])


def test_save_without_an_agent(here: Box, tmp_path: Path) -> None:
    code, _, err = here.run("save", "--last", "1m", "-o", str(tmp_path / "s.mcap"))
    assert code == 1
    assert err == (
        "dsprobe: no agent listens at /run/dsprobe/agent.sock: start one with dsprobe agent\n"
    )
    assert not (tmp_path / "s.mcap").exists()


def test_save_onto_a_full_disk(here: Box, agent: Process, tmp_path: Path) -> None:
    small_disk(here, tmp_path, "12k")
    live = here.connect()
    until(lambda: live.wait(0.1) and live.span()[1] - live.span()[0] > SECOND, "some has gone")
    live.close()
    code, _, err = here.run("save", "--last", "1m", "-o", str(tmp_path / "s.mcap"))
    assert code == 3
    assert "No space left on device" in err
    assert "Traceback" not in err
    assert agent.poll() is None
    subprocess.run(here.argv("umount", "-l", str(tmp_path)), check=True)
