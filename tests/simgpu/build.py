"""Builds the simulated driver and the C workloads, once for each state of their sources."""

from __future__ import annotations

import hashlib
import os
import re
import shutil
import subprocess
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

HERE = Path(__file__).parent
SOURCES = HERE / "libcuda"
FLAVOURS = ("driver", "frame", "endbr")
"""How entry points begin: as the real driver's (10-byte cmpl, je, jump), with push %rbp, with
endbr64 and then push %rbp."""

_FLAGS = ("-std=gnu11", "-O2", "-Wall", "-Wextra", "-Werror")
_WORDS = {"frame": ("-fcf-protection=none",), "endbr": ("-fcf-protection=branch",)}


@dataclass(frozen=True)
class Symbol:
    """One line of symbols.txt says ``function(parameters) = name@since ...``."""

    name: str
    function: str
    parameters: str
    section: str
    since: int

    @property
    def arguments(self) -> list[tuple[str, str]]:
        """(type, name) of each parameter."""
        if self.parameters == "void":
            return []
        split = [re.fullmatch(r"(.*?)(\w+)", p.strip()) for p in self.parameters.split(",")]
        return [(m[1].strip(), m[2]) for m in split if m]


def symbols() -> list[Symbol]:
    """All entry points, in the order of symbols.txt, which numbers them."""
    found, section = [], ""
    for line in (SOURCES / "symbols.txt").read_text().splitlines():
        if line.startswith("["):
            section = line.strip("[]")
        elif match := re.fullmatch(r"(\w+)\((.*)\) = (.+)", line):
            for name, _, since in (n.partition("@") for n in match[3].split()):
                found.append(Symbol(name, match[1], match[2], section, int(since or 0)))
        elif line and not line.startswith("#"):
            raise ValueError(f"symbols.txt: {line}")
    return found


def _word(kind: str, name: str) -> str:
    """An argument as the log keeps it."""
    if kind.startswith("struct"):
        return "0"
    return f"(u64)(uintptr_t){name}" if "*" in kind else f"(u64){name}"


def _wrapper(number: int, s: Symbol, flavour: str) -> str:
    names = [name for _, name in s.arguments]
    words = ", ".join(_word(*a) for a in s.arguments) or "0"
    start = "HIDDEN int w_" if flavour == "driver" else "EXPORT int "
    threads = "true" if s.name.endswith(("_ptsz", "_ptds")) else "false"
    return (
        f"{start}{s.name}({s.parameters}) {{\n"
        f"    struct call c;\n    const u64 args[] = {{{words}}};\n"
        f"    int r = call_begin(&c, {number}, {threads}, {len(names)}, args);\n"
        + ("    if (!r && !out) r = INVALID_VALUE;\n" if "out" in names else "")
        + f"    if (!r) r = {s.function}({', '.join(['&c', *names])});\n"
        f"    return call_end(&c, r);\n}}\n"
    )


# The real driver's entry points (535, x86-64): compare a word with a value that says the driver has
# been shut down, return CUDA_ERROR_DEINITIALIZED if so, else jump through a table.
_STUB = """__asm__(
    ".text\\n.p2align 4\\n.globl {0}\\n.type {0}, @function\\n{0}:\\n.cfi_startproc\\n"
    "cmpl $0x321cba00, simgpu_state(%rip)\\n" "je 1f\\n" "jmp *slot_{0}(%rip)\\n"
    ".p2align 3\\n1: movl $4, %eax\\nret\\n.cfi_endproc\\n.size {0}, .-{0}\\n"
    ".data\\n.p2align 3\\nslot_{0}: .quad w_{0}\\n.text\\n");
"""


