"""A small LLM server: requests come over HTTP on loopback, are batched, prefilled and decoded.

It does to the driver what such servers do: weights stay, the KV cache grows and shrinks with the
work, each step copies in, launches, copies out and waits.  ``Engine._keep_prompt`` breathes: it
keeps 4 MiB for each request until it has ``breath`` of them, and gives them all back.  ``leak``
bytes are lost for each request in one function, ``Engine._remember_prefix``.

``qps`` requests a second come from a client of its own (server_client.py), for ``seconds``;
otherwise it serves until SIGTERM.

POST /v1/completions {"prompt_tokens": 100, "max_tokens": 20}; GET /metrics, GET /health.
"""

from __future__ import annotations

import json
import queue
import signal
import sys
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

from tests.simgpu.driver import OUT_OF_MEMORY, CudaError, Driver
from tests.simgpu.workloads import server_client
from tests.simgpu.workloads.options import gate, options
from tests.simgpu.workloads.server_metrics import Metrics

MIB = 1 << 20
BLOCK_TOKENS = 16


class Request:
    """One completion: ``done`` is set when it has all its tokens, or ``failed``."""

    def __init__(self, prompt: int, tokens: int) -> None:
        self.prompt, self.tokens = prompt, tokens
        self.arrived = time.monotonic()
        self.first_token = 0.0
        self.generated = 0
        self.blocks: list[int] = []
        self.done = threading.Event()
        self.failed = ""

    def refuse(self, why: str) -> None:
        self.failed = why
        self.done.set()

    @property
    def blocks_wanted(self) -> int:
        return -(-(self.prompt + self.generated + 1) // BLOCK_TOKENS)


class Engine:
    """The loop that owns the device: one thread, continuous batching."""

    def __init__(self, found: dict[str, str], metrics: Metrics, over: threading.Event) -> None:
        self.metrics = metrics
        self.error = ""
        self._over = over  # set when the engine ends
        self._ended = False
        self._lock = threading.Lock()  # of _ended: nobody waits for an engine that has ended
        self._breath = int(found["breath"])
        self._prompts: list[int] = []
        self.waiting: queue.SimpleQueue[Request | None] = queue.SimpleQueue()
        self._running: list[Request] = []
        self._leak = int(found["leak"])
        self._layers = int(found["layers"])
        self._batch = int(found["batch"])
        self._spare: list[int] = []
        self._weights_mib, self._cache_mib = int(found["weights_mib"]), int(found["cache_mib"])
        self._block_bytes = int(found["block_kib"]) << 10
        self.ready = threading.Event()
        self.thread = threading.Thread(target=self.run, name="engine")

    def run(self) -> None:
        try:
            self._serve()
        except CudaError as e:  # the device's memory has run out, most likely
            self.error = str(e)
        finally:
            self.ready.set()
            self._over.set()
            self._refuse_the_rest()

    def submit(self, request: Request) -> None:
        with self._lock:
            if not self._ended:
                self.waiting.put(request)
                return
        request.refuse("the engine has ended")

    def end(self) -> None:
        self.waiting.put(None)
        self.thread.join()

    def _refuse_the_rest(self) -> None:
        with self._lock:
            self._ended = True
        while not self.waiting.empty():
            if request := self.waiting.get():
                self._running.append(request)
        for request in self._running:
            request.refuse("the engine has ended")

    def _serve(self) -> None:
        self.driver = Driver()
        self.driver.start()
        self._load_weights()
        self._reserve_workspace()
        self.stream = self.driver.get("cuStreamCreate", 1)
        self.host = self.driver.get("cuMemHostAlloc", MIB, 0)
        self.tokens = self.driver.get("cuMemAlloc_v2", MIB)
        self.prefill, self.layer, self.sample = map(
            self.driver.kernel, ("prefill", "decode_layer", "sample")
        )
        self.ready.set()
        while self._admit():
            if self._running:
                self._step()

    def _load_weights(self) -> None:
        """Large and stable."""
        for _ in range(self._weights_mib // 64):
            self.driver.get("cuMemAlloc_v2", 64 * MIB)

    def _reserve_workspace(self) -> None:
        """Stable, too: activations and the like."""
        self.driver.get("cuMemAlloc_v2", 256 * MIB)

    def _admit(self) -> bool:
        """Take waiting requests into the batch; False: the server ends."""
        while len(self._running) < self._batch:
            try:
                request = self.waiting.get(block=not self._running)
            except queue.Empty:
                break
            if request is None:
                return False
            self._running.append(request)
            self._prefill(request)
        self._show_requests()
        return True

    def _show_requests(self) -> None:
        self.metrics.gauge("num_requests_running", len(self._running))
        self.metrics.gauge("num_requests_waiting", self.waiting.qsize())

    def _prefill(self, request: Request) -> None:
        self._grow_cache(request)
        if request.failed:
            return
        copied = request.prompt * 4
        self.driver.ok("cuMemcpyHtoDAsync_v2", self.tokens, self.host, copied, self.stream)
        self.driver.launch(self.prefill, self.stream, grid=request.prompt)
        if self._breath:
            self._keep_prompt()
        if self._leak:
            self._remember_prefix()
        self.metrics.count("prompt_tokens_total", request.prompt)

    def _keep_prompt(self) -> None:
        """Breathes: grows for a while, and then gives back all of it."""
        if len(self._prompts) >= self._breath:
            while self._prompts:
                self.driver.ok("cuMemFree_v2", self._prompts.pop())
        self._prompts.append(self.driver.get("cuMemAlloc_v2", 4 * MIB))

    def _remember_prefix(self) -> None:
        """The leak: nobody ever frees it."""
        self.driver.get("cuMemAlloc_v2", self._leak)

    def _grow_cache(self, request: Request) -> None:
        """KV-cache blocks for the request's next token."""
        try:
            while len(request.blocks) < request.blocks_wanted:
                request.blocks.append(self._cache_block())
        except CudaError as e:
            if e.code != OUT_OF_MEMORY:
                raise
            request.failed = "out of memory"
        self._show_cache()

    def _cache_block(self) -> int:
        if self._spare:
            return self._spare.pop()
        if self._cache_blocks >= self._cache_mib * MIB // self._block_bytes:
            raise CudaError("KV cache", OUT_OF_MEMORY)
        return self.driver.get("cuMemAllocAsync", self._block_bytes, self.stream)

    @property
    def _cache_blocks(self) -> int:
        return len(self._spare) + sum(len(r.blocks) for r in self._running)

    def _shrink_cache(self) -> None:
        """Nothing runs: what the cache has taken goes back."""
        while self._spare:
            self.driver.ok("cuMemFreeAsync", self._spare.pop(), self.stream)

    def _show_cache(self) -> None:
        used = sum(len(r.blocks) for r in self._running) * self._block_bytes
        for name in ("gpu_cache_usage_perc", "kv_cache_usage_perc"):
            self.metrics.gauge(name, used / (self._cache_mib * MIB))

    def _step(self) -> None:
        """One token for each running request."""
        size = len(self._running)
        self.driver.ok("cuMemcpyHtoDAsync_v2", self.tokens, self.host, 4 * size, self.stream)
        for _ in range(self._layers):
            self.driver.launch(self.layer, self.stream, grid=size)
        self.driver.launch(self.sample, self.stream, grid=size)
        self.driver.ok("cuMemcpyDtoHAsync_v2", self.host, self.tokens, 4 * size, self.stream)
        self.driver.ok("cuStreamSynchronize", self.stream)
        now = time.monotonic()
        for request in self._running:
            if request.failed:
                continue
            request.generated += 1
            if request.generated == 1:
                request.first_token = now
                self.metrics.observe("time_to_first_token_seconds", now - request.arrived)
            self._grow_cache(request)
        self.metrics.count("generation_tokens_total", size)
        self._finish(now)

    def _finish(self, now: float) -> None:
        ended = [r for r in self._running if r.failed or r.generated >= r.tokens]
        self._running = [r for r in self._running if r not in ended]
        for r in ended:
            self._spare += r.blocks
            r.blocks = []
            took = now - r.arrived
            self.metrics.observe("e2e_request_latency_seconds", took)
            if r.generated > 1:
                each = (now - r.first_token) / (r.generated - 1)
                self.metrics.observe("time_per_output_token_seconds", each)
            reason = "abort" if r.failed else "length"
            self.metrics.count("request_success_total", 1, finished_reason=reason)
            r.done.set()
        if not self._running and self.waiting.empty():
            self._shrink_cache()
        self._show_cache()
        self._show_requests()


class Handler(BaseHTTPRequestHandler):
    """HTTP in front of the engine."""

    engine: Engine
    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        if self.path == "/metrics":
            self._send(200, self.engine.metrics.text(), "text/plain; version=0.0.4")
        elif self.path == "/health":
            self._send(200, "", "text/plain")
        else:
            self._send(404, "no such page\n", "text/plain")

    def do_POST(self) -> None:
        try:
            length = int(self.headers.get("Content-Length", "0"))
            asked = json.loads(self.rfile.read(min(length, 1 << 16)) or "{}")
            prompt, tokens = int(asked.get("prompt_tokens", 100)), int(asked.get("max_tokens", 20))
        except (ValueError, TypeError, AttributeError):
            self._send(400, "no JSON object with numbers\n", "text/plain")
            return
        if self.path != "/v1/completions" or not (0 < prompt <= 1 << 17 and 0 < tokens <= 1 << 14):
            self._send(404 if self.path != "/v1/completions" else 400, "no\n", "text/plain")
            return
        request = Request(prompt, tokens)
        self.engine.submit(request)
        request.done.wait()
        body = json.dumps({"generated": request.generated, "error": request.failed})
        self._send(503 if request.failed else 200, body, "application/json")

    def _send(self, code: int, body: str, kind: str) -> None:
        octets = body.encode()
        self.send_response(code)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(octets)))
        self.end_headers()
        self.wfile.write(octets)

    def log_message(self, format: str, *args: object) -> None:
        """Nothing is said of each request."""


