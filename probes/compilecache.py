"""Modules that were compiled before: loading one takes milliseconds, compiling half a second.

A folder of root's, /var/cache/dsprobe, has a file for each, named by a hash of all that it was made
from.  What is in it runs in the kernel, so a file counts only where it and the folder belong to
root and nobody else can write them; a checksum tells damage.  Anything else is as good as nothing
there: then the module is compiled, and kept if it can be.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib.util
import json
import os
import re
import stat
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from dsprobe.probes.module import Module

PLACE = "/var/cache/dsprobe"
KEPT = 16
"""How many modules are kept: those used last."""
_MAGIC = b"dsprobe module 1\n"
_MAX_SIZE = 32 << 20
_OURS = re.compile(r"\.?[0-9a-f]{64}(\.\w+)?")
_HERE = Path(__file__).resolve().parent
_FLAGS = os.O_NOFOLLOW | os.O_CLOEXEC


def key(job: dict[str, Any]) -> str:
    """Name of what :class:`~dsprobe.probes.compiler.Compiler` makes of ``job`` on this machine."""
    files = [_HERE / "compiler.py", _HERE / "module.py", *sorted(_HERE.glob("include/**/*.h"))]
    texts = [[str(file.relative_to(_HERE)), file.read_text()] for file in files]
    made_from = [job, list(os.uname()), _bcc(), texts]
    return hashlib.sha256(json.dumps(made_from).encode()).hexdigest()


def _bcc() -> list[str]:
    """Which bcc would compile, without importing it."""
    try:
        spec = importlib.util.find_spec("bcc")
    except ValueError:  # it is loaded, and is no module
        spec = None
    if spec is None or not spec.origin:
        return []
    version = Path(spec.origin).with_name("version.py")
    return [spec.origin, version.read_text() if version.exists() else ""]


class Cache:
    """The modules in ``place``, by default what DSPROBE_CACHE names, else :data:`PLACE`; none where
    that is "", or where this process is not root's."""

    def __init__(self, place: str | None = None) -> None:
        self._place = os.environ.get("DSPROBE_CACHE", PLACE) if place is None else place
        if os.geteuid() != 0:
            self._place = ""

    def get(self, key: str) -> Module | None:
        """The module called ``key``, if it is there."""
        try:
            with self._folder() as folder:
                fd = os.open(key, os.O_RDONLY | os.O_NONBLOCK | _FLAGS, dir_fd=folder)
                with open(fd, "rb") as f:
                    about = os.fstat(fd)
                    if not stat.S_ISREG(about.st_mode) or not _roots(about):
                        return None
                    data = f.read(_MAX_SIZE)
                    os.utime(fd)  # used last
            packed = data[len(_MAGIC) + 32 :]
            if data[: len(_MAGIC) + 32] != _MAGIC + hashlib.sha256(packed).digest():
                return None
            return Module.unpack(packed)
        except (OSError, ValueError):
            return None

    def put(self, key: str, module: Module) -> None:
        """Keep ``module``, if that is possible here."""
        packed = module.pack()
        temporary = f".{key}.{os.getpid()}_{threading.get_ident()}"
        try:
            if self._place:
                with contextlib.suppress(FileExistsError):
                    os.mkdir(self._place, 0o700)
            with self._folder() as folder:
                try:
                    fd = os.open(
                        temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | _FLAGS, 0o600,
                        dir_fd=folder,
                    )  # fmt: skip
                    with open(fd, "wb") as f:
                        f.write(_MAGIC + hashlib.sha256(packed).digest() + packed)
                    os.replace(temporary, key, src_dir_fd=folder, dst_dir_fd=folder)
                except OSError:
                    with contextlib.suppress(OSError):
                        os.unlink(temporary, dir_fd=folder)
                    raise
                _tidy(folder)
        except OSError:
            return

    @contextlib.contextmanager
    def _folder(self) -> Iterator[int]:
        """The folder, open.  Raises OSError where there is none to be trusted."""
        if not self._place:
            raise FileNotFoundError("there is no cache")
        fd = os.open(self._place, os.O_RDONLY | os.O_DIRECTORY | _FLAGS)
        try:
            if not _roots(os.fstat(fd)):
                raise PermissionError(f"{self._place} is not root's alone")
            yield fd
        finally:
            os.close(fd)


def _roots(about: os.stat_result) -> bool:
    return about.st_uid == 0 and not about.st_mode & (stat.S_IWGRP | stat.S_IWOTH)


def _tidy(folder: int) -> None:
    """Remove what was not used for longest, and what somebody who was killed has begun."""
    found = {name: os.stat(name, dir_fd=folder, follow_symlinks=False).st_mtime
             for name in os.listdir(folder) if _OURS.fullmatch(name)}  # fmt: skip
    whole = sorted((n for n in found if n[0] != "."), key=lambda n: found[n], reverse=True)
    begun = [n for n in found if n[0] == "." and found[n] < time.time() - 3600]
    for name in (*whole[KEPT:], *begun):
        with contextlib.suppress(OSError):  # another was faster
            os.unlink(name, dir_fd=folder)
