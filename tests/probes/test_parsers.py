"""Files of /proc as other kernels write them, and as an enemy would."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as some

from dsprobe.probes import sockets
from dsprobe.probes.cpu import Cpu
from dsprobe.probes.netdev import Netdev, devices
from dsprobe.probes.pressure import Pressure
from dsprobe.probes.probe import Unavailable
from dsprobe.recordings.streams import CPU_LOAD, CPU_PRESSURE, CPU_USAGE, NET_SOFTNET, PRESSURE

TICK = 10**9 // os.sysconf("SC_CLK_TCK")

# -- /proc/stat --------------------------------------------------------------------------------

# Linux 2.6.24 had no guest times, 2.6.32 no guest_nice; old ones had no softirq line.
OLD_STAT = """\
cpu  300 0 300 3000 0 0 0 0
cpu0 100 0 100 1000 0 0 0 0
cpu3 200 0 200 2000 0 0 0 0
intr 114 1 0
ctxt 1000
btime 1700000000
processes 50
procs_running 2
procs_blocked 1
"""
NEW_STAT = """\
cpu  350 0 300 3040 6 2 9 1 0 0
cpu0 120 0 100 1010 5 0 4 1 0 0
cpu3 230 0 200 1990 1 2 5 0 0 0
cpu4 9 9 9 9 9 9 9 9 9 9
intr 114 1 0 18446744073709551615
ctxt 1100
btime 1700000000
processes 58
procs_running 7
procs_blocked 0
softirq 5 1 1 1 1 1 0 0 0 0 0
some_new_line with words
"""


def proc(folder: Path, **files: str) -> Path:
    for name, text in files.items():
        path = folder / name.replace("__", "/")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(text.encode(errors="surrogateescape"))
    return folder


def test_cpu_times_and_load(tmp_path: Path) -> None:
    cpu = Cpu(proc(tmp_path, stat=OLD_STAT, loadavg="0.50 0.4 0.3 1/200 999\n"))
    cpu.start()
    proc(tmp_path, stat=NEW_STAT, loadavg="3.25 0.4 0.3 1/200 999\n")
    (usage, rows), (load, whole) = cpu.collect(77)
    assert (usage, load) == (CPU_USAGE, CPU_LOAD)
    # A CPU that has just come online has no interval yet; one whose idle went back had none.
    assert rows["cpu"].tolist() == [0, 3]
    assert (rows["user"] // TICK).tolist() == [20, 30]
    assert (rows["idle"] // TICK).tolist() == [10, 0]
    assert (rows["softirq"] // TICK).tolist() == [4, 5]
    assert (rows["steal"] // TICK).tolist() == [1, 0]
    got = {f: whole[f][0] for f in ("running", "blocked", "switches", "forks", "load1")}
    assert got == {"running": 7, "blocked": 0, "switches": 100, "forks": 8, "load1": 3.25}


def test_cpu_that_goes_offline_and_comes_back(tmp_path: Path) -> None:
    cpu = Cpu(proc(tmp_path, stat=NEW_STAT, loadavg="0 0 0 1/1 1"))
    cpu.start()
    gone = "".join(x for x in NEW_STAT.splitlines(True) if not x.startswith("cpu3"))
    proc(tmp_path, stat=gone)
    assert cpu.collect(1)[0][1]["cpu"].tolist() == [0, 4]
    proc(tmp_path, stat=NEW_STAT)
    assert cpu.collect(2)[0][1]["cpu"].tolist() == [0, 4]
    assert cpu.collect(3)[0][1]["cpu"].tolist() == [0, 3, 4]


def test_steal_of_2_to_the_64(tmp_path: Path) -> None:
    cpu = Cpu(proc(tmp_path, stat=OLD_STAT, loadavg="0 0 0 1/1 1"))
    cpu.start()
    proc(tmp_path, stat=OLD_STAT.replace("1000 0 0 0 0", "1000 0 0 0 18446744073709551615"))
    assert cpu.collect(1)[0][1]["steal"][0] == 2**64 - 1


def test_this_kernel(tmp_path: Path) -> None:
    cpu = Cpu()
    cpu.start()
    (_, rows), (_, whole) = cpu.collect(1)
    assert rows["cpu"].tolist() == sorted(os.sched_getaffinity(0) | set(rows["cpu"].tolist()))
    assert whole["running"][0] >= 1


# -- /proc/net/softnet_stat --------------------------------------------------------------------


def line(*columns: int) -> str:
    return " ".join(f"{c:08x}" for c in columns) + "\n"


def softnet(folder: Path, before: str, after: str) -> dict[int, tuple[int, int, int]]:
    netdev = Netdev(proc(folder, net__softnet_stat=before))
    netdev._read_devices = dict  # type: ignore[method-assign]
    netdev.start()
    proc(folder, net__softnet_stat=after)
    (stream, rows), _ = netdev.collect(1)
    assert stream is NET_SOFTNET
    return {int(r["cpu"]): (r["processed"], r["dropped"], r["squeezed"]) for r in rows}


def test_softnet_of_old_kernels_counts_lines(tmp_path: Path) -> None:
    old = [0] * 8
    before = line(10, 1, 2, *old) + line(20, 0, 0, *old)
    after = line(0x1A, 1, 5, *old) + line(20, 7, 0, *old)
    assert softnet(tmp_path, before, after) == {0: (16, 0, 3), 1: (0, 7, 0)}


def test_softnet_of_new_kernels_names_the_cpu(tmp_path: Path) -> None:
    """Offline CPUs have no line, so the third line may be CPU 5."""
    pad = [0] * 9
    before = line(1, 0, 0, *pad, 0) + line(1, 0, 0, *pad, 5, 0, 0)
    after = line(3, 0, 0, *pad, 0) + line(9, 0, 0, *pad, 5, 0, 0)
    assert softnet(tmp_path, before, after) == {0: (2, 0, 0), 5: (8, 0, 0)}


# -- /proc/net/dev -----------------------------------------------------------------------------

HEAD = "Inter-|   Receive\n face |bytes packets\n"
COUNTERS = " ".join(str(i) for i in range(1, 17))


def test_devices() -> None:
    wide = "  veth0:1 2 3 4 5 6 7 8 9 10 11 12 13 14 15 16\n"  # no space behind the colon
    got = dict(devices(f"{HEAD}    lo: {COUNTERS}\n{wide}"))
    assert got[b"lo"] == got[b"veth0"]
    assert got[b"lo"] == {
        "rx_bytes": 1, "rx_packets": 2, "rx_errors": 3, "rx_dropped": 4,
        "tx_bytes": 9, "tx_packets": 10, "tx_errors": 11, "tx_dropped": 12,
    }  # fmt: skip


NAME_BYTES = sorted(set(range(256)) - set(b"\0/: \t\n\v\f\r\xa0"))


@given(
    some.lists(
        some.binary(min_size=1, max_size=15).filter(
            lambda b: not set(b) & set(b"\0/: \t\n\v\f\r\xa0")
        ),
        unique=True,
    )
)
def test_devices_of_any_name(names: list[bytes]) -> None:
    """An interface may be called anything (dev_valid_name); each is told from the others."""
    dev = HEAD.encode() + b"".join(b"%6s: %s\n" % (n, COUNTERS.encode()) for n in names)
    got = dict(devices(dev.decode(errors="surrogateescape")))
    assert list(got) == names


def test_devices_of_no_kernel() -> None:
    assert dict(devices("")) == {}
    assert dict(devices(HEAD)) == {}
    assert dict(devices(HEAD + "cut sho")) == {}


# -- /proc/net/snmp, netstat, sockstat ---------------------------------------------------------

SNMP = """\
Ip: Forwarding DefaultTTL
Ip: 1 64
Tcp: RtoAlgorithm MaxConn CurrEstab InSegs OutSegs RetransSegs
Tcp: 1 -1 4 100 90 7
"""
NETSTAT = """\
TcpExt: SyncookiesSent ListenDrops TCPTimeouts
TcpExt: 0 3 5
MPTcpExt: MPCapableSYNRX
MPTcpExt: 0
"""


def test_counters_by_name_whatever_their_place() -> None:
    c = sockets.counters(SNMP + NETSTAT)
    assert c["Tcp.RetransSegs"] == 7
    assert c["Tcp.MaxConn"] == -1
    assert c["TcpExt.ListenDrops"] == 3
    assert c["TcpExt.TCPTimeouts"] == 5


@pytest.mark.parametrize("cut", range(0, len(SNMP), 7))
def test_counters_cut_short_are_those_that_are_whole(cut: int) -> None:
    whole = sockets.counters(SNMP)
    got = sockets.counters(SNMP[:cut].rpartition("\n")[0])
    assert got.items() <= whole.items()


def test_usage() -> None:
    text = "sockets: used 29\nTCP: inuse 3 orphan 1 tw 22 alloc 5 mem 2\nTCP6: inuse 2\n"
    u = sockets.usage(text)
    assert (u["TCP.inuse"], u["TCP.tw"], u["TCP6.inuse"], u["sockets.used"]) == (3, 22, 2, 29)
    assert sockets.usage("") == {}


# -- /proc/pressure ----------------------------------------------------------------------------


def psi(some_: int, full: int | None) -> str:
    avg = "avg10=0.00 avg60=0.00 avg300=0.00"
    return f"some {avg} total={some_}\n" + (
        f"full {avg} total={full}\n" if full is not None else ""
    )


def test_pressure_of_kernels_that_keep_more_or_less(tmp_path: Path) -> None:
    # cpu had no "full" line before 5.13; irq came with 6.1 and has no "some".
    full_only = psi(0, 8).splitlines(keepends=True)[1]
    proc(tmp_path, pressure__cpu=psi(10, None), pressure__io=psi(5, 4), pressure__irq=full_only)
    pressure = Pressure(tmp_path)
    pressure.start()
    proc(tmp_path, pressure__cpu=psi(1510, None), pressure__io=psi(5, 6), pressure__irq=full_only)
    ((stream, rows),) = pressure.collect(9)
    assert stream is CPU_PRESSURE
    got = {PRESSURE[r["resource"]]: (int(r["some"]), int(r["full"])) for r in rows}
    assert got == {"cpu": (1_500_000, 0), "io": (0, 2000), "irq": (0, 0)}


def test_kernel_without_pressure_says_how_to_get_it(tmp_path: Path) -> None:
    with pytest.raises(Unavailable, match="psi=1"):
        Pressure(tmp_path).start()