def generate(folder: Path, flavour: str) -> None:
    """Write api.h and entries.c."""
    every = symbols()
    functions = {s.function: s.parameters for s in every}
    api = ["/* Generated from symbols.txt. */", "#pragma once", '#include "sim.h"']
    api += [
        f"int {f}(struct call *c{'' if p == 'void' else ', ' + p});" for f, p in functions.items()
    ]
    api += [f"int {s.name}({s.parameters});" for s in every]
    (folder / "api.h").write_text("\n".join(api) + "\n")
    entries = ['#include "api.h"', '#define EXPORT __attribute__((visibility("default")))',
               '#define HIDDEN __attribute__((visibility("hidden"), used))']  # fmt: skip
    if flavour == "driver":
        entries.append("HIDDEN _Atomic u32 simgpu_state;")
        entries += [f"HIDDEN int w_{s.name}({s.parameters});" for s in every]
        entries += [_STUB.format(s.name) for s in every]
    entries += [_wrapper(i, s, flavour) for i, s in enumerate(every)]
    entries.append("const struct symbol symbols[] = {")
    for s in every:
        flags = (s.section == "any-time", s.section in ("alloc", "free", "block"),
                 s.section == "launch")  # fmt: skip
        words = ", ".join(str(f).lower() for f in flags)
        entries.append(f'    {{"{s.name}", {s.name}, {s.since}, {words}}},')
    entries.append("};")
    entries.append(f"const u32 symbol_count = {len(every)};")
    entries.append('_Static_assert(sizeof symbols / sizeof *symbols <= MAX_SYMBOLS, "");')
    (folder / "entries.c").write_text("\n".join(entries) + "\n")


def libcuda(flavour: str = "driver") -> Path:
    """Folder that holds ``libcuda.so.1`` with entry points of ``flavour``."""
    if flavour not in FLAVOURS:
        raise ValueError(f"no such flavour: {flavour}; there are {', '.join(FLAVOURS)}")

    def make(work: Path) -> None:
        generate(work, flavour)
        gcc(
            "-shared", "-fPIC", "-fvisibility=hidden", "-fno-omit-frame-pointer",
            *_WORDS.get(flavour, ()), "-Wl,-soname,libcuda.so.1", f"-I{work}", f"-I{SOURCES}",
            "-o", str(work / "libcuda.so.1"), str(work / "entries.c"),
            *map(str, sorted(SOURCES.glob("*.c"))), "-ldl", "-lpthread",
        )  # fmt: skip
        (work / "libcuda.so").symlink_to("libcuda.so.1")

    return cached(flavour, make, *sorted(SOURCES.iterdir()))


def program(name: str) -> Path:
    """The workload built from ``workloads/<name>.c``; it finds the driver by LD_LIBRARY_PATH."""
    folder = HERE / "workloads"
    source, common = folder / f"{name}.c", folder / "common.h"

    def make(work: Path) -> None:
        gcc("-o", str(work / name), str(source), "-ldl", "-lpthread")

    return cached(name, make, source, common) / name


def gcc(*words: str) -> None:
    """Run gcc with every warning an error; RuntimeError with what it said."""
    done = subprocess.run(["gcc", *_FLAGS, *words], capture_output=True, text=True, timeout=120)
    if done.returncode:
        raise RuntimeError(f"gcc: {done.stderr.strip()}")


def cached(label: str, make: Callable[[Path], None], *sources: Path) -> Path:
    digest = hashlib.sha256(Path(__file__).read_bytes())
    for source in sources:
        digest.update(source.name.encode() + b"\0" + source.read_bytes())
    place = _folder() / f"{label}-{digest.hexdigest()[:16]}"
    if not place.exists():
        work = Path(tempfile.mkdtemp(prefix=f"{label}-", dir=place.parent))
        try:
            make(work)
            work.chmod(0o755)
            work.rename(place)
        except OSError:  # another process was first
            if not place.exists():
                raise
        finally:
            shutil.rmtree(work, ignore_errors=True)
    return place


def _folder() -> Path:
    """Ours alone to write, so that what is loaded from it is what was built."""
    folder = Path(tempfile.gettempdir(), f"dsprobe-simgpu-{os.geteuid()}")
    folder.mkdir(mode=0o755, exist_ok=True)
    found = folder.lstat()
    if found.st_uid != os.geteuid() or found.st_mode & 0o022 or folder.is_symlink():
        raise RuntimeError(f"{folder} is not ours alone; remove it")
    return folder
