"""Requests to the sample server at a steady rate, each over a connection of its own."""

from __future__ import annotations

import http.client
import json
import threading
import time


class Load:
    """``qps`` completions a second, however long each takes (an open loop)."""

    def __init__(self, port: int, qps: float, prompt: int, tokens: int) -> None:
        self._port, self._qps = port, qps
        self._body = json.dumps({"prompt_tokens": prompt, "max_tokens": tokens})
        self._lock = threading.Lock()
        self._took: list[float] = []
        self._failed = 0

    def run(self, over: threading.Event, seconds: float) -> None:
        """Until ``over`` is set, or for so many seconds if that is not 0; all are answered then."""
        threads: list[threading.Thread] = []
        begin, sent = time.monotonic(), 0
        while not seconds or sent < seconds * self._qps:
            if over.wait(max(0.0, begin + sent / self._qps - time.monotonic())):
                break
            threads = [t for t in threads if t.is_alive()]
            threads.append(threading.Thread(target=self.one))
            threads[-1].start()
            sent += 1
        for t in threads:
            t.join()

    def one(self) -> None:
        begin = time.monotonic()
        try:
            connection = http.client.HTTPConnection("127.0.0.1", self._port, timeout=60)
            connection.request("POST", "/v1/completions", self._body)
            answer = connection.getresponse()
            good = answer.status == 200 and bool(answer.read())
            connection.close()
        except OSError:
            good = False
        with self._lock:
            self._took.append(time.monotonic() - begin)
            self._failed += not good

    def summary(self) -> dict[str, float]:
        """Requests, failures, and seconds that half and 99 % of them took at most."""
        took = sorted(self._took)
        out: dict[str, float] = {"requests": len(took), "failed": self._failed}
        if took:
            out["p50"] = took[len(took) // 2]
            out["p99"] = took[min(len(took) - 1, len(took) * 99 // 100)]
        return out
