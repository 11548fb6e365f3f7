"""The command line of ``scripts/bench``."""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

from benchlib import table, tracers
from benchlib.machine import describe
from benchlib.model import Bench, Context, Row, failed
from benchlib.registry import BENCHES


def main(about: str, root: Path) -> int:
    parser = argparse.ArgumentParser(
        prog="bench", description=about, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("names", nargs="*", metavar="NAME", help="only these (see --list)")
    parser.add_argument("--list", action="store_true", help="say what there is")
    parser.add_argument("--quick", action="store_true", help="short and rough, for trying")
    parser.add_argument("--install", action="store_true", help="install missing peers with apt")
    parser.add_argument(
        "-o", "--output", metavar="FILE", type=Path,
        help="write the table here (a full run writes docs/bench.md)",
    )  # fmt: skip
    args = parser.parse_args()
    if args.list:
        for bench in BENCHES:
            print(f"{bench.name:12} {bench.about}")
        return 0
    unknown = set(args.names) - {b.name for b in BENCHES}
    if unknown:
        parser.error(f"no benchmark is called {', '.join(sorted(unknown))}; see --list")
    if os.geteuid():
        print("bench: needs root, to load BPF programs and make namespaces", file=sys.stderr)
        return 5
    if args.install and (error := _install()):
        print(f"bench: {error}", file=sys.stderr)
        return 1
    chosen = [b for b in BENCHES if not args.names or b.name in args.names]
    output = args.output
    if output is None and not args.names and not args.quick:
        output = root / "docs" / "bench.md"
    return _measure(chosen, root, args.quick, output)


def _measure(chosen: list[Bench], root: Path, quick: bool, output: Path | None) -> int:
    """Run, print as results come, write the table; the exit code."""
    done: list[tuple[Bench, list[Row]]] = []
    print(table.header())
    with tempfile.TemporaryDirectory(prefix="dsprobe-bench-", dir="/var/tmp") as folder:
        ctx = Context(root, Path(folder), quick, lambda text: print(text, file=sys.stderr))
        for bench in chosen:
            rows: list[Row] = []
            for row in _rows(bench, ctx):
                print(table.line(row), flush=True)
                rows.append(row)
            done.append((bench, rows))
    if output:
        output.parent.mkdir(exist_ok=True)
        output.write_text(table.document(done, describe(), quick))
        print(f"bench: wrote {output}", file=sys.stderr)
    every = [row for _, rows in done for row in rows]
    if any(row.note.startswith("FAILED") for row in every):
        return 1
    return 6 if any(row.verdict == "OVER" for row in every) else 0


def _rows(bench: Bench, ctx: Context) -> Iterator[Row]:
    try:
        yield from bench.run(ctx)
    except Exception as e:
        if os.environ.get("DSPROBE_DEBUG"):
            raise
        text = " ".join(str(e).split()) or type(e).__name__
        yield failed(bench.name, "", text[:200])


def _install() -> str:
    """Install the packages of missing peers; why that failed, if it did."""
    wanted = sorted({t.package for t in tracers.PEERS if t.missing()} | {"iperf3", "nftables"})
    command = ["apt-get", "install", "-y", "--no-install-recommends", *wanted]
    quiet = dict(os.environ, DEBIAN_FRONTEND="noninteractive")
    done = subprocess.run(command, env=quiet, capture_output=True, text=True)
    if done.returncode:
        return f"{' '.join(command)} failed: {done.stderr.strip().splitlines()[-1:]}"
    return ""
