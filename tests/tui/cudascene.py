"""A host on which two processes use CUDA: a server that leaks in one function, beside memory that
stays and memory that breathes, and a worker that waits."""

from __future__ import annotations

from tests.recordings.cudahost import BOOT, CALL, MIB, SECOND, CudaHost, hist
from tests.tui.memory import MemorySession

SERVER, WORKER = 1, 2
ENGINE, LOADER, MAIN = 11, 12, 21
WALL = 1_772_373_600 * SECOND
"""2026-03-01 14:00:00 UTC, the wall clock at BOOT."""
OUTER = ("serve@/srv/llm/server.py:44", "main@/srv/llm/server.py:120")


class Scene(CudaHost):
    """Numbers depend on the second alone."""

    def __init__(self, live: bool = False, leaking: bool = True) -> None:
        super().__init__(live)
        self.leaking = leaking
        self.session.name = "/run/dsprobe.sock" if live else "gpu-07.mcap"
        self.session.append("meta.session", t=BOOT, key="zone", value="UTC")
        self.session.append("meta.clock", t=BOOT, wall=WALL, uncertainty=200)
        self.process(SERVER, 4711, "python3", command="python3 server.py", container="ab" * 32,
                     python="3.11.2")  # fmt: skip
        self.process(WORKER, 4712, "worker")
        self.thread(ENGINE, SERVER, 4720, "engine")
        self.thread(LOADER, SERVER, 4721, "loader")
        self.thread(MAIN, WORKER, 4712, "worker")
        self.sync = self.string(1, "cuStreamSynchronize")
        self.copy = self.string(2, "cuMemcpyDtoH_v2")
        self.leak = self.stack(1, ("append_kv@/srv/llm/cache.py:88", "decode@/srv/llm/engine.py:7",
                                   *OUTER))  # fmt: skip
        self.weights = self.stack(2, ("load@/srv/llm/weights.py:12", *OUTER))
        self.forward = self.stack(3, ("forward@/srv/llm/model.py:301",
                                      "decode@/srv/llm/engine.py:7", *OUTER))  # fmt: skip
        self.pinned = self.stack(4, ("stage@/srv/llm/io.py:5", *OUTER), kind="host")
        self.other = self.stack(5, ("work@/srv/llm/worker.py:9",), process=WORKER)
        self.weights.alloc(BOOT, 900 * MIB)
        self.pinned.alloc(BOOT, 64 * MIB)
        self.other.alloc(BOOT, 200 * MIB)

    def advance(self, seconds: int = 1) -> None:
        """``seconds`` more; they are seen after the session's next refresh."""
        self.run(seconds, self._act)

    def _act(self, second: int, t: int) -> None:
        n = (t - BOOT) // SECOND
        if self.leaking:
            self.leak.alloc(t, MIB)
        if n % 8 < 4:
            self.forward.alloc(t, 100 * MIB)
        elif self.forward.held:
            self.forward.free()
        t = self.now + SECOND
        s = self.session
        shed = 30_000 if n % 80 >= 60 else 0
        s.append("cuda.thread", t=t, dt=SECOND, process=[SERVER, WORKER], thread=[ENGINE, MAIN],
                 count=[40_000, 10], shed=[shed, 0],
                 hist=[hist(s13=39_000, s20=1000), hist(s26=10)],
                 longest=[2_000_000 + n, 90_000_000], longest_end=[t - 1000, t - 2000],
                 within=[self.sync, self.copy], within_time=[1_500_000, 10_000_000])  # fmt: skip
        s.append("cuda.stream", t=t, dt=SECOND, process=[SERVER, SERVER, WORKER],
                 stream=[0, 0x55D0_0000_1000, 0], count=[30_000, 10_000, 10],
                 hist=[hist(s13=30_000), hist(s16=10_000), hist(s26=10)],
                 longest=[2_000_000, 900_000, 90_000_000])  # fmt: skip
        s.append("cuda.calls", t=t, dt=SECOND, process=SERVER, function=[self.sync, self.copy],
                 kind=[CALL["sync"], CALL["copy"]], count=[100, 5], busy=[400_000_000, 2_000_000],
                 hist=[hist(s21=100), hist(s18=5)])  # fmt: skip
        if n % 30 >= 20:
            began = t - (n % 30 - 20) * SECOND - SECOND // 5
            s.append("cuda.open", t=t, process=WORKER, thread=MAIN, function=self.sync,
                     since=began)  # fmt: skip
        s.append("meta.clock", t=t, wall=WALL + (t - BOOT), uncertainty=200)


def recording(seconds: int = 150, leaking: bool = True) -> MemorySession:
    """A finished session."""
    scene = Scene(leaking=leaking)
    scene.advance(seconds)
    return scene.session
