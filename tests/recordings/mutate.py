"""Mutates recordings and does everything with them that a command would.

``python -m tests.recordings.mutate FOLDER SEED CASES FILE...`` prints one line of JSON: how many
cases there were, how they went, the slowest one and the process's peak memory.
"""

from __future__ import annotations

import json
import os
import struct
import sys
import time
import traceback
from itertools import islice
from pathlib import Path

from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis import strategies as some

from dsprobe.recordings.cut import cut
from dsprobe.recordings.describe import dump_rows, info
from dsprobe.recordings.errors import RecordingError
from dsprobe.recordings.filesession import open_file

FOREVER = 1 << 63
BIG = (0, 1, 255, 1 << 16, (1 << 31) - 1, 1 << 32, 1 << 40, (1 << 63) - 1, (1 << 64) - 1)

KINDS = ("flip", "number", "cut", "splice", "repeat", "garbage", "swap")


def mutations(originals: list[bytes]) -> some.SearchStrategy[bytes]:
    """Files that are nearly one of ``originals``."""

    @some.composite
    def mutated(draw: some.DrawFn) -> bytes:
        data = bytearray(draw(some.sampled_from(originals)))
        place = some.integers(0, len(data) - 1)
        # Damage to the structure is rare in random places: aim at the head, the end and the
        # beginnings of records as well.
        aimed = place | some.sampled_from(starts(bytes(data))) | some.integers(-60, -1)
        for _ in range(draw(some.integers(1, 4))):
            kind = draw(some.sampled_from(KINDS))
            at = draw(aimed) % max(len(data), 1)
            n = draw(some.integers(1, 2000))
            if kind == "flip" and data:
                data[at] ^= 1 << draw(some.integers(0, 7))
            elif kind == "number":
                value = draw(some.sampled_from(BIG) | some.integers(0, (1 << 64) - 1))
                width = draw(some.sampled_from((1, 2, 4, 8)))
                data[at : at + width] = struct.pack("<Q", value)[:width]
            elif kind == "cut":
                del data[draw(some.sampled_from((at, len(data) - n))) :]
            elif kind == "splice":
                del data[at : at + n]
            elif kind == "repeat":
                times = draw(some.integers(1, 30))
                data[at:at] = data[at : at + n] * times
            elif kind == "garbage":
                data[at:at] = draw(some.binary(min_size=1, max_size=400))
            elif kind == "swap":
                other = draw(some.sampled_from(originals))
                data[at : at + n] = other[at : at + n]
        return bytes(data)

    return mutated()


def starts(data: bytes) -> list[int]:
    """Where the records of a sound file and their first fields begin."""
    at, found = 8, []
    while at + 9 < len(data):
        found += [at, at + 1, at + 9, at + 9 + 16, at + 37]
        at += 9 + struct.unpack_from("<Q", data, at + 1)[0]
    return [f for f in found if f < len(data)]


def use(path: Path, out: Path) -> tuple[bool, bool]:
    """Whether the file opened, and whether it was found damaged."""
    try:
        source = open_file(path)
    except RecordingError as e:
        if e.exit_code not in (1, 4) or "\n" in str(e):
            raise AssertionError(f"not a sentence and an exit code: {e!r}") from None
        return False, False
    with source:
        said = info(source)
        json.dumps(said)
        for name in source.streams:
            for row in islice(dump_rows(source, name, 0, FOREVER), 300):
                json.dumps(row, allow_nan=False)
            assert len(source.read(name, 10**9, 5002 * 10**9)) >= 0
        source.verify()
        first, last = source.span()
        assert 0 <= first <= last
        cut(source, out, first, last + 1, force=True)
        problems = bool(source.problems)
    with open_file(out) as product:
        assert product.verify()
    return True, problems


def main() -> None:
    folder, number, cases = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
    originals = [Path(p).read_bytes() for p in sys.argv[4:]]
    counts = {"cases": 0, "opened": 0, "refused": 0, "with_problems": 0}
    slowest = 0.0

    @seed(number)
    @settings(
        max_examples=cases, deadline=None, database=None, phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )  # fmt: skip
    @given(mutations(originals))
    def run(data: bytes) -> None:
        nonlocal slowest
        path = folder / f"case{number}.mcap"
        path.write_bytes(data)
        began = time.monotonic()
        try:
            opened, problems = use(path, folder / f"out{number}.mcap")
        except BaseException:
            # Hypothesis would print the file; the traceback says more.
            traceback.print_exc()
            print(f"the file is {path}", file=sys.stderr)
            os._exit(1)
        slowest = max(slowest, time.monotonic() - began)
        counts["cases"] += 1
        counts["opened"] += opened
        counts["refused"] += not opened
        counts["with_problems"] += problems
        os.unlink(path)

    run()
    # Not ru_maxrss: that begins with the peak of whoever started this process (execve(2)).
    status = Path("/proc/self/status").read_text()
    peak = int(next(x for x in status.splitlines() if x.startswith("VmHWM")).split()[1])
    print(json.dumps({**counts, "peak_kb": peak, "slowest_s": slowest}))


if __name__ == "__main__":
    main()
