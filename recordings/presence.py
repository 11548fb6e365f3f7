"""For how long each process was seen within an interval: what its rates are to be divided by."""

from __future__ import annotations

from dsprobe.recordings import cudastreams as cuda
from dsprobe.recordings.identities import Identities
from dsprobe.recordings.samples import ending
from dsprobe.recordings.session import Session

SECOND = 10**9
TICK = SECOND // 4
"""Amounts are told so often: over less than that there is no rate."""


class Presence:
    """Of processes of ``who`` within ``(start, end]``.

    A process is seen from its first traced call on until it ends, as far as the session reaches:
    its rows before that do not exist, or are not held here.
    """

    def __init__(self, session: Session, start: int, end: int, who: Identities) -> None:
        self._who, self._start, self._end = who, max(start, 0), end
        first, _ = session.span()
        if self._start < first:
            self._start = min(first, end)
            for stream in (cuda.CUDA_THREAD, cuda.CUDA_CALLS, cuda.GPU_MEMORY):
                # The first rows tell of a time before they were written.
                rows = ending(session, stream, first - 1, first + SECOND)
                if len(rows):
                    begun = int((rows["t"] - rows["dt"]).min())
                    self._start = max(min(self._start, begun), start, 0)

    def alive(self, process: int) -> bool:
        """Whether it had not ended at the end of the interval."""
        ended = self._who.process(process).ended
        return not ended or ended > self._end

    def time(self, process: int) -> int:
        """ns for which it was seen, at least a tick where the interval is as long as that."""
        ended = self._who.process(process).ended
        begin = max(self._start, self._who.seen(process))
        until = min(self._end, ended or self._end)
        return max(until - begin, min(TICK, self._end - self._start), 1)

    def rate(self, process: int, count: float) -> float:
        """``count`` per second."""
        return count * SECOND / self.time(process)


def presence(session: Session, start: int, end: int, who: Identities | None = None) -> Presence:
    """With ``who`` as it is, or with all that the session says of processes."""
    if who is None:
        who = Identities(session)
        who.refresh()
    return Presence(session, start, end, who)
