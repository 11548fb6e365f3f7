"""What can go wrong with a recording, said so that a command can print it as it is."""

from __future__ import annotations

from collections.abc import Mapping

EXIT_ERROR, EXIT_USAGE, EXIT_PARTIAL, EXIT_VERSION = 1, 2, 3, 4


class RecordingError(Exception):
    """One sentence for the person at the terminal, and the exit code that goes with it."""

    def __init__(self, message: str, exit_code: int = EXIT_ERROR) -> None:
        super().__init__(message)
        self.exit_code = exit_code


class StoreFull(RecordingError):
    """The disk took no more: the file ends before the rows of ``lost`` and is readable.

    ``lost`` counts, by stream, the rows that were handed to the writer and are not in the file.
    ``why`` is what the system said.
    """

    def __init__(self, message: str, lost: Mapping[str, int], why: str = "") -> None:
        super().__init__(message, EXIT_PARTIAL)
        self.why = why
        self.lost = dict(lost)
