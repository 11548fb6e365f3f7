"""Pythons of several versions: this machine's, those that scripts/fetch-pythons brings, pyenv's."""

from __future__ import annotations

import functools
import os
import re
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
VERSIONS = ("3.10", "3.11", "3.12", "3.13", "3.14", "3.15")


@dataclass(frozen=True)
class Python:
    """``program`` runs under ``prefix``, with the same files under /tmp and in this checkout."""

    version: str
    program: str
    prefix: tuple[str, ...] = ()

    def command(self, *words: str) -> list[str]:
        return [*self.prefix, self.program, *words]


_IN_ROOT = """
root=$1; shift
for place in /proc /tmp "$CHECKOUT"; do
    mkdir -p "$root$place"
    mount --rbind "$place" "$root$place"
done
exec chroot "$root" "$@"
"""


def _in_root(version: str, root: str) -> Python:
    """As in a container: with a mount namespace and a root of its own."""
    script = _IN_ROOT.replace("$CHECKOUT", str(ROOT))
    prefix = ("unshare", "-m", "--propagation", "private", "sh", "-euc", script, "sh", root)
    return Python(version, f"/usr/bin/python{version}", prefix)


@functools.cache
def fetched() -> dict[str, str]:
    """Root folder by version; none for who may not change roots.  AssertionError where they cannot
    be had."""
    if os.geteuid() != 0:
        return {}
    done = subprocess.run(
        [ROOT / "scripts" / "fetch-pythons"], capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr
    return dict(line.split(" ", 1) for line in done.stdout.splitlines())


@functools.cache
def find(version: str) -> Python | None:
    """A Python of this version; None where there is none."""
    own = f"/usr/bin/python{version}"
    if os.access(own, os.X_OK):
        return Python(version, own)
    if version == "{}.{}".format(*sys.version_info):
        return Python(version, sys.executable)
    if root := fetched().get(version):
        return _in_root(version, root)
    pyenv = Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv"), "versions")
    for place in sorted(pyenv.glob(f"{version}.*")):
        if re.fullmatch(r"[\d.]+", place.name):
            return Python(version, str(place / "bin" / f"python{version}"))
    return None
