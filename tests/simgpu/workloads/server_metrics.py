"""Metrics of the sample server under the names that vLLM gives them, as Prometheus reads them.

Names and buckets: vllm/v1/metrics/loggers.py; text exposition format 0.0.4.
"""

from __future__ import annotations

import threading
from bisect import bisect_left

LABELS = 'model_name="simulated"'
GAUGES = (
    "num_requests_running", "num_requests_waiting", "gpu_cache_usage_perc", "kv_cache_usage_perc",
)  # fmt: skip
COUNTERS = ("prompt_tokens_total", "generation_tokens_total", "request_success_total")
BUCKETS = {
    "time_to_first_token_seconds": (
        0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0,
    ),
    "time_per_output_token_seconds": (
        0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5,
    ),
    "e2e_request_latency_seconds": (
        0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0,
    ),
}  # fmt: skip


class Metrics:
    """Written by the engine's thread, read by any."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._gauges = dict.fromkeys(GAUGES, 0.0)
        self._counters: dict[tuple[str, str], float] = {
            (n, LABELS): 0.0 for n in COUNTERS if n != "request_success_total"
        }
        self._counts = {n: [0] * (len(b) + 1) for n, b in BUCKETS.items()}
        self._sums = dict.fromkeys(BUCKETS, 0.0)

    def gauge(self, name: str, value: float) -> None:
        with self._lock:
            self._gauges[name] = value

    def count(self, name: str, more: float, **labels: str) -> None:
        words = ",".join([*(f'{k}="{v}"' for k, v in labels.items()), LABELS])
        with self._lock:
            self._counters[name, words] = self._counters.get((name, words), 0.0) + more

    def observe(self, name: str, value: float) -> None:
        with self._lock:
            self._counts[name][bisect_left(BUCKETS[name], value)] += 1
            self._sums[name] += value

    def text(self) -> str:
        lines = []
        with self._lock:
            for name, value in self._gauges.items():
                lines += [f"# TYPE vllm:{name} gauge", f"vllm:{name}{{{LABELS}}} {value}"]
            for name in COUNTERS:
                lines.append(f"# TYPE vllm:{name} counter")
                lines += [
                    f"vllm:{n}{{{words}}} {value}"
                    for (n, words), value in self._counters.items()
                    if n == name
                ]
            for name, bounds in BUCKETS.items():
                lines.append(f"# TYPE vllm:{name} histogram")
                total = 0
                for bound, n in zip((*bounds, "+Inf"), self._counts[name], strict=True):
                    total += n
                    lines.append(f'vllm:{name}_bucket{{le="{bound}",{LABELS}}} {total}')
                lines.append(f"vllm:{name}_sum{{{LABELS}}} {self._sums[name]}")
                lines.append(f"vllm:{name}_count{{{LABELS}}} {total}")
        return "\n".join(lines) + "\n"
