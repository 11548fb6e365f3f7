"""Who a process is: names, PIDs, user, control group, container and pod, from /proc/PID.

All of it is what the process, or whoever started its container, chose to write there: sizes are
capped before they are read, and text is made printable.
Source: proc(5), cgroups(7); the paths are those of systemd's, cgroupfs's and the container
engines' own naming.
"""

from __future__ import annotations

import os
import re
from dataclasses import dataclass, field
from pathlib import Path

MAX_COMM, MAX_COMMAND, MAX_CGROUP = 64, 1024, 1024
_READ = 64 << 10

# docker-<id>.scope, cri-containerd-<id>.scope, crio-<id>.scope, libpod-<id>.scope under systemd;
# under cgroupfs the id is the folder, and containerd's own tools put a namespace above it.
_ID = re.compile(r"^(?:[a-z][a-z0-9-]*-)?([0-9a-f]{64}|[0-9a-f]{32}-[0-9]{1,10})(?:\.scope)?$")
# conmon's own group lies beside its container's, under the same id.
_NOT_INSIDE = re.compile(r"(?:^|-)conmon-")
# pod<uid> under cgroupfs, kubepods-burstable-pod<uid with _ for ->.slice under systemd; a static
# pod's UID is the hash of its file, without dashes.
_HEX = r"[0-9a-f]"
_POD = re.compile(
    rf"^(?:[a-z]+-)*pod({_HEX}{{8}}(?:[-_]{_HEX}{{4}}){{3}}[-_]{_HEX}{{12}}|{_HEX}{{32}})"
    r"(?:\.slice)?$"
)


@dataclass(frozen=True)
class Facts:
    """``ns_pids`` are its PIDs, from this namespace inwards."""

    pid: int
    parent: int = 0
    uid: int = 0
    ns_pids: tuple[int, ...] = ()
    comm: str = ""
    command: str = ""
    cgroup: str = ""
    container: str = ""
    pod: str = ""

    @property
    def ns_pid(self) -> int:
        """Its PID in its own namespace."""
        return self.ns_pids[-1] if self.ns_pids else self.pid


@dataclass(frozen=True)
class Status:
    """What /proc/PID/status says; what it does not say is 0 or empty."""

    parent: int = 0
    uid: int = 0
    ns_pids: tuple[int, ...] = field(default=())


def facts(pid: int, proc: Path = Path("/proc")) -> Facts | None:
    """What is known of ``pid``; None where there is no such process (any more).

    Read through one open directory, so that a PID used again gives no mixture of two processes.
    """
    try:
        directory = os.open(proc / str(pid), os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    except OSError:
        return None
    try:
        status = parse_status(_read("status", directory))
        comm = printable(_read("comm", directory).rstrip(b"\n"), MAX_COMM)
        command = parse_command(_read("cmdline", directory))
        cgroup = parse_cgroup(_read("cgroup", directory))
    except OSError:
        return None
    finally:
        os.close(directory)
    return Facts(
        pid, status.parent, status.uid, status.ns_pids, comm, command,
        cgroup[:MAX_CGROUP], container(cgroup), pod(cgroup),
    )  # fmt: skip


def _read(name: str, directory: int) -> bytes:
    fd = os.open(name, os.O_RDONLY | os.O_CLOEXEC, dir_fd=directory)
    try:
        data = b""
        while len(data) < _READ and (more := os.read(fd, _READ - len(data))):
            data += more
        return data
    finally:
        os.close(fd)


def printable(raw: bytes, most: int) -> str:
    """At most ``most`` characters of text, without what would move a terminal; ? for the rest."""
    text = raw[: 4 * most].decode("utf-8", "replace")[:most]
    return "".join(c if c.isprintable() and c != "\ufffd" else "?" for c in text)


def parse_command(raw: bytes) -> str:
    """/proc/PID/cmdline: words that end in NUL, joined by spaces; "" for a kernel thread."""
    return printable(raw[: 4 * MAX_COMMAND].rstrip(b"\0").replace(b"\0", b" "), MAX_COMMAND)


def parse_status(raw: bytes) -> Status:
    """/proc/PID/status.  The name in its first line has its newlines escaped by the kernel."""
    values: dict[bytes, list[int]] = {}
    for line in raw.split(b"\n"):
        key, _, rest = line.partition(b":")
        if key in (b"PPid", b"Uid", b"NSpid"):
            values[key] = [int(w) for w in rest.split()[:64] if w.isdigit() and len(w) < 11]
    one = {key: found[0] for key, found in values.items() if found}
    return Status(one.get(b"PPid", 0), one.get(b"Uid", 0), tuple(values.get(b"NSpid", ())))


def parse_cgroup(raw: bytes) -> str:
    """The control group in /proc/PID/cgroup that tells the most.

    Lines are ``id:controllers:path``; cgroup v2 is the line ``0::path``.  On a host with both, v2
    may hold nothing but the root, and v1's hierarchies name the same place: so the path that names
    a container, else the longest, where several do the first of them.
    """
    paths = []
    for line in raw.split(b"\n"):
        parts = line.split(b":", 2)
        if len(parts) == 3 and parts[2].startswith(b"/"):
            paths.append(printable(parts[2], 4096))
    return max(paths, key=lambda p: (bool(container(p)), bool(pod(p)), len(p)), default="")


def container(cgroup: str) -> str:
    """Id of the container whose group this is or lies in, the innermost; "" for none."""
    for part in reversed(cgroup.split("/")):
        # containerd under systemd's driver of old: kubepods-...slice:cri-containerd:<id>
        name = part.rsplit(":", 1)[-1]
        match = _ID.match(name)
        if match and not _NOT_INSIDE.search(name):
            return match[1]
    return ""


def pod(cgroup: str) -> str:
    """UID of the Kubernetes pod whose group this lies in; "" for none."""
    for part in cgroup.split("/"):
        match = _POD.match(part.split(":", 1)[0])
        if match:
            return match[1].replace("_", "-")
    return ""
