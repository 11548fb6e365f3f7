"""What a test needs of the machine: CI fails without it, elsewhere a skip says what."""

from __future__ import annotations

import ctypes
import functools
import os
import platform
import shutil
import subprocess

import pytest

_BPF_CALL = {"x86_64": 321, "aarch64": 280}
"""Number of bpf(2) (arch/x86/entry/syscalls/syscall_64.tbl; include/uapi/asm-generic/unistd.h)."""


@functools.cache
def no_bpf() -> str:
    """Why BPF programs cannot be loaded here; empty where they can."""
    if os.geteuid() != 0:
        return "needs root to load BPF programs"
    try:
        import bcc  # noqa: F401
    except ImportError as e:
        return f"needs python3-bpfcc: {e}"
    libc = ctypes.CDLL(None, use_errno=True)
    # BPF_MAP_CREATE of an array of one 4-byte value (bpf(2)): type, key, value, entries.
    attr = (ctypes.c_uint32 * 32)(2, 4, 4, 1)
    call = _BPF_CALL.get(platform.machine(), -1)
    fd = libc.syscall(call, 0, ctypes.byref(attr), ctypes.sizeof(attr))
    if fd < 0:
        return f"bpf(2) is refused here: {os.strerror(ctypes.get_errno())}"
    os.close(fd)
    return ""


def no_root() -> str:
    """Why this cannot be tried here; empty where we are root."""
    return "" if os.geteuid() == 0 else "needs root"


@functools.cache
def no_netns() -> str:
    """Why network namespaces cannot be made here; empty where they can."""
    if os.geteuid() != 0:
        return "needs root to make network namespaces"
    missing = no_tools("ip", "unshare")
    if missing:
        return missing
    made = subprocess.run(["unshare", "-n", "true"], capture_output=True, text=True)
    return f"network namespaces are refused here: {made.stderr.strip()}" if made.returncode else ""


def no_tools(*names: str) -> str:
    """Which of the commands are missing, as a reason; empty where none is."""
    missing = [n for n in names if not shutil.which(n)]
    return f"needs {', '.join(missing)}" if missing else ""


def no_setup() -> str:
    """Why set-up cannot be tried here; empty where it can."""
    return no_tools("debootstrap", "git", "tmux", "unshare") if os.geteuid() == 0 else "needs root"


@pytest.fixture(scope="session", autouse=True)
def _own_cache(tmp_path_factory: pytest.TempPathFactory) -> None:
    """Compiled modules are kept for one run of the tests, apart from those of this machine."""
    os.environ["DSPROBE_CACHE"] = str(tmp_path_factory.mktemp("cache"))


def pytest_runtest_setup(item: pytest.Item) -> None:
    tools = [name for mark in item.iter_markers("tools") for name in mark.args]
    reasons = [
        no_root() if item.get_closest_marker("root") else "",
        no_bpf() if item.get_closest_marker("bpf") else "",
        no_netns() if item.get_closest_marker("netns") else "",
        no_setup() if item.get_closest_marker("setup") else "",
        no_tools(*tools),
    ]
    reason = "; ".join(r for r in reasons if r)
    if reason and os.environ.get("CI") == "true":
        pytest.fail(f"{reason} (CI=true)", pytrace=False)
    if reason:
        pytest.skip(reason)
