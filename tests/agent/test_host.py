"""Facts about the host, and the file systems that tracing wants, in mounts of our own."""

from __future__ import annotations

import os
import platform
import subprocess
import sys
from pathlib import Path

import pytest

from dsprobe.agent import host
from dsprobe.recordings import session
from dsprobe.recordings.session import coverage
from tests.support.box import Box, end, ready

PLACES = ("/sys/kernel/tracing", "/sys/fs/bpf")


def inside(here: Box, *command: str | bytes, check: bool = True) -> str:
    done = subprocess.run([*here.argv(), *command], capture_output=True, text=True, check=check)
    return done.stdout


def mounts(here: Box) -> list[str]:
    return [line.split()[1] for line in inside(here, "cat", "/proc/self/mounts").splitlines()]


def test_facts_are_those_of_the_machine() -> None:
    facts = host.facts()
    assert facts["kernel"] == platform.release()
    assert facts["host"] == platform.node()
    assert facts["boot_id"] == Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    assert facts["agent_pid"] == str(os.getpid())
    assert int(facts["cpus"]) == os.cpu_count()
    assert -86400 < int(facts["utc_offset_s"]) < 86400


@pytest.mark.bpf
def test_what_is_not_mounted_is_mounted_and_said(here: Box) -> None:
    for place in PLACES:
        while place in mounts(here):
            inside(here, "umount", "-l", place)
    agent = here.agent("--probes", "softirq,cpu")
    live = here.connect()
    said = ready(live, "host", "softirq")
    rows = live.read("meta.coverage", 0, session.FOREVER)
    reasons = set(rows["reason"][rows["probe"] == "host"])
    assert reasons == {f"mounted tracefs at {PLACES[0]}", f"mounted bpf at {PLACES[1]}"}
    assert {*PLACES} <= {*mounts(here)}
    assert said["softirq", ""].status == "attached"
    live.close()
    end(agent)
    # The next one finds them.
    agent = here.agent("--probes", "softirq")
    live = here.connect()
    ready(live, "softirq")
    assert ("host", "") not in coverage(live)
    live.close()
    end(agent)


@pytest.mark.bpf
def test_mounts_with_hostile_names_stop_nothing(here: Box, tmp_path: Path) -> None:
    """Anybody may mount something at a place with any name (fusermount)."""
    place = os.fsencode(tmp_path) + b"/\xff\xfe\x1c\x85 bpf bpf"
    os.mkdir(place)
    inside(here, "mount", "-t", "tmpfs", "none", place)
    agent = here.agent("--probes", "cpu")
    live = here.connect()
    assert ready(live, "cpu")["cpu", ""].status == "attached"
    live.close()
    assert end(agent)[0] == 0
    inside(here, "umount", place)


@pytest.mark.bpf
@pytest.mark.tools("capsh")
def test_what_cannot_be_mounted_is_said_and_the_rest_goes_on(here: Box) -> None:
    for place in PLACES:
        while place in mounts(here):
            inside(here, "umount", "-l", place)
    command = f"exec {sys.executable} -m dsprobe.agent.commands.main agent --probes cpu"
    agent = subprocess.Popen(
        here.argv("capsh", "--drop=cap_sys_admin", "--", "-c", command),
        cwd="/", stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    live = here.connect()
    assert ready(live, "cpu")["cpu", ""].status == "attached"
    rows = live.read("meta.coverage", 0, session.FOREVER)
    reasons = sorted(rows["reason"][rows["probe"] == "host"])
    assert len(reasons) == 2
    assert reasons[0] == f"bpf is not mounted at {PLACES[1]} and cannot be: Operation not permitted"
    live.close()
    end(agent)
