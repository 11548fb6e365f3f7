"""The table of driver functions against libraries that export them."""

from __future__ import annotations

import pytest

from dsprobe.probes import functions
from dsprobe.probes.cudamaps import SLOTS
from dsprobe.probes.functions import Class, Flag, Form, of_symbol, services
from tests.simgpu.build import Symbol, symbols

OF_SECTION = {
    "alloc": {Class.ALLOC}, "free": {Class.FREE}, "launch": {Class.LAUNCH},
    "block": {Class.CALL, Class.LAUNCH},
}  # fmt: skip


def test_every_entry_of_the_simulated_driver_that_matters_is_traced() -> None:
    for symbol in symbols():
        found = of_symbol(symbol.name)
        if symbol.section in OF_SECTION:
            assert found, symbol.name
            assert found.cls in OF_SECTION[symbol.section]
            assert found.name == symbol.name


@pytest.mark.parametrize("symbol", [s for s in symbols() if s.section in OF_SECTION])
def test_arguments_are_where_the_signature_has_them(symbol: Symbol) -> None:
    """By their names in the simulated driver's own list."""
    found = of_symbol(symbol.name)
    assert found
    names = ["", *(name for _, name in symbol.arguments)]
    if found.form in (Form.CONFIG, Form.IMPORT):  # the one is a structure, the other passes one
        return
    assert names[found.stream] in ("", "stream"), names
    assert names[found.bytes] in ("", "bytes", "count", "width"), names
    assert names[found.times] in ("", "height"), names
    assert names[found.out] in ("", "out"), names
    assert names[found.address] in ("", "address", "handle"), names
    assert ("stream" in names) == bool(found.stream)


def test_what_a_suffix_says() -> None:
    own = of_symbol("cuMemcpyHtoD_v2_ptds")
    assert own
    assert own.flags == Flag.PER_THREAD
    old, new = of_symbol("cuMemAlloc"), of_symbol("cuMemAlloc_v2")
    assert old
    assert new
    assert (old.flags, new.flags) == (Flag.NARROW, Flag(0))
    assert of_symbol("cuMemAllocManaged")
    assert of_symbol("cuMemAllocManaged").flags == Flag(0)  # type: ignore[union-attr]
    assert of_symbol("cuMemcpyBatchAsync").stream == 9  # type: ignore[union-attr]
    assert of_symbol("cuMemcpyBatchAsync_v2_ptsz").stream == 8  # type: ignore[union-attr]


def test_a_version_of_unknown_layout_is_named_and_not_traced() -> None:
    exports = ["cuMemAlloc_v2", "cuMemAlloc_v3", "cuLaunchKernel_v2_ptsz", "cuStreamQuery_v2"]
    assert of_symbol("cuMemAlloc_v3") is None
    assert functions.unknown(exports) == ["cuLaunchKernel_v2_ptsz", "cuMemAlloc_v3"]


def test_the_launch_of_a_graph_is_a_launch_and_a_call_that_can_block() -> None:
    launch, call = services("cuGraphLaunch_ptsz")
    assert (launch.cls, call.cls, call.kind) == (Class.LAUNCH, Class.CALL, "graph")
    assert launch.stream == call.stream == 2
    assert services("cuStreamQuery") == []


def test_there_are_slots_for_all_names() -> None:
    assert 3 * len(functions._TABLE) < SLOTS
