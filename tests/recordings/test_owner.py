"""Whose the files are that root writes for somebody."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from dsprobe.recordings.writer import Writer

NOBODY = 65534

pytestmark = pytest.mark.root


@pytest.fixture
def sudo(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SUDO_UID", str(NOBODY))
    monkeypatch.setenv("SUDO_GID", str(NOBODY))


def owner(path: Path) -> tuple[int, int, int]:
    info = os.stat(path)
    return info.st_uid, info.st_gid, info.st_mode & 0o777


@pytest.mark.usefixtures("sudo")
def test_a_recording_made_with_sudo_is_the_callers_who_can_read_it(tmp_path: Path) -> None:
    path = tmp_path / "r.mcap"
    Writer(path).close()
    assert owner(path) == (NOBODY, NOBODY, 0o600)
    with path.open("rb") as f:  # as replay opens it, but for the folders on the way
        done = subprocess.run(
            [sys.executable, "-c", "import os; print(os.open('/dev/fd/0', os.O_RDONLY) > 0)"],
            user=NOBODY, group=NOBODY, extra_groups=[], stdin=f, capture_output=True, text=True,
        )  # fmt: skip
    assert done.stdout == "True\n", done.stderr
    Writer(path, force=True).close()
    assert owner(path) == (NOBODY, NOBODY, 0o600)


@pytest.mark.usefixtures("sudo")
def test_what_is_not_ours_to_give_is_not_given(tmp_path: Path) -> None:
    """Only a file that was created just now: never what a link of that name leads to."""
    secret = tmp_path / "secret"
    secret.write_text("root's")
    before = owner(secret)
    (tmp_path / "link").symlink_to(secret)
    for path in (tmp_path / "link", secret):
        with pytest.raises(Exception, match=str(path)):
            Writer(path)
    assert owner(secret) == before
    assert secret.read_text() == "root's"


@pytest.mark.parametrize(
    ("uid", "gid"), [("0", "0"), ("", ""), ("-1", "5"), ("x", "5"), ("5", ""), ("9" * 30, "5")]
)
def test_without_a_sensible_caller_it_stays_roots(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, uid: str, gid: str
) -> None:
    monkeypatch.setenv("SUDO_UID", uid)
    monkeypatch.setenv("SUDO_GID", gid)
    Writer(tmp_path / "r.mcap").close()
    assert owner(tmp_path / "r.mcap") == (0, 0, 0o600)
