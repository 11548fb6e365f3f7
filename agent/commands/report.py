"""``dsprobe report``: processes that use CUDA in words: leaks, where threads wait, launch gaps."""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import replace
from typing import Any

from dsprobe.agent.commands import damage
from dsprobe.agent.commands.errors import GATE, Failure
from dsprobe.agent.commands.moment import interval
from dsprobe.agent.commands.save import ALL
from dsprobe.recordings import wire
from dsprobe.recordings.connection import Connection
from dsprobe.recordings.filesession import open_file
from dsprobe.recordings.gpus import gpus, xids
from dsprobe.recordings.leaks import Thresholds
from dsprobe.recordings.live import LiveSession
from dsprobe.recordings.report import report
from dsprobe.recordings.session import Session
from dsprobe.tui.gputext import gpu_lines
from dsprobe.tui.units import count, digits, nanoseconds, si, size, span

SILENT_SECONDS = 3.0
SECOND = 10**9


def run(args: argparse.Namespace) -> int:
    if args.file:
        with open_file(args.file) as source:
            code = _report(source, args)
            return code or damage.report(args.file, source.problems)
    live = _history(args.socket or wire.SOCKET)
    try:
        return _report(live, args)
    finally:
        live.close()


def _history(path: str) -> LiveSession:
    """What the running agent remembers."""
    connection = Connection(path, history=None, follow=False)
    live = LiveSession(connection)
    while live.live and live.wait(SILENT_SECONDS):
        pass
    if connection.ended != ALL:
        live.close()
        why = connection.ended or f"it said nothing for {SILENT_SECONDS:.0f} s"
        raise Failure(f"the agent at {path} did not tell all it remembers: {why}")
    return live


def _report(session: Session, args: argparse.Namespace) -> int:
    first, last = session.span()
    start, end = interval(session, args.start, args.end) if args.start or args.end else (0, 1 << 63)
    start, end = max(start, first - 1, 0), min(end, last)  # rows count that end after start
    said = report(session, start, end, _thresholds(args), args.top)
    said["problems"] = [p for p in said["problems"] if p != ALL]
    gpu = gpu_lines(gpus(session, start, end), xids(session, start, end))
    text = "\n".join(map(_printable, _lines(said, gpu)))
    print(json.dumps(said, indent=2) if args.json else text)
    sys.stdout.flush()
    return GATE if args.fail_on == "leak" and said["leaks"] else 0


def _thresholds(args: argparse.Namespace) -> Thresholds:
    chosen = {"warmup": args.warmup, "window": args.window, "min_bytes": args.min_growth}
    return replace(Thresholds(), **{k: v for k, v in chosen.items() if v is not None})


def _printable(line: str) -> str:
    """A session may hold anything; a terminal gets no control characters from it."""
    return "".join(ch if ch.isprintable() else "?" for ch in line)


def _lines(said: dict[str, Any], gpu: list[str]) -> list[str]:
    lines = [
        f"{said['source']}: host {said['host'] or '?'}, {said['start'] or '?'} to "
        f"{said['end'] or '?'} ({span(said['end_ns'] - said['start_ns'])})"
    ]
    lines += [
        f"{name} is {state['status']}: {state['reason'] or 'no reason was given'}"
        for name, state in said["probes"].items()
        if state["status"] != "attached" or state["reason"]
    ]
    nvml = said["nvml"]
    if nvml and nvml["status"] not in ("attached", "off"):
        lines.append(f"nvml is {nvml['status']}: {nvml['reason'] or 'no reason was given'}")
    lines += ["", *gpu] if gpu else []
    if not said["processes"]:
        none = "No process used CUDA" if said["probes"] else "Nobody looked for CUDA"
        return [*lines, "", f"{none} in this time."]
    lines += ["", *_leaks(said), "", *_growing(said)]
    for process in said["processes"]:
        lines += [*_process(process), ""]
    return lines + _single(said) + _losses(said)


# -- leaks ---------------------------------------------------------------------------------------


