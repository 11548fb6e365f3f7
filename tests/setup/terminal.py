"""A real terminal (tmux) that tests type into and read from."""

from __future__ import annotations

import os
import shlex
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import TracebackType


class Terminal:
    """Runs ``command`` in a tmux server of its own; leaving the context ends both.

    ``folder`` takes the server's socket and the command's exit code.
    """

    def __init__(
        self,
        folder: Path,
        command: Sequence[str | Path],
        *,
        env: Mapping[str, str] | None = None,
        cwd: Path | None = None,
        columns: int = 120,
        rows: int = 40,
    ) -> None:
        self._socket = folder / "tmux"
        self._code = folder / "exit-code"
        self._code.unlink(missing_ok=True)
        line = f"{shlex.join(map(str, command))}; echo $? > {shlex.quote(str(self._code))}"
        # tmux keeps the last screen only while something runs in it.
        self._tmux(
            "-f", "/dev/null", "new-session", "-d", "-x", str(columns), "-y", str(rows),
            "sh", "-c", f"{line}; exec sleep infinity",
            env=dict(os.environ if env is None else env, TERM="xterm-256color"), cwd=cwd,
        )  # fmt: skip

    def _tmux(
        self, *args: str, env: Mapping[str, str] | None = None, cwd: Path | None = None
    ) -> str:
        done = subprocess.run(
            ["tmux", "-S", str(self._socket), *args],
            capture_output=True, text=True, check=True, env=env, cwd=cwd,
        )  # fmt: skip
        return done.stdout

    def __enter__(self) -> Terminal:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, e: BaseException | None, tb: TracebackType | None
    ) -> None:
        if e is not None:
            print(f"--- the screen when it failed\n{self.screen()}\n---")
        self._tmux("kill-server")

    def screen(self) -> str:
        """The text on the screen."""
        return self._tmux("capture-pane", "-p")

    def press(self, *keys: str) -> None:
        """Type keys by tmux's names (q, Space, C-l ...)."""
        self._tmux("send-keys", *keys)

    def wait(self, what: Callable[[str], object], seconds: float = 60) -> str:
        """The first screen for which ``what`` is true."""
        end = time.monotonic() + seconds
        while True:
            text = self.screen()
            if what(text):
                return text
            if self._code.exists() and self._code.read_text().strip() != "0":
                raise AssertionError(f"exit code {self._code.read_text().strip()}:\n{text}")
            if time.monotonic() > end:
                raise AssertionError(f"not seen within {seconds} s:\n{text}")
            time.sleep(0.1)

    def exit_code(self, seconds: float = 30) -> int:
        """The command's exit code, once it has ended."""
        self.wait(lambda _: self._code.exists() and self._code.read_text().strip(), seconds)
        return int(self._code.read_text())
