"""Native frames for the agent: names of addresses, and stacks from copies of their tops.

ELF files of any process are hostile input, so nothing of them is read here.  The agent opens the
files that a process maps (/proc/PID/map_files) and hands them to a child without privileges
(:mod:`dsprobe.probes.native.child`), which parses them.  A thread talks to the child; nothing that
the agent's loop calls ever waits.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass

from dsprobe.probes.native.frames import NativeFrame, Registers
from dsprobe.probes.native.link import ChildLost
from dsprobe.probes.native.resolver import Resolver

__all__ = ["Answer", "NativeFrame", "Registers", "Symbolizer"]

MAX_QUESTIONS = 2048
MAX_WAITING = 16 << 20  # bytes of stack copies
MAX_COPY = 64 << 10
MAX_ADDRESSES = 512
MAX_STUCK = 3  # threads given up, after which no more are started


@dataclass(frozen=True)
class Answer:
    """To the question ``key``: frames, innermost first, and why they end early ("" where not)."""

    key: Hashable
    frames: tuple[NativeFrame, ...]
    note: str = ""


@dataclass
class _Question:
    run: Callable[[Resolver], Answer | None]
    size: int = 0
    key: Hashable = None

    def failed(self, note: str) -> Answer | None:
        """What is answered instead; nothing where nothing is."""
        return None if self.key is None else Answer(self.key, (), note)


class _Worker:
    """A thread that answers from ``questions`` until it is told to end."""

    def __init__(self, owner: Symbolizer, resolver: Resolver) -> None:
        self.resolver = resolver
        self.current: _Question | None = None
        self.ended = False
        self._owner = owner
        self.thread = threading.Thread(target=self._work, name="symbols", daemon=True)
        self.thread.start()

    def _work(self) -> None:
        while (question := self._owner._next(self)) is not None:
            try:
                answer = question.run(self.resolver)
            except Exception as e:  # whatever it is, the next question may be a good one
                answer = question.failed(f"native frames cannot be read: {e}")
            self._owner._done(self, answer)
        self.resolver.close()


class Symbolizer:
    """Ask with :meth:`ask` and :meth:`unwind`, take what came with :meth:`answers`.

    ``process`` is the session's number of the process (one program of one process: a new one
    after exec), ``pid`` its PID on the host, ``t`` when the stack was taken (CLOCK_MONOTONIC ns):
    a process that began later is another one with the same PID, and is not looked into.

    A child that takes longer than ``wall_s`` or ``cpu_s`` for one answer is ended, and the file it
    read is not read again; a file that takes longer than ``stuck_s`` to open is not opened again.
    """

    def __init__(self, wall_s: float = 10.0, cpu_s: float = 5.0, stuck_s: float = 10.0) -> None:
        self.refused = 0
        """Questions not taken because too many were waiting."""
        self._wall_s, self._cpu_s, self._stuck_ns = wall_s, cpu_s, int(stuck_s * 1e9)
        self._changed = threading.Condition()
        self._closing = False
        self._questions: deque[_Question] = deque()
        self._waiting = 0
        self._answers: list[Answer] = []
        self._avoid: set[tuple[str, int]] = set()
        self._stuck: list[_Worker] = []
        self._worker: _Worker | None = None

    @property
    def child(self) -> int:
        """PID of the child, 0 while there is none."""
        return 0 if self._worker is None else self._worker.resolver.child

    def ask(self, key: Hashable, process: int, pid: int, t: int, addresses: Sequence[int]) -> bool:
        """Name ``addresses``, which are return addresses.  False where the queue is full.

        The answer has a frame for each address (of the first :data:`MAX_ADDRESSES`), in order.
        """
        places = [(address, 1) for address in addresses[:MAX_ADDRESSES]]

        def run(resolver: Resolver) -> Answer:
            frames, note = resolver.names(process, pid, t, places)
            return Answer(key, tuple(frames), note)

        return self._put(_Question(run, 0, key))

    def unwind(
        self, key: Hashable, process: int, pid: int, t: int, registers: Registers, copy: bytes
    ) -> bool:
        """Walk and name the stack whose bytes from ``registers.sp`` on are ``copy``.

        ``registers.ip`` is taken for a return address (the walk begins at the return of the
        probed call).  False where the queue is full.
        """
        copy = copy[:MAX_COPY]

        def run(resolver: Resolver) -> Answer:
            frames, note = resolver.unwind(process, pid, t, registers, copy)
            return Answer(key, tuple(frames), note)

        return self._put(_Question(run, len(copy), key))

    def seen(self, process: int, pid: int, t: int) -> None:
        """Look at a process early, so that its files are open should it end soon."""

        def run(resolver: Resolver) -> None:
            resolver.seen(process, pid, t)

        self._put(_Question(run))

    def gone(self, process: int) -> None:
        """The process ended: its questions are still answered, then it is forgotten."""

        def run(resolver: Resolver) -> None:
            resolver.gone(process)

        with self._changed:
            if self._worker is not None:
                self._questions.append(_Question(run))
                self._changed.notify()

    def answers(self) -> list[Answer]:
        """What came since the last call; never waits."""
        with self._changed:
            self._replace_stuck()
            answers, self._answers = self._answers, []
        return answers

    def close(self) -> None:
        """End the child and the thread."""
        with self._changed:
            self._closing = True
            self._questions.clear()
            worker, self._worker = self._worker, None
            self._changed.notify_all()
        for w in [*self._stuck, *([worker] if worker else [])]:
            w.resolver.kill()
        if worker is not None:
            worker.thread.join(1.0)

    def _put(self, question: _Question) -> bool:
        with self._changed:
            if (
                self._closing
                or len(self._questions) >= MAX_QUESTIONS
                or self._waiting + question.size > MAX_WAITING
            ):
                self.refused += 1
                return False
            if self._worker is None:
                self._start()
            self._questions.append(question)
            self._waiting += question.size
            self._changed.notify()
        return True

    def _start(self) -> None:
        self._worker = _Worker(self, Resolver(self._wall_s, self._cpu_s, self._avoid, self._pause))

    def _pause(self, seconds: float) -> None:
        with self._changed:
            if self._changed.wait_for(lambda: self._closing, seconds):
                raise ChildLost("dsprobe ends", 0)

    def _next(self, worker: _Worker) -> _Question | None:
        """The next question for ``worker``; None where it is to end.  Called on its thread."""
        with self._changed:
            self._changed.wait_for(lambda: self._questions or self._closing or worker.ended)
            if self._closing or worker.ended:
                return None
            worker.current = question = self._questions.popleft()
            self._waiting -= question.size
            return question

    def _done(self, worker: _Worker, answer: Answer | None) -> None:
        with self._changed:
            worker.current = None
            if answer is not None and not worker.ended:
                self._answers.append(answer)

    def _replace_stuck(self) -> None:
        """Give up a thread that hangs in opening a file; another one goes on without that file."""
        worker = self._worker
        if worker is None or (what := worker.resolver.opening) is None:
            return
        if time.monotonic_ns() - worker.resolver.opening_since < self._stuck_ns:
            return
        worker.ended = True
        worker.resolver.kill()
        self._avoid.add(what)
        self._stuck.append(worker)
        answer = worker.current.failed("a file cannot be opened") if worker.current else None
        if answer is not None:
            self._answers.append(answer)
        self._worker = None
        if len(self._stuck) >= MAX_STUCK:
            self._closing = True
            return
        self._start()
