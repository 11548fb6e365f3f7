"""Facts of a process: real control-group paths, real processes, and what hostile ones write."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from dsprobe.probes import processes
from dsprobe.probes.processes import Facts, facts
from tests.support.wait import until

ID = "9c2f1e0d7b8a4c6f5e3d2b1a0f9e8d7c6b5a4f3e2d1c0b9a8f7e6d5c4b3a2f1e"
UID = "2c48913c-b29f-11e7-9350-020968147796"
ESCAPED = UID.replace("-", "_")
STATIC = "f4d1b6a8e0c94d5f8b7a6c5d4e3f2a1b"

PATHS = [
    # Docker: cgroupfs, systemd, rootless, inside a slice of its own
    (f"/docker/{ID}", ID, ""),
    (f"/system.slice/docker-{ID}.scope", ID, ""),
    (f"/user.slice/user-1000.slice/user@1000.service/user.slice/docker-{ID}.scope", ID, ""),
    (f"/system.slice/docker-{ID}.scope/init.scope", ID, ""),
    (f"/gpu.slice/docker-{ID}.scope", ID, ""),
    # Podman: with and without the folder it makes inside
    (f"/machine.slice/libpod-{ID}.scope", ID, ""),
    (f"/machine.slice/libpod-{ID}.scope/container", ID, ""),
    (f"/user.slice/user-0.slice/session-2.scope/libpod-{ID}", ID, ""),
    (f"/machine.slice/libpod-conmon-{ID}.scope", "", ""),
    # containerd's own tools
    (f"/default/{ID}", ID, ""),
    (f"/system.slice/nerdctl-{ID}.scope", ID, ""),
    # Kubernetes, cgroupfs driver: three classes of service, containerd, Docker, CRI-O
    (f"/kubepods/burstable/pod{UID}/{ID}", ID, UID),
    (f"/kubepods/besteffort/pod{UID}/{ID}", ID, UID),
    (f"/kubepods/pod{UID}/{ID}", ID, UID),
    (f"/kubepods/burstable/pod{UID}/crio-{ID}", ID, UID),
    (f"/kubepods/burstable/pod{STATIC}/{ID}", ID, STATIC),
    # Kubernetes, systemd driver
    (
        "/kubepods.slice/kubepods-burstable.slice/"
        f"kubepods-burstable-pod{ESCAPED}.slice/cri-containerd-{ID}.scope",
        ID,
        UID,
    ),
    (f"/kubepods.slice/kubepods-pod{ESCAPED}.slice/docker-{ID}.scope", ID, UID),
    (f"/kubepods.slice/kubepods-besteffort.slice/kubepods-besteffort-pod{ESCAPED}.slice"
     f"/crio-{ID}.scope/container", ID, UID),
    (f"/kubepods.slice/kubepods-pod{STATIC}.slice/crio-{ID}.scope", ID, STATIC),
    (f"/kubepods.slice/kubepods-pod{ESCAPED}.slice/crio-conmon-{ID}.scope", "", UID),
    # containerd with an older runc under systemd: the slice and the id in one name
    (f"/system.slice/containerd.service/kubepods-burstable-pod{ESCAPED}.slice:cri-containerd:{ID}",
     ID, UID),
    # Kubernetes in Docker: the innermost container, and the pod of the inner cluster
    (f"/docker/{'0' * 64}/kubelet.slice/kubelet-kubepods.slice/"
     f"kubelet-kubepods-burstable-pod{ESCAPED}.slice/cri-containerd-{ID}.scope", ID, UID),
    # seen from another control-group namespace
    (f"/../../kubepods/burstable/pod{UID}/{ID}", ID, UID),
    # Amazon ECS
    ("/ecs/55091c13-b8cf-4801-b527-f4601742204d/432624d2150b349fe35ba397284dea78-3293472498",
     "432624d2150b349fe35ba397284dea78-3293472498", ""),
    # none
    ("/", "", ""),
    ("/user.slice/user-1000.slice/session-3.scope", "", ""),
    ("/system.slice/slurmstepd.scope/job_4711/step_0/user/task_0", "", ""),
    (f"/system.slice/x-{ID[:60]}.scope", "", ""),
    (f"/system.slice/docker-{ID}x.scope", "", ""),
    ("/kubepods/burstable/podcast", "", ""),
]  # fmt: skip


@pytest.mark.parametrize(("path", "container", "pod"), PATHS)
def test_container_and_pod_of_a_control_group(path: str, container: str, pod: str) -> None:
    assert (processes.container(path), processes.pod(path)) == (container, pod)


V1 = f"""12:pids:/kubepods/burstable/pod{UID}/{ID}
11:memory:/kubepods/burstable/pod{UID}/{ID}
10:cpu,cpuacct:/kubepods/burstable/pod{UID}/{ID}
9:name=systemd:/kubepods/burstable/pod{UID}/{ID}
8:misc:/
0::/system.slice/containerd.service
"""


@pytest.mark.parametrize(
    ("text", "path"),
    [
        ("0::/user.slice/a.scope\n", "/user.slice/a.scope"),
        (V1, f"/kubepods/burstable/pod{UID}/{ID}"),
        ("2:memory:/\n1:name=systemd:/user.slice\n0::/\n", "/user.slice"),
        ("0::/a:b:c\n", "/a:b:c"),
        ("0::/a (deleted)\n", "/a (deleted)"),
        ("", ""),
        ("nonsense\n1:2\n\0\n", ""),
        ("0::relative\n", ""),
        ("0::/a\x1b[2Jb\n", "/a?[2Jb"),
    ],
)
def test_the_control_group_that_tells_most(text: str, path: str) -> None:
    assert processes.parse_cgroup(text.encode()) == path


def test_status_of_a_process_in_two_namespaces() -> None:
    raw = b"Name:\tpy\\nPPid:\t1\nPPid:\t77\nUid:\t1000\t0\t0\t0\nNSpid:\t800\t12\t1\n"
    status = processes.parse_status(raw)
    assert (status.parent, status.uid, status.ns_pids) == (77, 1000, (800, 12, 1))
    assert Facts(800, ns_pids=status.ns_pids).ns_pid == 1


@pytest.mark.parametrize(
    "raw", [b"", b"\0" * 100, b"PPid:\nUid: x\nNSpid:\t" + b"9" * 5000, b"Uid:\t-1\n"]
)
def test_a_status_that_says_nothing(raw: bytes) -> None:
    assert processes.parse_status(raw) == processes.Status()


def test_text_is_capped_and_moves_no_terminal() -> None:
    assert processes.parse_command(b"a\0b c\0\xff\x1b]0;x\x07\n\0") == "a b c ??]0;x??"
    assert len(processes.parse_command("é".encode() * 9000)) == processes.MAX_COMMAND
    assert processes.printable("\u202eabc\u200b".encode(), 9) == "?abc?"


def test_a_real_process(tmp_path: Path) -> None:
    words = ["sleep", "100"]
    with subprocess.Popen(words) as child:
        try:
            known = until(lambda: (f := facts(child.pid)) and f.comm == "sleep" and f, "it runs")
            assert known.command == "sleep 100"
            assert (known.parent, known.uid, known.ns_pid) == (os.getpid(), os.geteuid(), child.pid)
        finally:
            child.kill()
    assert facts(child.pid) is None


@pytest.mark.root
def test_the_first_process_of_a_namespace() -> None:
    words = ["unshare", "--pid", "--fork", "--kill-child", sys.executable, "-c", "input()"]
    with subprocess.Popen(words, stdin=subprocess.PIPE) as outer:
        try:
            children = Path(f"/proc/{outer.pid}/task/{outer.pid}/children")
            pid = until(lambda: int(children.read_text() or 0), "it has forked")
            known = facts(pid)
            assert known
            assert (known.pid, known.ns_pid, known.ns_pids) == (pid, 1, (pid, 1))
            assert known.parent == outer.pid
        finally:
            outer.send_signal(signal.SIGKILL)
