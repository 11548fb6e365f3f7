"""C++ names as their source has them.

By __cxa_demangle of the C++ runtime, which is the compiler's own demangler and is on every machine
that runs bcc (libbcc is C++).  It is native code on hostile names: it runs in the child, which has
no privileges, little memory and a watchdog.  What PyPI has is that same call (cxxfilt) or knows a
part of the grammar (itanium_demangler).

Rust's older mangling is valid C++ with a hash at its end and escapes inside; both are undone here.
Sources: Itanium C++ ABI, 5.1; rustc-demangle, "legacy".
"""

from __future__ import annotations

import ctypes
import re
from collections.abc import Callable

MAX_NAME = 512
"""Characters of a demangled name that are kept."""

_RUNTIMES = ("libstdc++.so.6", "libc++abi.so.1")
_RUST_HASH = re.compile(r"::h[0-9a-f]{16}$")
_RUST_ESCAPE = re.compile(r"\$([A-Z]{1,2}|u[0-9a-f]{1,6})\$|\.\.")
_RUST_WORDS = {"SP": "@", "BP": "*", "RF": "&", "LT": "<", "GT": ">", "LP": "(", "RP": ")",
               "C": ","}  # fmt: skip


def shorten(name: str) -> str:
    return name if len(name) <= MAX_NAME else name[: MAX_NAME - 1] + "…"


def _rust(match: re.Match[str]) -> str:
    code = match[1]
    if code is None:
        return "::"
    if code in _RUST_WORDS:
        return _RUST_WORDS[code]
    number = int(code[1:], 16) if code[0] == "u" else 0
    return chr(number) if 32 <= number < 0xD800 else match[0]


def readable(name: str) -> str:
    """A demangled C++ name, or a Rust name without hash and escapes."""
    plain = _RUST_HASH.sub("", name)
    if plain != name:
        plain = re.sub(r"(^|::)_\$", r"\1$", plain)
        plain = _RUST_ESCAPE.sub(_rust, plain)
    return shorten(plain)


def load() -> Callable[[str], str]:
    """A function that demangles what is mangled and shortens everything.

    Loads the C++ runtime now: later the child may open no file.
    """
    runtime = None
    for soname in _RUNTIMES:
        try:
            runtime = ctypes.CDLL(soname)
            break
        except OSError:
            continue
    if runtime is None:
        return shorten
    call = runtime.__cxa_demangle
    call.restype = ctypes.c_void_p
    call.argtypes = [ctypes.c_char_p, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_void_p]
    libc = ctypes.CDLL(None)
    free, strnlen = libc.free, libc.strnlen
    free.argtypes = [ctypes.c_void_p]
    strnlen.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
    strnlen.restype = ctypes.c_size_t

    def demangle(name: str) -> str:
        if not name.startswith("_Z"):
            return shorten(name)
        text = call(name.encode("ascii", "replace"), None, None, None)
        if not text:
            return shorten(name)
        raw = ctypes.string_at(text, strnlen(text, 4 * MAX_NAME))  # a huge name costs no copy
        free(text)
        return readable(raw.decode("utf-8", "replace"))

    return demangle
