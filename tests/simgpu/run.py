"""Runs a command, or the workload of a scenario, on the simulated driver (scripts/simgpu)."""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path

from tests.simgpu import build, truth
from tests.simgpu.scenario import FOLDER, BadScenario, Scenario, load

ROOT = Path(__file__).parents[2]
IN_C = ("launches", "storm", "forks")
IN_PYTHON = ("console", "threads", "workers", "stacks", "server")


def environment(
    folder: Path, scenario: Scenario | None = None, *, preload: bool = False,
    base: Mapping[str, str] = os.environ,
) -> dict[str, str]:  # fmt: skip
    """Variables under which a program finds the simulated driver, which keeps truth in ``folder``.

    ``preload``: it is loaded into every program, whether that asks for it or not.
    """
    scenario = scenario or Scenario()
    folder.mkdir(parents=True, exist_ok=True)
    config = folder / "config"
    config.write_text(scenario.config)
    library = build.libcuda(scenario.flavour)
    env = dict(base) | {"SIMGPU_CONFIG": str(config), "SIMGPU_TRUTH": str(folder)}
    env["LD_LIBRARY_PATH"] = _before(library, base.get("LD_LIBRARY_PATH"), ":")
    env["PYTHONPATH"] = _before(ROOT, base.get("PYTHONPATH"), ":")
    if preload:
        env["LD_PRELOAD"] = _before(library / "libcuda.so.1", base.get("LD_PRELOAD"), " ")
    return env


def _before(first: Path, rest: str | None, sep: str) -> str:
    return f"{first}{sep}{rest}" if rest else str(first)


def workload(name: str, *, python: str = sys.executable, **options: object) -> list[str]:
    """Command line of a workload of ours; options as ``key=value``."""
    words = [f"{k}={v}" for k, v in options.items()]
    if name in IN_C:
        return [str(build.program(name)), *words]
    if name in IN_PYTHON:
        return [python, "-m", f"tests.simgpu.workloads.{name}", *words]
    raise BadScenario(f"no such workload: {name}; there are {', '.join(IN_C + IN_PYTHON)}")


def main(argv: list[str] | None = None) -> int:
    p = argparse.ArgumentParser(
        prog="simgpu",
        usage="simgpu [-h] [--truth TRUTH] [--preload] [--set KEY=VALUE] [--events] SCENARIO"
        " [-- CMD ...]",
        description="Run a command, or the scenario's own workload, on a simulated GPU, and print"
        " as JSON what it was asked. The command's exit code is passed on.",
    )
    p.add_argument("scenario", type=Path, help="a TOML file, or a name in tests/simgpu/scenarios")
    p.add_argument("--truth", type=Path, help="keep the truth files in this folder")
    p.add_argument("--preload", action="store_true", help="load the driver into every program")
    p.add_argument(
        "--set", action="append", default=[], metavar="KEY=VALUE", help="option of its workload"
    )
    p.add_argument("--events", action="store_true", help="print each call, too")
    words = sys.argv[1:] if argv is None else argv
    at = words.index("--") if "--" in words else len(words)
    args = p.parse_args(words[:at])
    command = words[at + 1 :]
    named = FOLDER / f"{args.scenario}.toml"
    path = named if named.exists() and not args.scenario.exists() else args.scenario
    try:
        scenario = load(path)
        if not command:
            if not scenario.workload:
                raise BadScenario(f"{path} has no [workload]; say a command after --")
            given = dict(word.partition("=")[::2] for word in args.set)
            command = workload(scenario.workload, **scenario.options | given)
    except BadScenario as e:
        print(f"simgpu: {e}", file=sys.stderr)
        return 2
    with tempfile.TemporaryDirectory(prefix="simgpu-") as own:
        folder = args.truth or Path(own)
        try:
            code = _run(command, environment(folder, scenario, preload=args.preload))
        except OSError as e:
            print(f"simgpu: {command[0]}: {e.strerror}", file=sys.stderr)
            return 1
        processes = truth.read_all(folder)
        out = {
            "simulated": True,
            "scenario": scenario.title or path.stem,
            "exit": code,
            "calls": truth.totals(processes),
            "live_device_bytes": sum(q.bytes() for q in processes),
            "processes": [q.to_json(args.events) for q in processes],
        }
        try:
            print(json.dumps(out, indent=None if args.events else 2), flush=True)
        except BrokenPipeError:  # whoever reads it has seen enough
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return code


def _run(command: list[str], env: dict[str, str]) -> int:
    """Exit code of ``command``, 128+n if a signal killed it.  Its output goes to stderr: stdout is
    for the truth.  Signals that end us are its to handle first."""
    with subprocess.Popen(command, env=env, stdout=sys.stderr) as child:
        for s in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            signal.signal(s, lambda n, _frame: child.send_signal(n))
        code = child.wait()
    return 128 - code if code < 0 else code


if __name__ == "__main__":
    sys.exit(main())
