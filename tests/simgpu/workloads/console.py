"""Makes the calls that it is told, one JSON request a line, one JSON answer (target.py asks)."""

from __future__ import annotations

import ctypes
import json
import os
import queue
import sys
import threading
from collections.abc import Callable
from typing import Any

from tests.simgpu.driver import Driver, IpcHandle, Out, on_device

Request = dict[str, Any]


class Worker:
    """A thread that runs what it is given, so that calls come from where the test says."""

    def __init__(self) -> None:
        self._work: queue.SimpleQueue[Callable[[], object] | None] = queue.SimpleQueue()
        self._done: queue.SimpleQueue[object] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        while f := self._work.get():
            try:
                self._done.put(f())
            except Exception as e:
                self._done.put(e)

    def do(self, f: Callable[[], object]) -> object:
        self._work.put(f)
        answer = self._done.get()
        if isinstance(answer, Exception):
            raise answer
        return answer

    def end(self) -> None:
        self._work.put(None)
        self._thread.join()


class Console:
    def __init__(self) -> None:
        self._driver: Driver | None = None
        self._workers: dict[str, Worker] = {}
        self._buffers: list[Any] = []

    @property
    def driver(self) -> Driver:
        if self._driver is None:  # loaded when first needed, so that a test sees it happen
            self._driver = Driver()
        return self._driver

    def answer(self, request: Request) -> object:
        thread = request.get("thread", "main")
        match request["do"]:
            case "pid":
                return os.getpid()
            case "start":
                return self._in(thread, lambda: self.driver.start(request["device"]))
            case "call":
                return self._in(thread, lambda: self._call(*request["call"]))
            case "fork":
                return self._fork(request["calls"], request["start"])
            case "ipc":
                return self._ipc(request["address"])
            case "end":
                self._workers.pop(thread).end()
                return None
        raise ValueError(f"no such request: {request['do']}")

    def _in(self, thread: str, f: Callable[[], object]) -> object:
        if thread == "main":
            return f()
        if thread not in self._workers:
            self._workers[thread] = Worker()
        return self._workers[thread].do(f)

    def _call(self, name: str, *args: Any) -> dict[str, Any]:
        words = [self._argument(a) for a in args]
        result = self.driver.call(name, *words)
        return {"result": result, "out": [w.value for w in words if isinstance(w, Out)]}

    def _argument(self, a: Any) -> Any:
        match a:
            case "out":
                return Out()
            case str():
                return a.encode()
            case {"prop": device}:
                return on_device(device)
            case {"ipc": octets}:
                handle = IpcHandle()
                ctypes.memmove(ctypes.byref(handle), bytes(octets), 64)
                return handle
            case {"buffer": size}:
                self._buffers.append(ctypes.create_string_buffer(size))
                return self._buffers[-1]
        return a

    def _ipc(self, address: int) -> list[int]:
        handle = ctypes.create_string_buffer(64)
        self.driver.ok("cuIpcGetMemHandle", handle, address)
        return list(handle.raw)

    def _fork(self, calls: list[list[Any]], start: bool) -> dict[str, Any]:
        here, there = os.pipe()
        pid = os.fork()
        if pid == 0:
            try:
                if start:
                    self.driver.start()
                results = [self._call(*c)["result"] for c in calls]
                os.write(there, json.dumps(results).encode())
            finally:
                os._exit(0)
        os.close(there)
        with os.fdopen(here) as f:
            told = f.read()
        os.waitpid(pid, 0)
        if not told:
            raise RuntimeError("the child said nothing")
        return {"pid": pid, "results": json.loads(told)}


def main() -> None:
    console = Console()
    for line in sys.stdin:
        try:
            answer = {"answer": console.answer(json.loads(line))}
        except Exception as e:
            answer = {"error": f"{type(e).__name__}: {e}"}
        print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    main()