def _leaks(said: dict[str, Any]) -> list[str]:
    lines = []
    n = len(said["leaks"])
    if n:
        lines.append(f"{n} {'stack leaks' if n == 1 else 'stacks leak'} GPU memory, fastest first:")
    elif said["judged"]:
        lines.append(f"No stack leaks GPU memory in {', '.join(said['judged'][:MAX_NAMED])}.")
    for n, leak in enumerate(said["leaks"], 1):
        lines += [
            f"{n:>3}. {leak['where']}",
            f"     {leak['process']} grows by {size(leak['bytes_per_minute'])}/min "
            f"({digits(leak['blocks_per_minute'])} blocks/min) of {leak['kind']} memory: "
            f"{size(leak['live'])} live in {leak['blocks']:,} blocks, {size(leak['grown'])} more "
            f"over {leak['windows']} windows of {digits(leak['window_s'])} s",
        ]
        if leak["caching_allocator"]:
            lines.append(
                "     through a caching allocator: growing segments mean tensors that stay; this"
                " stack asked for more, and others may hold it"
            )
        lines += [f"       {'<- ' if i else 'at '}{f['text']}" for i, f in _shown(leak["frames"])]
    lines += _unjudged(said)
    if said["stacks_left_out"]:
        lines.append(f"{said['stacks_left_out']:,} stacks were too many to be looked at.")
    return lines or ["No process holds GPU memory allocated in this time."]


def _unjudged(said: dict[str, Any]) -> list[str]:
    """Who was not seen for long enough."""
    alive = [u for u in said["unjudged"] if not u["ended"]]
    lines = [
        f"Not enough time yet to tell of leaks in {u['process']}: seen for {digits(u['seen_s'])} s "
        f"of {digits(said['needed_s'])} s."
        for u in alive[:MAX_NAMED]
    ]
    others = len(said["unjudged"]) - len(lines)
    if others:
        lines.append(
            f"{others} {'process' if others == 1 else 'processes'} that ended lived too short to be"
            " told of leaks."
        )
    return lines


MAX_NAMED = 8
MAX_COMMAND = 300
MAX_FRAMES = 12


def _shown(frames: list[dict[str, Any]]) -> list[tuple[int, dict[str, Any]]]:
    return list(enumerate(frames[:MAX_FRAMES]))


def _growing(said: dict[str, Any]) -> list[str]:
    leaking = {(leak["process_id"], leak["stack_id"]) for leak in said["leaks"]}
    rows = [g for g in said["growing"] if (g["process_id"], g["stack_id"]) not in leaking]
    lines = [
        f"  {_signed(g['grown']):>8} {g['where']} by {g['process']}: {size(g['live'])} of "
        f"{g['kind']} memory live in {g['blocks']:,} blocks, {nanoseconds(g['age_s'] * 1e9)} old"
        for g in rows
    ]
    if said["unexplained"]:
        lines.append(f"  {size(said['unexplained'])} more are live of which no stack is known here")
    title = "Other stacks that grew" if leaking else "Stacks that grew"
    return [f"{title} (which alone is no leak):", *lines, ""] if lines else []


# -- processes -----------------------------------------------------------------------------------


def _process(p: dict[str, Any]) -> list[str]:
    facts = [
        p["driver"] and f"driver {p['driver']}",
        p["container"] and f"container {p['container'][:12]}",
        p["pod"] and f"pod {p['pod']}",
        p["python"] and f"Python {'' if p['python'][0].isdigit() else 'stacks: '}{p['python']}",
        p["ended"] and f"ended {p['ended']}",
    ]
    lines = [
        f"{p['label']}  {p['command'][:MAX_COMMAND]}".rstrip(),
        "  " + ", ".join(f for f in facts if f),
    ]
    if p["late"]:
        lines.append(f"  was there before: what it had allocated by {p['late']} is not known")
    lines += [f"  {line}" for line in _memory(p["memory"], bool(p["ended"]), bool(p["late"]))]
    for name, b in p["blocked"].items():
        if b["busy_s"]:
            failed = f", {b['failed']:,} failed" if b["failed"] else ""
            lines.append(
                f"  in {name:<10} {digits(b['threads']):>6} threads on average: "
                f"{nanoseconds(b['busy_s'] * 1e9)} in {count(b['count'], 'call')}{failed}"
            )
    for call in [c for c in p["calls"] if c["busy_s"]][:5]:
        lines.append(
            f"    {call['function']:<28} {count(call['count'], 'call'):>16}, "
            f"{_bound(call['p50_s'])} P50, "
            f"{_bound(call['p99_s'])} P99, {nanoseconds(call['busy_s'] * 1e9)} in all"
        )
    for row in p["threads"]:
        shed = f"; {digits(100 * row['shed'])}% without a row of their own" if row["shed"] else ""
        lines.append(
            f"  {row['thread']} launches {si(row['rate'])}/s, {row['launches']:,} in all: intervals"
            f" {_bound(row['interval_p50_s'])} P50, {_bound(row['interval_p99_s'])} P99, "
            f"{nanoseconds(row['longest_s'] * 1e9)} longest{shed}"
        )
    return [line for line in lines if line.strip()]


