"""Scenarios: TOML files that say what GPU is simulated, what fails, and what works on it.

title = "what it shows"
[gpu]       devices, memory ("80GiB"), name, driver (13000), kernels_at_once, kernel_us,
            h2d_gb_per_s, d2h_gb_per_s, d2d_gb_per_s, copy_us, module_load_us, graph_node_us
[kernels]   NAME = { us = 20, us_per_block = 0.5 }: durations of kernels by name
[failures]  SYMBOL = { call = 3, times = 1, result = 2 }: what its third call returns
[library]   flavour ("driver", "frame", "endbr"), nested (entry points call others),
            events (size of the log), log_launches
[workload]  run = "server", and its options
"""

from __future__ import annotations

import re
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib  # pytest brings it there

from tests.simgpu.build import FLAVOURS, symbols

FOLDER = Path(__file__).parent / "scenarios"

_UNITS = {"": 1, "KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30, "TiB": 1 << 40}

_GPU = {
    "devices": ("devices", 1.0), "driver": ("driver_version", 1.0),
    "kernels_at_once": ("kernels_at_once", 1.0), "kernel_us": ("kernel_ns", 1e3),
    "h2d_gb_per_s": ("h2d_bytes_per_s", 1e9), "d2h_gb_per_s": ("d2h_bytes_per_s", 1e9),
    "d2d_gb_per_s": ("d2d_bytes_per_s", 1e9), "copy_us": ("copy_ns", 1e3),
    "module_load_us": ("module_load_ns", 1e3), "graph_node_us": ("graph_node_ns", 1e3),
}  # fmt: skip
"""Number in [gpu]: (name in libcuda/config.c, factor)."""


class BadScenario(Exception):
    """A sentence that says what is wrong where."""


@dataclass(frozen=True)
class Scenario:
    """``settings`` are lines for libcuda/config.c; ``workload`` is a name, empty for none."""

    title: str = ""
    settings: dict[str, str] = field(default_factory=dict)
    flavour: str = "driver"
    workload: str = ""
    options: dict[str, str] = field(default_factory=dict)

    @property
    def config(self) -> str:
        return "".join(f"{k}={v}\n" for k, v in self.settings.items())


def load(path: Path) -> Scenario:
    """The scenario in a file; BadScenario for what it may not say."""
    try:
        return parse(tomllib.loads(path.read_text()))
    except OSError as e:
        raise BadScenario(f"{path}: {e.strerror}") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError, BadScenario) as e:
        raise BadScenario(f"{path}: {e}") from None


def parse(told: dict[str, Any]) -> Scenario:
    """The scenario that a TOML document tells."""
    told = dict(told)
    title = told.pop("title", "")
    known = {"gpu", "kernels", "failures", "library", "workload"}
    for name, table in told.items():
        if name not in known or not isinstance(table, dict):
            raise BadScenario(f"{name} is not one of [{'], ['.join(sorted(known))}]")
    settings = _gpu(told.get("gpu", {}))
    for name, k in told.get("kernels", {}).items():
        if not isinstance(k, dict) or not set(k) <= {"us", "us_per_block"}:
            raise BadScenario(f"[kernels] {name} wants us and us_per_block")
        words = (_number(k.get(key, 0), name) * 1e3 for key in ("us", "us_per_block"))
        settings[f"kernel.{name}"] = ":".join(f"{w:.0f}" for w in words)
    names = {s.name for s in symbols()}
    for name, f in told.get("failures", {}).items():
        if name not in names:
            raise BadScenario(f"[failures] {name} is no entry point of the simulated driver")
        if not isinstance(f, dict) or not {"call", "result"} <= set(f) <= {
            "call",
            "times",
            "result",
        }:
            raise BadScenario(f"[failures] {name} wants call and result, and maybe times")
        words = (_number(f.get(key, 1), name) for key in ("call", "times", "result"))
        settings[f"fail.{name}"] = ":".join(f"{w:.0f}" for w in words)
    library = dict(told.get("library", {}))
    flavour = library.pop("flavour", "driver")
    if flavour not in FLAVOURS:
        raise BadScenario(f"[library] flavour is one of {', '.join(FLAVOURS)}")
    for key, value in library.items():
        if key not in ("nested", "events", "log_launches"):
            raise BadScenario(f"[library] has no {key}")
        settings[key] = f"{int(value)}"
    options = {k: str(v) for k, v in told.get("workload", {}).items()}
    return Scenario(str(title), settings, flavour, options.pop("run", ""), options)


def _gpu(table: dict[str, Any]) -> dict[str, str]:
    settings = {}
    for key, value in table.items():
        if key == "memory":
            settings[key] = str(size(value))
        elif key == "name" and isinstance(value, str) and "\n" not in value:
            settings[key] = value
        elif key in _GPU:
            name, factor = _GPU[key]
            settings[name] = f"{_number(value, key) * factor:.0f}"
        else:
            raise BadScenario(f"[gpu] has no {key}")
    return settings


def _number(value: Any, key: str) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or value < 0:
        raise BadScenario(f"{key} = {value!r} is no number from 0 on")
    return float(value)


def size(value: Any) -> int:
    """Bytes in 4096 or "80GiB"."""
    match = re.fullmatch(r"(\d+)\s*([KMGT]iB)?", str(value))
    if not match:
        raise BadScenario(f'{value!r} is no size such as "80GiB"')
    return int(match[1]) * _UNITS[match[2] or ""]
