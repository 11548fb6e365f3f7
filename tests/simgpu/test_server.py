"""The sample LLM server: it serves, says how it does, breathes, and leaks only when told to."""

from __future__ import annotations

import json
import subprocess
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.simgpu import truth
from tests.simgpu.run import environment, workload
from tests.simgpu.scenario import parse
from tests.support.wait import until

FAST = {"gpu": {"memory": "16GiB"}, "kernels": {"prefill": {"us": 20}, "decode_layer": {"us": 5}}}
SMALL: dict[str, Any] = {"tokens": 4, "prompt": 40, "layers": 4, "weights_mib": 1024, "breath": 10}


@contextmanager
def serving(folder: Path, **options: Any) -> Iterator[str]:
    """A server that waits for requests; its address.  It is told to end, and must do so well."""
    process = subprocess.Popen(
        workload("server", **SMALL | options), env=environment(folder, parse(FAST)),
        stdout=subprocess.PIPE, text=True,
    )  # fmt: skip
    assert process.stdout
    try:
        port = json.loads(process.stdout.readline())["port"]
        yield f"http://127.0.0.1:{port}"
        process.terminate()
        assert process.wait(20) == 0
    finally:
        process.kill()
        process.wait()
        process.stdout.close()


def get(url: str, **asked: int) -> tuple[int, str]:
    data = json.dumps(asked).encode() if asked else None
    try:
        with urllib.request.urlopen(urllib.request.Request(url, data), timeout=20) as answer:
            return answer.status, answer.read().decode()
    except urllib.error.HTTPError as e:
        with e:
            return e.code, e.read().decode()


def metrics(url: str) -> dict[str, float]:
    text = get(f"{url}/metrics")[1]
    lines = [line.rsplit(" ", 1) for line in text.splitlines() if not line.startswith("#")]
    return {name: float(value) for name, value in lines}


def test_it_serves_completions_and_metrics(tmp_path: Path) -> None:
    with serving(tmp_path) as url:
        for _ in range(5):
            code, text = get(f"{url}/v1/completions", prompt_tokens=50, max_tokens=7)
            assert (code, json.loads(text)["generated"]) == (200, 7)
        assert get(f"{url}/health")[0] == 200
        assert get(f"{url}/v1/completions", prompt_tokens=-1)[0] == 400
        assert get(f"{url}/nothing")[0] == 404
        idle = '{model_name="simulated"}'
        until(lambda: metrics(url)[f"vllm:num_requests_running{idle}"] == 0, "it is idle")
        found = metrics(url)
    assert found[f"vllm:prompt_tokens_total{idle}"] == 250
    assert found[f"vllm:generation_tokens_total{idle}"] == 35
    assert found[f"vllm:e2e_request_latency_seconds_count{idle}"] == 5
    assert found[f"vllm:time_to_first_token_seconds_count{idle}"] == 5
    assert found['vllm:request_success_total{finished_reason="length",model_name="simulated"}'] == 5
    assert found[f"vllm:num_requests_waiting{idle}"] == 0
    assert found[f"vllm:gpu_cache_usage_perc{idle}"] == 0
    total = [v for k, v in found.items() if k.startswith("vllm:e2e_request_latency_seconds_bucket")]
    assert total == sorted(total)
    assert total[-1] == 5
    (process,) = truth.read_all(tmp_path)
    assert process.calls("cuStreamSynchronize") == 35
    assert process.calls("cuLaunchKernel") == 5 + 35 * 5
    assert process.bytes("async") == 0  # the KV cache went back


def run(folder: Path, **options: Any) -> truth.Process:
    done = subprocess.run(
        workload("server", **SMALL | options), env=environment(folder, parse(FAST)),
        capture_output=True, text=True, timeout=60,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    told = json.loads(done.stdout.splitlines()[-1])
    assert (told["requests"], told["failed"]) == (60, 0)
    (process,) = truth.read_all(folder)
    return process


def live(process: truth.Process, size: int) -> Any:
    """Number of blocks of ``size`` after each call that made or freed one."""
    events = process.of("cuMemAlloc_v2", "cuMemFree_v2")
    freed = process.symbols.index("cuMemFree_v2")
    made: dict[int, int] = {}
    count, steps = 0, []
    for e in events:
        if e["symbol"] != freed:
            made[int(e["out"])] = int(e["args"][1])
            count += int(e["args"][1]) == size
        else:
            count -= made.pop(int(e["args"][0]), 0) == size
        steps.append(count)
    return np.array(steps)


@pytest.mark.parametrize("leak", [0, 3 << 19])
def test_only_the_leak_grows(tmp_path: Path, leak: int) -> None:
    process = run(tmp_path, qps=60, seconds=1, leak=leak)
    breath, weights = live(process, 4 << 20), live(process, 64 << 20)
    assert (breath.max(), (np.diff(breath) < 0).any()) == (10, True)
    assert weights[-1] == 1024 // 64
    leaked = live(process, leak)
    assert leaked[-1] == (60 if leak else 0)
    assert (np.diff(leaked) >= 0).all()
    assert process.live["async"].peak > 0
    assert process.bytes("async") == 0


def test_it_ends_with_a_sentence_when_memory_runs_out(tmp_path: Path) -> None:
    options = SMALL | {"qps": 100, "seconds": 5, "leak": 2 << 30}
    done = subprocess.run(
        workload("server", **options), env=environment(tmp_path, parse(FAST)),
        capture_output=True, text=True, timeout=60,
    )  # fmt: skip
    assert done.returncode == 1
    assert done.stderr == "the engine has ended: cuMemAlloc_v2 returned 2\n"
