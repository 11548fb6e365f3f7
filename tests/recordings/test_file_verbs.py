"""dsprobe info, dump, cut and merge as a person or a script uses them."""

import errno
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from dsprobe.agent.commands.main import main
from dsprobe.recordings import streams as st
from dsprobe.recordings.cut import is_event
from dsprobe.recordings.filesession import open_file
from dsprobe.recordings.writer import Writer
from tests.recordings.sample import FOREVER, SECOND, T0, head, write_host

# 1_700_000_000 s after the epoch is 2023-11-14 22:13:20 UTC; the sample's clock is T0 s later,
# and its host two hours ahead of UTC.
START = "2023-11-15T01:36:40"


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("files")
    write_host(folder / "whole.mcap", 10)
    write_host(folder / "off.mcap", 10, end=False)
    data = bytearray((folder / "whole.mcap").read_bytes())
    with open_file(folder / "whole.mcap") as source:
        data[source._layout.table.row(3)[0] + 200] ^= 4
    (folder / "bad.mcap").write_bytes(data)
    (folder / "text.mcap").write_text("hello")
    (folder / "empty.mcap").write_bytes(b"")
    return folder


def run(capsys: pytest.CaptureFixture[str], *argv: object) -> tuple[int, str, str]:
    code = main([str(a) for a in argv])
    said = capsys.readouterr()
    assert "Traceback" not in said.err
    return code, said.out, said.err


