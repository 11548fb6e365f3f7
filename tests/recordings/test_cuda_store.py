"""Processes, threads, stacks and frames keep their meaning through every verb."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from dsprobe.recordings import describe
from dsprobe.recordings import streams as st
from dsprobe.recordings.cut import cut
from dsprobe.recordings.filesession import open_file
from dsprobe.recordings.identities import Identities
from dsprobe.recordings.merge import merge
from dsprobe.recordings.model import Rows
from dsprobe.recordings.references import last_of_ids
from dsprobe.recordings.session import FOREVER
from dsprobe.recordings.stacks import Stacks
from dsprobe.recordings.writer import Writer
from tests.recordings.cudahost import BOOT, MIB, SECOND, CudaHost
from tests.recordings.sample import same


def write(host: CudaHost, path: Path, **more: str) -> None:
    """What ``host`` has seen so far as a file, with facts ``more``."""
    said = {"host": "gpu-07", "boot_id": "b-1", "agent_pid": "77", **more}
    host.session.append("meta.session", t=BOOT, key=list(said), value=list(said.values()))
    host.session.refresh()
    with Writer(path) as writer:
        for name, stream in host.session.streams.items():
            writer.append(stream, host.session.read(name, 0, FOREVER))


def two_processes() -> CudaHost:
    """Process 1 allocates once a second with stack 1, process 2 from the tenth second with 2."""
    host = CudaHost()
    host.process(1, 41)
    host.process(2, 42, comm="worker")
    host.thread(1, 1, 43)
    host.thread(2, 2, 44, comm="loop")
    sync = host.string(1, "cuStreamSynchronize")
    host.string(2, "cuMemAlloc_v2")
    host.session.append("meta.kernel", t=BOOT, id=1, process=1, handle=0xABC, name="decode")
    host.session.append("meta.kernel", t=BOOT, id=2, process=2, handle=0xDEF, name="")
    first = host.stack(1, ["grow@a.py:1", "main@a.py:9"], 1)
    second = host.stack(2, ["fill@b.py:2", "main@a.py:9"], 2)

    def act(number: int, t: int) -> None:
        process = 1 if number < 10 else 2
        (first if number < 10 else second).alloc(t, MIB)
        s = host.session
        s.append("gpu.alloc", t=t, process=process, thread=process, stack=process, bytes=MIB,
                 function=2)  # fmt: skip
        s.append(
            "cuda.launch", t=t, process=process, thread=process, kernel=process, grid=[[4, 1, 1]]
        )
        s.append("cuda.call", t=t, duration=1000, process=process, thread=process, function=sync,
                 stack=process if number % 2 else 0, kind=1)  # fmt: skip

    host.run(20, act)
    return host


def dumped(path: Path, stream: str) -> list[dict[str, Any]]:
    with open_file(path) as source:
        rows = list(describe.dump_rows(source, stream, 0, FOREVER))
    return json.loads(json.dumps(rows))  # what JSON makes of it


def ids(path: Path, stream: str) -> set[int]:
    with open_file(path) as source:
        return set(source.read(stream, 0, FOREVER)["id"].tolist())


def test_dump_says_what_numbers_stand_for(tmp_path: Path) -> None:
    write(two_processes(), tmp_path / "a.mcap")
    last = dumped(tmp_path / "a.mcap", "cuda.call")[-1]
    assert (last["process"], last["process_id"]) == ("worker:42", 2)
    assert (last["thread"], last["thread_id"]) == ("loop:44", 2)
    assert (last["stack"], last["stack_id"]) == (["fill (b.py:2)", "main (a.py:9)"], 2)
    assert (last["function"], last["kind"]) == ("cuStreamSynchronize", "sync")
    assert dumped(tmp_path / "a.mcap", "cuda.call")[-2]["stack"] is None
    launches = dumped(tmp_path / "a.mcap", "cuda.launch")
    assert launches[0]["kernel"] == "decode"
    assert launches[-1]["kernel"] == "kernel at 0xdef"
    assert dumped(tmp_path / "a.mcap", "meta.thread")[1]["process"] == "worker:42"


def test_a_cut_keeps_what_its_rows_lead_to_and_no_other_process(tmp_path: Path) -> None:
    host = two_processes()
    host.process(2, 42, comm="worker", ended=host.now)  # said again, after the cut
    write(host, tmp_path / "a.mcap")
    only = ("cuda.call", "gpu.alloc", "cuda.launch")
    with open_file(tmp_path / "a.mcap") as source:
        cut(source, tmp_path / "c.mcap", BOOT + 11 * SECOND, BOOT + 15 * SECOND, only)
    whole = dumped(tmp_path / "a.mcap", "cuda.call")
    assert dumped(tmp_path / "c.mcap", "cuda.call") == whole[11:15]
    for stream in ("meta.process", "meta.thread", "meta.kernel", "meta.stack"):
        assert ids(tmp_path / "c.mcap", stream) == {2}, stream
    assert ids(tmp_path / "c.mcap", "meta.frame") == {101, 102}
    with open_file(tmp_path / "c.mcap") as part:
        assert [p["ended"] is None for p in describe.info(part)["processes"]] == [False]


def test_parts_of_one_recording_are_the_whole_again(tmp_path: Path) -> None:
    """The parts say of process 1 what was known when, and overlap; still it is one process."""
    host = two_processes()
    write(host, tmp_path / "a.mcap")
    host.process(1, 41, comm="renamed", ended=host.now)
    host.session.append("meta.frame", t=host.now, id=101, kind=0, function="main", file="c.py")
    host.run(5)
    write(host, tmp_path / "b.mcap")
    with open_file(tmp_path / "b.mcap") as source:
        cut(source, tmp_path / "late.mcap", BOOT + 5 * SECOND, FOREVER)
    merge([tmp_path / "a.mcap", tmp_path / "late.mcap"], tmp_path / "m.mcap")
    with open_file(tmp_path / "b.mcap") as whole, open_file(tmp_path / "m.mcap") as merged:
        for name in ("gpu.alloc", "gpu.stack", "cuda.call", "meta.stack", "meta.process"):
            assert same(merged.read(name, 0, FOREVER), whole.read(name, 0, FOREVER)), name
    assert dumped(tmp_path / "m.mcap", "gpu.alloc")[0]["process"] == "renamed:41"


def test_numbers_of_two_agents_are_kept_apart(tmp_path: Path) -> None:
    """Both agents call something 1: the processes are two, stacks that read alike are one."""
    write(two_processes(), tmp_path / "a.mcap")
    host = CudaHost()
    host.now = BOOT + 100 * SECOND
    host.process(1, 41)  # the same PID: perhaps the same process, but who knows
    host.thread(1, 1, 43)
    grow = host.stack(2, ["grow@a.py:1", "main@a.py:9"], 1)
    other = host.stack(1, ["other@z.py:5"], 1)

    def act(number: int, t: int) -> None:
        stack = grow if number % 2 else other
        stack.alloc(t, MIB)
        host.session.append("gpu.alloc", t=t, process=1, thread=1, stack=stack.stack, bytes=MIB)

    host.run(4, act)
    write(host, tmp_path / "b.mcap", agent_pid="78")
    merge([tmp_path / "a.mcap", tmp_path / "b.mcap"], tmp_path / "m.mcap")
    words = ("process", "thread", "stack")
    parts = dumped(tmp_path / "a.mcap", "gpu.alloc") + dumped(tmp_path / "b.mcap", "gpu.alloc")
    rows = dumped(tmp_path / "m.mcap", "gpu.alloc")
    assert [[r[w] for w in words] for r in rows] == [[r[w] for w in words] for r in parts]
    assert rows[0]["process_id"] != rows[-1]["process_id"]
    assert rows[0]["thread_id"] != rows[-1]["thread_id"]
    assert rows[0]["stack"] == rows[-1]["stack"]
    assert rows[0]["stack_id"] == rows[-1]["stack_id"]


def test_the_last_row_of_an_id_holds() -> None:
    host = CudaHost()
    host.process(7, 1, comm="before")
    host.process(8, 2, comm="other")
    host.process(7, 1, comm="after")
    host.session.refresh()
    rows: Rows = host.session.read("meta.process", 0, FOREVER)
    assert last_of_ids(st.STREAMS["meta.process"], rows)["comm"].tolist() == ["other", "after"]
    assert not len(last_of_ids(st.STREAMS["meta.process"], rows[:0]))
    who = Identities(host.session)
    who.refresh()
    assert who.process(7).label == "after:1"
    assert who.process(9).label == "process 9"


def test_a_live_session_goes_on_telling() -> None:
    host = CudaHost(live=True)
    host.session.refresh()
    who, stacks = Identities(host.session), Stacks(host.session)
    for number in range(1, 5):
        host.now += 100 * SECOND
        host.process(number, 40 + number)
        host.process(1, 41, comm=f"now {number}")
        host.stack(number, [f"f{number}@a.py:{number}"])
        host.session.refresh()
        who.refresh()
        stacks.refresh()
        assert who.process(number).pid == 40 + number
        assert who.process(1).comm == f"now {number}"
        assert [f.text for f in stacks.frames(number)] == [f"f{number} (a.py:{number})"]
    assert len(who.processes) == 4


def test_what_nobody_explains_is_said() -> None:
    host = CudaHost()
    host.session.append("meta.stack", t=BOOT, id=1, depth=[0, 1, 65535], frame=[5, 6, 7])
    host.session.append("meta.frame", t=BOOT, id=6, kind=[9], function="f")
    host.session.refresh()
    stacks = Stacks(host.session)
    stacks.refresh()
    assert [f.kind for f in stacks.frames(1)] == ["status", "native"]
    assert stacks.frames(2)[0].text == "[stack 2 is not explained in this session]"
    assert stacks.frames(0)[0].text == "[no stack was taken]"


def test_processes_of_an_older_version_are_known() -> None:
    fields = tuple(f for f in st.STREAMS["meta.process"].fields if f.name != "late")
    old = type(st.MARKER)("meta.process", "", "", fields)
    host = CudaHost()
    host.session.append_rows(old, old.rows(t=[BOOT], id=[1], pid=[4711], comm=["server"]))
    host.session.refresh()
    who = Identities(host.session)
    who.refresh()
    assert (who.process(1).label, who.process(1).late) == ("server:4711", 0)


@pytest.mark.parametrize("stream", ["meta.process", "meta.stack", "meta.frame", "meta.thread"])
def test_streams_of_a_stranger_give_nothing(stream: str) -> None:
    """A file may declare anything under these names."""
    fields = tuple(f for f in st.STREAMS[stream].fields if f.name in ("t", "id"))
    strange = type(st.MARKER)(stream, "", "", fields)
    host = CudaHost()
    host.session.append_rows(strange, strange.rows(t=[BOOT, BOOT], id=[1, 2]))
    host.session.refresh()
    who, stacks = Identities(host.session), Stacks(host.session)
    who.refresh()
    stacks.refresh()
    assert not who.processes
    assert stacks.frames(1)[0].kind == "status"