class Server(ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = 256

    def handle_error(self, request: object, client_address: object) -> None:
        """Clients may go when they like; anything else is shown."""
        if not isinstance(sys.exc_info()[1], ConnectionError):
            super().handle_error(request, client_address)  # type: ignore[arg-type]


def main() -> None:
    found = options(
        port=0, leak=0, qps=0, seconds=0, prompt=200, tokens=30, layers=16, batch=32,
        weights_mib=4096, cache_mib=8192, breath=100, block_kib=2048,
    )  # fmt: skip
    gate(found, "begun")
    over = threading.Event()
    engine = Engine(found, Metrics(), over)
    Handler.engine = engine
    server = Server(("127.0.0.1", int(found["port"])), Handler)
    for s in (signal.SIGTERM, signal.SIGINT):
        signal.signal(s, lambda _n, _f: over.set())
    engine.thread.start()
    engine.ready.wait(30)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    port = server.server_address[1]
    print(json.dumps({"port": port}), flush=True)
    seconds = float(found["seconds"])
    if float(found["qps"]):
        told = server_client.Load(
            port, float(found["qps"]), int(found["prompt"]), int(found["tokens"])
        )
        told.run(over, seconds)
        print(json.dumps(told.summary()), flush=True)
    else:
        over.wait(seconds or None)
    engine.end()
    server.shutdown()
    if engine.error:
        sys.exit(f"the engine has ended: {engine.error}")


if __name__ == "__main__":
    main()
