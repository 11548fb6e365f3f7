"""`dsprobe record` as people run it."""

from __future__ import annotations

import os
import random
import re
import signal
import subprocess
import time
from pathlib import Path

import pytest

from dsprobe.recordings.filesession import open_file
from dsprobe.recordings.session import FOREVER, coverage
from dsprobe.recordings.streams import STATUSES
from tests.agent.recording import assert_whole, info, last, recorder, small_disk
from tests.support import programs
from tests.support.box import WORKS, Box, Process, end
from tests.support.wait import until

pytestmark = pytest.mark.bpf

PROBES = ("softirq", "napi", "tcp", "runq", "cpu", "sockets", "netdev")
SECOND = 10**9


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
    assert last(path) > asked - SECOND
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


@pytest.mark.parametrize("with_command", [False, True])
def test_full_disk(here: Box, agent: Process, tmp_path: Path, with_command: bool) -> None:
    small_disk(here, tmp_path, "96k")
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
    assert said["problems"] == ["the recording ended early: the agent has gone"]
    assert said["streams"]["cpu.usage"]["rows"] > 0
    assert last(path) > died - SECOND


@pytest.mark.parametrize("with_command", [False, True])
def test_agent_stopped_while_recording(
    here: Box, agent: Process, tmp_path: Path, with_command: bool
) -> None:
    """It lives and says nothing: that is no quiet host."""
    path = tmp_path / "r.mcap"
    words = ["--", "sh", "-c", "read x; exit 4"] if with_command else []
    process = here.popen("record", "-o", str(path), *words, stdin=subprocess.PIPE)
    until(lambda: path.exists() and last(path), "rows are written")
    os.kill(agent.pid, signal.SIGSTOP)
    try:
        assert process.stderr
        said = ""
        while "has said nothing for" not in said:
            said = process.stderr.readline()
            assert said, "it ended without a word"
        assert "restart it" in said
        if not with_command:
            process.send_signal(signal.SIGINT)
        _, err = process.communicate("x\n" if with_command else None, timeout=20)
    finally:
        os.kill(agent.pid, signal.SIGCONT)
    assert process.returncode == 3
    missing = r"what the agent saw last is missing( \([\d.]+ s\))?"
    early = f"recording ended early: {missing}: the agent at "
    assert re.match(f"dsprobe: {early}/run/dsprobe/agent.sock has said nothing", err), err
    code, told, err = info(here, path)
    assert code == 3
    (problem,) = told["problems"]
    assert re.match(f"the {early}", problem), problem


def test_agent_stopped_for_a_while(here: Box, agent: Process, tmp_path: Path) -> None:
    path = tmp_path / "r.mcap"
    process = here.popen("record", "-o", str(path))
    until(lambda: path.exists() and last(path), "rows are written")
    os.kill(agent.pid, signal.SIGSTOP)
    assert process.stderr
    said = ""
    while "has said nothing for" not in said:
        said = process.stderr.readline()
        assert said, "it ended without a word"
    os.kill(agent.pid, signal.SIGCONT)
    assert process.stderr.readline() == "dsprobe: the agent answers again\n"
    code, err = end(process, signal.SIGINT)
    assert code == 0, err
    assert_whole(here, path)
    with open_file(str(path)) as f:
        rows = f.read("meta.coverage", 0, FOREVER)
    rows = rows[rows["probe"] == "agent"]
    assert [STATUSES[s] for s in rows["status"]] == ["stalled", "attached"]
    assert int(rows["t"][1] - rows["t"][0]) > 2 * SECOND


def test_the_size_that_is_told_is_the_files(here: Box, agent: Process, tmp_path: Path) -> None:
    for words in (["record", "--duration", "1s"], ["save", "--last", "1m"]):
        path = tmp_path / f"{words[0]}.mcap"
        code, _, err = here.run(*words, "-o", str(path))
        assert code == 0, err
        assert f", {path.stat().st_size / 1e6:.2f} MB" in err


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
    until(lambda: here.commands() == {agent.pid}, "its own agent has ended", timeout=5)
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
    (own,) = here.commands() - {process.pid}
    ours = programs.held_by(own)
    assert len(ours) > 7
    process.kill()
    process.communicate()
    until(lambda: not here.pids(), "its agent has ended", timeout=6)
    # The kernel frees them after a grace period.
    until(lambda: not ours & programs.loaded(), "its programs are gone", timeout=10)


def test_own_agent_outlives_the_terminal(here: Box, tmp_path: Path) -> None:
    """When SSH drops, the whole session gets SIGHUP, but not the agent: it is in another one."""
    path = tmp_path / "r.mcap"
    process = recorder(here, path, start_new_session=True)
    until(lambda: path.exists() and last(path, "softirq.cpu"), "rows are written")
    (own,) = here.commands() - {process.pid}
    assert os.getsid(own) == own != os.getsid(process.pid)
    again = here.connect()
    os.killpg(process.pid, signal.SIGHUP)
    process.communicate(timeout=20)
    assert process.returncode == 0
    t = again.span()[1]
    until(lambda: again.wait(0.05) and again.span()[1] > t + SECOND, "it goes on for who looks")
    again.close()
    until(lambda: not here.pids(), "and ends after them", timeout=6)