def test_info_of_a_whole_file(files: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, out, err = run(capsys, "info", files / "whole.mcap", "--json")
    said = json.loads(out)
    assert (code, err) == (0, "")
    assert said["host"] == "testhost"
    assert said["truncated"] is False
    assert said["start"].startswith(START)
    assert said["start"].endswith("+02:00")
    assert said["duration_s"] == pytest.approx(10, abs=0.2)
    assert said["streams"]["softirq.cpu"] == {
        "rows": 400, "bytes": said["streams"]["softirq.cpu"]["bytes"], "lost": 0,
    }  # fmt: skip
    assert said["coverage"]["softirq"] == {"status": "attached", "reason": ""}
    assert said["coverage"]["tcp"]["status"] == "missing"
    code, out, err = run(capsys, "info", files / "whole.mcap", "--verify")
    assert (code, err) == (0, "")
    assert "softirq.cpu" in out
    assert "tracepoint tcp:tcp_retransmit_skb is missing" in out


@pytest.mark.parametrize(
    ("name", "options", "code", "words"),
    [
        ("off.mcap", [], 3, "has no end"),
        ("bad.mcap", ["--verify"], 3, "was left out"),
        ("empty.mcap", [], 3, "has no end"),
        ("text.mcap", [], 1, "is not a recording"),
        ("none.mcap", [], 1, "No such file"),
    ],
)
def test_info_of_others(
    files: Path, capsys: pytest.CaptureFixture[str], name: str, options: list[str], code: int,
    words: str,
) -> None:  # fmt: skip
    result, out, err = run(capsys, "info", files / name, "--json", *options)
    assert result == code
    assert words in err
    assert len(err.splitlines()) == 1
    if code == 3:
        said = json.loads(out)
        assert words in said["problems"][0]
        assert said["truncated"] is ("end" in words)


@pytest.mark.parametrize(
    ("name", "options", "condition"),
    [
        ("whole.mcap", [], "not verified"),
        ("whole.mcap", ["--verify"], "whole"),
        ("bad.mcap", [], "not verified"),
        ("bad.mcap", ["--verify"], "with problems"),
        ("off.mcap", [], "cut off"),
        ("off.mcap", ["--verify"], "cut off"),
    ],
)
def test_info_says_whole_only_of_what_it_has_looked_at(
    files: Path, capsys: pytest.CaptureFixture[str], name: str, options: list[str], condition: str
) -> None:
    _, out, _ = run(capsys, "info", files / name, *options)
    (line,) = (line for line in out.splitlines() if line.startswith("written "))
    assert line.endswith(f", {condition}")
    _, out, _ = run(capsys, "info", files / name, "--json", *options)
    assert json.loads(out)["verified"] is bool(options)


def test_info_of_a_recording_that_ended_early_is_not_whole(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    writer = Writer(tmp_path / "x.mcap")
    head(writer)
    writer.close("the disk was full")
    for options in ([], ["--verify"]):
        code, out, _ = run(capsys, "info", tmp_path / "x.mcap", *options)
        assert code == 3
        assert ", with problems\n" in out
        assert "whole" not in out


def dump(
    capsys: pytest.CaptureFixture[str], *argv: object, code: int = 0
) -> list[dict[str, object]]:
    result, out, _ = run(capsys, "dump", *argv)
    assert result == code
    return [json.loads(line) for line in out.splitlines()]


def test_dump_resolves_names(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "d.mcap"
    v4 = [0] * 10 + [255, 255, 192, 0, 2, 1]
    v6 = [0x20, 1, 0xD, 0xB8, *[0] * 11, 1]
    with Writer(path) as writer:
        head(writer)
        writer.append(st.META_CLOCK, st.META_CLOCK.rows(t=[T0], wall=[1_700_005_000 * SECOND]))
        writer.append(
            st.TCP_RETRANSMIT,
            st.TCP_RETRANSMIT.rows(
                t=[T0 + 1, T0 + 1_500_000], netns=[4026531840, 99], state=[1, 200], kind=[1, 2],
                saddr=[v4, v6], daddr=[v6, v4], err=[0, -11],
            ),
        )  # fmt: skip
        writer.append(
            st.SOFTIRQ_SLOW, st.SOFTIRQ_SLOW.rows(t=[T0], vec=[3], comm=[b"caf\xe9 \xff"])
        )
        writer.append(st.CPU_LOAD, st.CPU_LOAD.rows(t=[T0], load1=[float("nan")]))
    first, second = dump(capsys, path, "--stream", "tcp.retransmit")
    assert first["t"] == T0 + 1
    assert first["time"] == START + ".000000+02:00"
    assert second["time"] == START + ".001500+02:00"
    assert (first["netns"], first["netns_id"]) == ("host", 4026531840)
    assert (second["netns"], second["netns_id"]) == (99, 99)
    assert (first["state"], second["state"]) == ("ESTABLISHED", 200)
    assert (first["kind"], second["kind"]) == ("SYN", "SYN-ACK")
    assert (first["saddr"], first["daddr"]) == ("192.0.2.1", "2001:db8::1")
    assert second["err"] == -11
    (slow,) = dump(capsys, path, "--stream", "softirq.slow")
    assert (slow["vec"], slow["comm"]) == ("NET_RX", "caf\ufffd \ufffd")
    (load,) = dump(capsys, path, "--stream", "cpu.load")
    assert load["load1"] is None
    sums = dump(capsys, path, "--stream", "rollup.lane")
    assert {row["lane"] for row in sums} >= {"covered", "tcp.retransmits", "softirq.slow"}


@pytest.mark.parametrize(
    ("options", "seconds"),
    [
        ([], range(10)),
        (["--from", "8s"], [8, 9]),
        (["--to", "1s"], [0]),
        (["--from", "-1s"], [9]),
        (["--from", "2s", "--to", "-6s"], [2, 3]),
        (["--from", "01:36:45", "--to", "01:36:46.5"], [5, 6]),
        (["--from", START + "+02:00", "--to", "2023-11-14T23:36:42Z"], [0, 1]),
        (["--from", "2023-11-15T01:36:48"], [8, 9]),
    ],
)
def test_moments(
    files: Path, capsys: pytest.CaptureFixture[str], options: list[str], seconds: list[int]
) -> None:
    rows = dump(capsys, files / "whole.mcap", "--stream", "softirq.cpu", *options)
    found = sorted({(int(str(row["t"])) - T0) // SECOND for row in rows})
    # Counted from the first event and the last one, which are not at whole seconds.
    assert set(seconds) <= set(found) <= {min(seconds) - 1, *seconds, max(seconds) + 1}


@pytest.mark.parametrize("when", ["yesterday", "25:61", "-x", "2023-13-45T00:00:00", "9" * 40])
def test_moments_that_are_none(files: Path, capsys: pytest.CaptureFixture[str], when: str) -> None:
    code, out, err = run(
        capsys, "dump", files / "whole.mcap", "--stream", "softirq.cpu", f"--from={when}"
    )
    assert (code, out) == (2, "")
    assert "is not a moment" in err


def test_dump_of_damaged_and_unknown(files: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert len(dump(capsys, files / "off.mcap", "--stream", "softirq.cpu", code=3)) == 400
    assert len(dump(capsys, files / "bad.mcap", "--stream", "softirq.cpu", code=3)) == 360
    code, out, err = run(capsys, "dump", files / "whole.mcap", "--stream", "gpu.kernel")
    assert (code, out) == (2, "")
    assert "it has meta.clock, " in err


def test_dump_into_a_pipe_that_closes(files: Path) -> None:
    script = "import sys; from dsprobe.agent.commands.main import main; sys.exit(main())"
    reader, writer = os.pipe()
    with subprocess.Popen(
        [sys.executable, "-c", script, "dump", files / "whole.mcap", "--stream", "softirq.cpu"],
        stdout=writer, stderr=subprocess.PIPE,
    ) as dumping:  # fmt: skip
        os.close(writer)
        assert os.read(reader, 10)
        os.close(reader)
        assert dumping.stderr is not None
        assert dumping.stderr.read() == b""
    assert dumping.returncode == 141


def test_cut_and_merge(files: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    a, b, m = (tmp_path / f"{n}.mcap" for n in "abm")
    assert run(capsys, "cut", files / "whole.mcap", "-o", a, "--to", "4s")[0] == 0
    code, _, err = run(
        capsys, "cut", files / "off.mcap", "-o", b, "--from", "4s", "--streams", "softirq.cpu"
    )
    assert code == 3
    assert "has no end" in err
    code, _, err = run(capsys, "merge", a, b, "-o", m)
    assert code == 0
    with open_file(m) as merged:
        rows = sum(t.rows for name, t in merged.totals().items() if is_event(name))
    assert err == f"{m}: {rows:,} rows of 2 recordings\n"
    assert rows > 400
    assert run(capsys, "merge", a, b, "-o", m)[0] == 1
    assert run(capsys, "merge", a, b, "-o", m, "--force")[0] == 0
    with open_file(m) as merged:
        assert len(merged.read("softirq.cpu", 0, FOREVER)) == 400
        assert merged.read("tcp.retransmit", 0, FOREVER)["t"].max() < T0 + 5 * SECOND
    code, _, err = run(capsys, "cut", m, "-o", a, "--streams", "nothing")
    assert code == 2
    assert "has no stream nothing" in err


@pytest.mark.root
@pytest.mark.parametrize("path", ["/proc/self/mem", "/proc/self/status", "/proc/kmsg", "/dev/zero",
                                  "/dev/full", "/proc/self"])  # fmt: skip
def test_files_that_are_none_are_one_sentence(
    path: str, capsys: pytest.CaptureFixture[str]
) -> None:
    for verb in (["info"], ["info", "--verify"], ["dump", "--stream", "marker"]):
        code, out, err = run(capsys, *verb, path)
        assert (code, out) == (1, "")
        assert err.startswith(f"dsprobe: {path} ")
        assert "a fault in dsprobe" not in err
        assert err.count("\n") == 1


def test_a_disk_that_fails_while_reading(
    files: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """What it gives back is read, the rest is named."""
    with open_file(files / "whole.mcap") as source:
        bad = source._layout.table.row(3)[0]
    real = os.pread

    def pread(fd: int, n: int, offset: int) -> bytes:
        if offset <= bad < offset + n:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return real(fd, n, offset)

    monkeypatch.setattr(os, "pread", pread)
    code, out, err = run(capsys, "dump", files / "whole.mcap", "--stream", "softirq.cpu")
    assert code == 3
    assert 100 < len(out.splitlines()) < 400
    assert "a part of the file cannot be read: Input/output error" in err


def test_a_terminal_gets_no_control_characters(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with Writer(tmp_path / "x.mcap") as writer:
        head(writer, host="evil\x1b[2J\x07")
        writer.append(
            st.META_COVERAGE,
            st.META_COVERAGE.rows(
                t=[T0], probe=["p\x1b"], program=[""], status=[1], reason=["\x9b"]
            ),
        )
    out = run(capsys, "info", tmp_path / "x.mcap")[1]
    assert "evil?[2J?" in out
    assert all(ch.isprintable() or ch == "\n" for ch in out)
