"""Places to set dsprobe up in: a fresh clone, and a Debian that holds nothing but its base."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import signal
import subprocess
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path

ROOT = Path(__file__).parents[2]

PASSED_ON = re.compile(r"(?i)^(PIP_|(http|https|ftp|no|all)_proxy$|SSL_CERT_FILE$|LANG$)")
"""How this machine reaches the package registries is no part of what is tried."""


def clone(to: Path) -> Path:
    """What is committed, as a user would get it."""
    subprocess.run(["git", "clone", "-q", "--no-hardlinks", ROOT, to], check=True)
    return to


def clean_env(home: Path, **more: str) -> dict[str, str]:
    """The environment of a user who has nothing: an empty home and the system's own PATH."""
    home.mkdir(exist_ok=True)
    kept = {k: v for k, v in os.environ.items() if PASSED_ON.match(k)}
    path = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
    return {**kept, "HOME": str(home), "PATH": path, "TERM": "xterm", **more}


def readme_commands() -> list[str]:
    """The commands of the README's first block of shell."""
    block = re.search(r"```sh\n(.*?)```", (ROOT / "README.md").read_text(), re.S)
    assert block
    return [line for line in block[1].splitlines() if line and not line.startswith("#")]


@contextlib.contextmanager
def folder() -> Iterator[Path]:
    """A folder that every user may enter; whatever still runs from it in the end is ended."""
    path = Path(tempfile.mkdtemp(prefix="dsprobe-setup-"))
    path.chmod(0o755)
    try:
        yield path
    finally:
        end_all(path)
        shutil.rmtree(path)


def running(under: Path) -> dict[int, str]:
    """Processes whose root, folder, program or first words lie under ``under``: id and words."""
    found = {}
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            words = (process / "cmdline").read_bytes().decode(errors="replace").split("\0")
            links = [os.readlink(process / name) for name in ("root", "cwd", "exe")]
            if any(w.startswith(str(under)) for w in words[:3] + links):
                found[int(process.name)] = " ".join(words)
    return found


def end_all(under: Path) -> None:
    """SIGKILL what runs under ``under``."""
    for process in running(under):
        with contextlib.suppress(ProcessLookupError):
            os.kill(process, signal.SIGKILL)


BARE = """
mount --bind "$1" "$1" # the root of a machine is a mount point, which ip-netns(8) counts on
for d in proc sys dev; do mount --rbind /$d "$1/$d"; done
cd "$1"
shift
exec env -i "$@"
"""


class BareDebian:
    """Debian's minimal base system under ``root``, entered by chroot.

    Its mounts live in a mount namespace of the command, so they vanish with it.
    """

    def __init__(self, root: Path) -> None:
        self.root = root
        subprocess.run(
            ["debootstrap", "--variant=minbase", "bookworm", root], check=True, capture_output=True
        )
        self._connect()
        clone(root / "opt/dsprobe")

    def _connect(self) -> None:
        """Give it what this machine needs to reach the package registries."""
        for name in ("/etc/resolv.conf", "/etc/hosts", "/etc/pip.conf"):
            if os.path.exists(name):
                shutil.copy(name, self.root / name[1:])
        for name in ("/etc/apt/apt.conf.d", "/etc/xdg/pip"):
            if os.path.isdir(name):
                shutil.copytree(name, self.root / name[1:], dirs_exist_ok=True)
        certificates = os.environ.get("PIP_CERT") or os.environ.get("SSL_CERT_FILE")
        self._env = clean_env(self.root / "root", HOME="/root")
        if certificates:
            # Not at the usual place: the set-up is to install what belongs there.
            shutil.copy(certificates, self.root / "etc/certificates-of-the-host.crt")
            for name in ("PIP_CERT", "SSL_CERT_FILE"):
                self._env[name] = "/etc/certificates-of-the-host.crt"

    def command(self, *words: str, env: Mapping[str, str] | None = None) -> list[str]:
        """A command line that runs ``words`` inside, with the folder of dsprobe as its own."""
        variables = [f"{k}={v}" for k, v in {**self._env, **(env or {})}.items()]
        inside = ["chroot", ".", "sh", "-c", 'cd /opt/dsprobe && exec "$@"', "-", *words]
        return [
            "unshare", "--mount", "--propagation", "private",
            "sh", "-ec", BARE, "-", str(self.root), *variables, *inside,
        ]  # fmt: skip
