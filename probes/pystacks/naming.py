"""Names of functions from captured code objects, and from memory where capturing was not enough."""

from __future__ import annotations

from collections import Counter, deque
from dataclasses import dataclass

from dsprobe.probes.pystacks.errors import Unreadable
from dsprobe.probes.pystacks.interpreter import Interpreter
from dsprobe.probes.pystacks.lines import Lines
from dsprobe.probes.pystacks.objects import Code, Memory, captured, code_at
from dsprobe.probes.pystacks.reader import Reader

MAX_CODES = 100_000
"""Code objects remembered."""
MAX_BYTES = 64 << 20
"""Of their names, and of line tables before and after they were read."""
READ, READ_OF_ONE = 512 << 10, 128 << 10
"""Bytes of line tables that are read for one collection, and for one process among others: half a
megabyte takes some 15 ms of the agent's loop, and 80 ms where it is made to."""
MAX_PARTS = 4_000
"""Code objects of which BPF copied only a part, and which nobody has asked for."""


@dataclass(frozen=True)
class Place:
    """Where a frame is: its function's qualified name (3.10: the plain one), file and line.

    ``unread``: the line is 0 for want of time, or because the table of lines is too long.
    """

    function: str
    file: str
    line: int
    unread: bool = False


@dataclass(frozen=True)
class CodeKey:
    """A code object: ``process`` is the session's number."""

    process: int
    address: int
    signature: int


def _size(code: Code | str) -> int:
    if isinstance(code, str):
        return len(code)
    return len(code.table or b"") + len(code.name) + len(code.file)


class Naming:
    """Code objects of all processes."""

    def __init__(self, reader: Reader) -> None:
        self._reader = reader
        self._codes: dict[CodeKey, Code | str] = {}
        self._bytes = 0
        self._asked: set[CodeKey] = set()
        self._answers: deque[tuple[CodeKey, Code | str]] = deque()
        self._parts: dict[CodeKey, tuple[str | None, str | None, bytes | None]] = {}
        self._lines: dict[CodeKey, Lines] = {}
        self._read: Counter[int] = Counter()

    def learn(
        self, key: CodeKey, it: Interpreter, first: int, whole: int,
        name: bytes, file: bytes, table: bytes,
    ) -> None:  # fmt: skip
        """Take a code object as BPF captured it; parts that are missing are read when needed."""
        code, *parts = captured(it.layout, first, whole, name, file, table)
        if code:
            self._keep(key, code)
        elif len(self._parts) < MAX_PARTS:
            self._parts[key] = (parts[0], parts[1], parts[2])  # type: ignore[assignment]

    def place(
        self, key: CodeKey, pid: int, it: Interpreter, instr: int, late: bool = False
    ) -> Place | str | None:
        """Where a frame is; a reason why that cannot be said; None: ask again later.

        ``late``: there is no later, and where its table was not read yet the line is 0.
        """
        code = self._codes.get(key)
        if code is None:
            return self._ask(key, pid, it)
        if isinstance(code, str):
            return code
        if code.table is None:
            return Place(code.name, code.file, 0, True)
        lines = self._lines.get(key) or self._lines_of(key, code.first, code.table, it.minor)
        if lines is None:
            return Place(code.name, code.file, 0, True) if late else None
        offset = 2 * instr if it.minor == 10 else instr - key.address - it.layout.code_bytes
        return Place(code.name, code.file, lines.at(offset))

    def _lines_of(self, key: CodeKey, first: int, table: bytes, minor: int) -> Lines | None:
        """None where enough was read for now."""
        if self._read[key.process] >= READ_OF_ONE or self._read.total() >= READ:
            return None
        self._read[key.process] += len(table)
        lines = self._lines[key] = Lines(table, first, minor)
        self._bytes += lines.bytes
        self._bound()
        return lines

    def _ask(self, key: CodeKey, pid: int, it: Interpreter) -> str | None:
        if key in self._asked:
            return None
        name, file, table = self._parts.pop(key, (None, None, None))

        def read() -> None:
            try:
                with Memory(pid) as memory:
                    found: Code | str = code_at(
                        it.layout, memory, key.address, key.signature, name, file, table
                    )
            except Unreadable as e:
                found = self._partly(name, file, str(e))
            self._answers.append((key, found))

        if not self._reader.ask(read):
            return "not read: its process does not answer"
        self._asked.add(key)
        return None

    @staticmethod
    def _partly(name: str | None, file: str | None, reason: str) -> Code | str:
        """What can be said of a code object that is gone."""
        if name is not None and file is not None:
            return Code(name, file, 0, b"")
        return f"{name}: {reason}" if name else reason

    def answers(self) -> None:
        """Take what the reader has found; from now on line tables are read again."""
        self._read.clear()
        while self._answers:
            key, found = self._answers.popleft()
            if key in self._asked:
                self._asked.discard(key)
                self._keep(key, found)

    def _keep(self, key: CodeKey, code: Code | str) -> None:
        self._forget(key)
        self._codes[key] = code
        self._bytes += _size(code)
        self._bound()

    def _bound(self) -> None:
        while len(self._codes) > MAX_CODES or self._bytes > MAX_BYTES:
            self._forget(next(iter(self._codes)))

    def _forget(self, key: CodeKey) -> None:
        self._bytes -= _size(self._codes.pop(key, ""))
        if lines := self._lines.pop(key, None):
            self._bytes -= lines.bytes

    def gone(self, *processes: int) -> None:
        """Forget the code objects of processes."""
        for key in [k for k in self._codes if k.process in processes]:
            self._forget(key)
        self._asked = {k for k in self._asked if k.process not in processes}
        self._parts = {k: v for k, v in self._parts.items() if k.process not in processes}
