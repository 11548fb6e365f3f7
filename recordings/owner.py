"""For whom root works: the user who called sudo."""

from __future__ import annotations

import contextlib
import os


def sudo_caller() -> tuple[int, int] | None:
    """User and group of who became root through sudo; None where that is not how.

    Source: sudo(8), ENVIRONMENT: SUDO_UID and SUDO_GID, which only root can have set.
    """
    uid, gid = os.environ.get("SUDO_UID", ""), os.environ.get("SUDO_GID", "")
    if os.geteuid() or not (uid.isdecimal() and gid.isdecimal() and int(uid)):
        return None
    return int(uid), int(gid)


def give(fd: int) -> None:
    """Make a file that we have just created the caller's, who could not read it otherwise."""
    caller = sudo_caller()
    if caller:
        with contextlib.suppress(OSError, OverflowError):  # a file system without owners
            os.fchown(fd, *caller)