def _memory(memory: dict[str, Any], ended: bool, late: bool) -> list[str]:
    if not memory["kinds"]:
        since = " since it was first seen" if late else ""
        return [f"no GPU memory allocated in this time{since}"]
    lines = []
    if not ended:
        lines = [f"GPU memory: {size(memory['live'])} live, {_signed(memory['grown'])}"]
    for k in memory["kinds"]:
        held = f"{size(k['live']):>8} in {k['blocks']:,} blocks, {_signed(k['grown'])}, "
        reclaimed = f", {k['reclaimed']:,} never freed ({size(k['reclaimed_bytes'])}): gone with "
        reclaimed += "the process" if ended else "their context"
        peak = "peak at least" if k["shed"] else "peak"  # single calls tell it
        more = [f"{k[name]:,} {what}" for name, what in (
            ("failed", "failed"), ("unknown", "frees of blocks from before"),
            ("shed", "without a row of their own")) if k[name]]  # fmt: skip
        lines.append(
            f"  {k['kind']:<10} {'' if ended else held}{peak} {size(k['peak'])}; "
            f"{count(k['allocs'], 'allocation')}, {count(k['frees'], 'free')}"
            f"{reclaimed if k['reclaimed'] else ''}" + "".join(f", {text}" for text in more)
        )
    return lines


def _signed(amount: int) -> str:
    return f"{'-' if amount < 0 else '+'}{size(abs(amount))}"


def _bound(seconds: float | None) -> str:
    return "?" if seconds is None else f"<={nanoseconds(seconds * 1e9)}"


# -- single calls and gaps, losses ---------------------------------------------------------------


def _single(said: dict[str, Any]) -> list[str]:
    lines = []
    if said["open_calls"]:
        lines.append("Calls that had not returned:")
        lines += [
            f"  {c['process']} {c['thread']} in {c['function']} for {nanoseconds(c['for_s'] * 1e9)}"
            for c in said["open_calls"]
        ] + [""]
    if said["gaps"]:
        lines.append("Longest times without a launch:")
        for g in said["gaps"]:
            within = ", in no CUDA call"
            if g["within"]:
                within = f", {nanoseconds(g['within_s'] * 1e9)} of it in {g['within']}"
            lines.append(
                f"  {nanoseconds(g['duration_s'] * 1e9):>8} {g['process']} {g['thread']} up to "
                f"{g['end'] or g['end_ns']}{within}"
            )
        lines.append("")
    if said["slow_calls"]:
        lines.append("Slowest calls:")
        for c in said["slow_calls"]:
            place = f" at {c['where']}" if c["where"] else ""
            failed = f", error {c['result']}" if c["result"] else ""
            lines.append(
                f"  {nanoseconds(c['duration_s'] * 1e9):>8} {c['function']} by {c['process']} "
                f"{c['thread']}{place}{failed}"
            )
        lines.append("")
    return lines


def _losses(said: dict[str, Any]) -> list[str]:
    lost = [f"{n:,} of {name}" for name, n in sorted(said["lost"].items()) if n]
    return [f"Rows lost: {', '.join(lost) or 'none'}."]
