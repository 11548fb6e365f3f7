"""Allocations from Python stacks of many shapes, with the stack that Python itself saw as truth.

The stack is taken inside the called function, in its thread (``simgpu_on_call``), and written to
``SIMGPU_TRUTH/<pid>.stacks`` as a JSON line: symbol, begin time as in the log, tid, bytes, shape,
and frames from the innermost out as [name, qualified name (3.11 on), file, line].

``repeat`` rounds of every shape; ``depth`` of the deep one; ``functions`` more, each of its own.
"""

from __future__ import annotations

import asyncio
import functools
import json
import os
import sys
import threading
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any, TextIO

from tests.simgpu.driver import Driver
from tests.simgpu.workloads.options import gate, options

_truth: TextIO
_shape = threading.local()


def _open_truth() -> None:
    global _truth
    folder = os.environ.get("SIMGPU_TRUTH", ".")
    _truth = open(  # noqa: SIM115
        os.path.join(folder, f"{os.getpid()}.stacks"), "w", encoding="utf-8"
    )


def record(symbol: str, begun: int, args: Any) -> None:
    """Called by the driver inside the call: our caller is the frame that made it."""
    # past this and the closure of Driver.on_call
    frame: FrameType | None = sys._getframe(2)
    frames = []
    while frame:
        code = frame.f_code
        qualified = getattr(code, "co_qualname", None)
        frames.append([code.co_name, qualified, code.co_filename, frame.f_lineno])
        frame = frame.f_back
    row = {
        "symbol": symbol, "begun": begun, "tid": threading.get_native_id(),
        "bytes": args[1] if symbol.startswith("cuMemAlloc") else 0,
        "shape": getattr(_shape, "name", ""), "frames": frames,
    }  # fmt: skip
    _truth.write(json.dumps(row) + "\n")
    _truth.flush()


class Shapes:
    """One method for each shape of stack.  Sizes are all different: they tell allocations apart."""

    def __init__(self, driver: Driver, ctx: int, depth: int) -> None:
        self.driver, self.ctx, self.depth = driver, ctx, depth
        self._next = 1 << 20
        self._lock = threading.Lock()

    def allocate(self) -> int:
        """Allocates and frees; the allocation is what the stacks are about."""
        with self._lock:
            self._next += 512
            size = self._next
        address = self.driver.get("cuMemAlloc_v2", size)
        self.driver.ok("cuMemFree_v2", address)
        return size

    def plain(self) -> None:
        def inner() -> int:
            return self.allocate()

        inner()

    # fmt: off
    def lines(self) -> None:
        self.allocate(); self.allocate()  # noqa: E702
        (
            self.
            allocate(
            )
        )
    # fmt: on

    def deep(self, left: int | None = None) -> int:
        left = self.depth if left is None else left
        return self.deep(left - 1) if left else self.allocate()

    def anonymous(self) -> None:
        (lambda: self.allocate())()
        [self.allocate() for _ in range(2)]
        _ = {self.allocate() for _ in range(2)}

    def generator(self) -> None:
        def each() -> Iterator[int]:
            yield self.allocate()
            yield from (self.allocate() for _ in range(2))

        assert len(list(each())) == 3

    def through_c(self) -> None:
        sorted([3, 1], key=lambda _: self.allocate())
        functools.reduce(lambda a, _: a + self.allocate(), [1, 2], 0)
        list(map(lambda _: self.allocate(), [1]))  # noqa: C417

    def coroutine(self) -> None:
        async def leaf() -> int:
            await asyncio.sleep(0)
            return self.allocate()

        async def root() -> None:
            await asyncio.gather(leaf(), leaf())

        asyncio.run(root())

    def exception(self) -> None:
        try:
            raise KeyError
        except KeyError:
            self.allocate()
        finally:
            self.allocate()

    @staticmethod
    def _static(shapes: Shapes) -> int:
        return shapes.allocate()

    @classmethod
    def _of_class(cls, shapes: Shapes) -> int:
        return shapes.allocate()

    @property
    def _read(self) -> int:
        return self.allocate()

    def bound(self) -> None:
        self._static(self)
        self._of_class(self)
        assert self._read

    def named(self) -> None:
        """Names that do not fit where one might keep them."""
        long, foreign = "n" * 300, "größe_メモリ"
        text = f"def {long}(f): return f()\ndef {foreign}(f): return {long}(f)\n"
        space: dict[str, Any] = {}
        exec(compile(text, f"/made/up/{'folder/' * 40}ファイル.py", "exec"), space)
        space[foreign](self.allocate)

    def thread(self) -> None:
        def work() -> None:
            _shape.name = "thread"
            self.driver.ok("cuCtxSetCurrent", self.ctx)
            self.plain()

        threads = [threading.Thread(target=work) for _ in range(3)]
        for t in threads:
            t.start()
        for t in threads:
            t.join()

    def blocking(self) -> None:
        """The stack of a call during which other threads run."""
        self.driver.ok("cuCtxSynchronize")

    def forked(self) -> None:
        """A child cannot use the driver, but its calls, which fail, have stacks."""
        pid = os.fork()
        if pid == 0:
            _open_truth()
            self.driver.call("cuMemAlloc_v2", 0, 4096)
            os._exit(0)
        os.waitpid(pid, 0)


ALL = (
    "plain", "lines", "deep", "anonymous", "generator", "through_c", "coroutine", "exception",
    "bound", "named", "thread", "blocking", "forked",
)  # fmt: skip


def distinct(shapes: Shapes, count: int) -> list[Callable[[], int]]:
    """So many functions, each with a stack of its own."""
    made = []
    for i in range(count):
        space: dict[str, Any] = {"allocate": shapes.allocate}
        exec(compile(f"def made_{i}():\n    return allocate()\n", f"made_{i}.py", "exec"), space)
        made.append(space[f"made_{i}"])
    return made


def main() -> None:
    found = options(repeat=2, depth=60, functions=0, shapes=",".join(ALL))
    driver = Driver()
    shapes = Shapes(driver, driver.start(), int(found["depth"]))
    more = distinct(shapes, int(found["functions"]))
    _open_truth()
    gate(found, "ready")
    driver.on_call(record)
    for _ in range(int(found["repeat"])):
        for name in filter(None, found["shapes"].split(",")):
            _shape.name = name
            getattr(shapes, name)()
    _shape.name = "distinct"
    for f in more:
        f()
    gate(found, "done")


if __name__ == "__main__":
    main()
