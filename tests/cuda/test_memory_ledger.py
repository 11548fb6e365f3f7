"""Blocks kept outside the kernel: what order their entries can come in."""

from __future__ import annotations

import time
import tracemalloc
from typing import Any

import numpy as np
import pytest

from dsprobe.probes import ledger, vmmledger
from dsprobe.probes.blocktable import BLOCK, BlockTable
from dsprobe.probes.ledger import ADD, DROP, FREE, MAPPED, PHYSICAL, RANGE, REST, UNMAP, Ledger
from dsprobe.probes.sums import Told, summed

SECOND = 10**9


def entry(what: int, t: int, address: int = 0x1000, **more: Any) -> Any:
    return ledger.ENTRIES.rows(entry=what, t=t, address=address, process=1, **more)


def take(books: Ledger, *entries: Any) -> None:
    books.take(np.concatenate(entries))


def freed(books: Ledger) -> tuple[int, int]:
    """Blocks, bytes."""
    _, sums = books.gone()
    return int(sums[:, 0].sum()), int(sums[:, 1].sum())


def unknown(books: Ledger) -> int:
    return int(books.unknown()[1].sum())


def test_a_block_comes_and_goes() -> None:
    books = Ledger()
    take(books, entry(ADD, 10, bytes=100), entry(FREE, 20))
    assert (freed(books), unknown(books), len(books)) == ((1, 100), 0, 0)
    take(books, entry(FREE, 30))
    assert unknown(books) == 1


def test_an_address_that_is_given_again_before_the_free_of_it_is_seen() -> None:
    books = Ledger()
    take(books, entry(ADD, 10, bytes=100), entry(ADD, 30, bytes=7), entry(FREE, 20))
    assert (freed(books), unknown(books), len(books)) == ((1, 100), 0, 1)
    take(books, entry(FREE, 40))
    assert (freed(books), unknown(books), len(books)) == ((2, 107), 0, 0)
    assert books.missed(60 * SECOND) == 0


def test_even_when_that_was_freed_too() -> None:
    books = Ledger()
    take(books, entry(ADD, 10, bytes=100), entry(ADD, 30, bytes=7), entry(FREE, 40),
         entry(FREE, 20))  # fmt: skip
    assert (freed(books), unknown(books), len(books)) == ((2, 107), 0, 0)
    assert books.missed(60 * SECOND) == 0


def test_a_free_that_is_never_seen_is_told_once() -> None:
    books = Ledger()
    take(books, entry(ADD, 10, bytes=100), entry(ADD, 30, bytes=7))
    assert books.missed(SECOND) == 0
    assert books.missed(60 * SECOND) == 1
    assert books.missed(60 * SECOND) == 0


def test_a_handle_that_is_given_again_before_its_release_is_seen() -> None:
    books = Ledger()
    take(
        books,
        entry(ADD, 10, kind=PHYSICAL, bytes=100, handles=1),
        entry(ADD, 30, kind=PHYSICAL, bytes=7, handles=1),
        entry(DROP, 20, kind=PHYSICAL),
    )
    assert (freed(books), unknown(books), len(books)) == ((1, 100), 0, 1)


def test_a_range_takes_the_mappings_in_it_and_what_they_hold() -> None:
    books = Ledger()
    for i in range(3):
        take(
            books,
            entry(ADD, 10, 7 + i, kind=PHYSICAL, bytes=100, maps=1),
            entry(ADD, 11, 0x1000 * i, kind=MAPPED, bytes=0x1000, handle=7 + i),
        )
    take(books, entry(RANGE, 20, 0, kind=MAPPED, bytes=0x2000))
    assert (freed(books), len(books)) == ((4, 200 + 0x2000), 2)
    take(books, entry(UNMAP, 20, 9, kind=PHYSICAL))
    assert (freed(books), len(books)) == ((5, 300 + 0x2000), 1)


def test_what_ended_is_neither_kept_nor_counted_again() -> None:
    books = Ledger()
    take(books, entry(ADD, 10, bytes=100, context=5), entry(ADD, 10, 0x2000, bytes=50, context=6))
    books.forget(set(), {5})
    take(books, entry(ADD, 11, 0x3000, bytes=9, context=5), entry(FREE, 20))
    assert (freed(books), len(books)) == ((0, 0), 1)
    books.forget({1}, set())
    assert len(books) == unknown(books) == 0


def test_sums_by_key() -> None:
    keys, sums = summed(np.array([5, 3, 5], np.uint64), np.array([[1], [2], [2**64 - 1]], "u8"))
    assert (keys.tolist(), sums.tolist()) == ([3, 5], [[2], [0]])
    told = Told(1)
    place, before, t = told.since(keys, 7)
    assert (before.tolist(), t.tolist()) == ([[0], [0]], [7, 7])
    told.tell(place, sums, 8)
    place, before, t = told.since(np.array([3, 4, 5], np.uint64), 9)
    assert (before.ravel().tolist(), t.tolist()) == ([2, 0, 0], [8, 9, 8])
    told.forget(told.keys == 4)
    assert told.keys.tolist() == [3, 5]


class OneByOne:
    """The same books, an entry at a time."""

    def __init__(self) -> None:
        self.live: dict[tuple[int, int], tuple[int, int]] = {}
        self.waiting: list[tuple[tuple[int, int], int]] = []
        self.gone = self.bytes = self.unknown = 0

    def out(self, block: tuple[int, int]) -> None:
        self.gone, self.bytes = self.gone + 1, self.bytes + block[1]

    def take(self, what: int, t: int, key: tuple[int, int], size: int) -> None:
        old = self.live.get(key)
        if what == ADD:
            if old:
                self.out(old)
                self.waiting.append((key, old[0]))
            self.live[key] = t, size
        elif old and old[0] < t:
            self.out(self.live.pop(key))
        else:
            late = [w for w in self.waiting if w[0] == key and w[1] < t]
            if late:
                self.waiting.remove(late[0])
            else:
                self.unknown += 1


def test_many_at_once_are_as_one_by_one() -> None:
    dice = np.random.default_rng(7)
    books, one = Ledger(), OneByOne()
    t = 0
    for _ in range(200):
        n = int(dice.integers(1, 60))
        rows = ledger.ENTRIES.empty(n)
        rows["entry"] = np.where(dice.random(n) < 0.5, ADD, FREE)
        # Calls that took long are seen late: an older time behind a newer one.
        late = (dice.random(n) < 0.2) & (rows["entry"] == FREE)
        rows["t"] = 1000 + t + np.arange(n) * 10 - np.where(late, dice.integers(0, 200, n), 0)
        rows["address"] = dice.integers(1, 9, n)
        rows["process"] = dice.integers(1, 4, n)
        rows["bytes"] = dice.integers(1, 1000, n)
        t += n * 10
        books.take(rows)
        for row in rows:
            key = int(row["process"]), int(row["address"])
            one.take(int(row["entry"]), int(row["t"]), key, int(row["bytes"]))
        assert freed(books) == (one.gone, one.bytes)
        live, done = books.blocks(0, 1 << 30)
        assert done
        held = {(int(b["process"]), int(b["address"])): (int(b["born"]), int(b["bytes"]))
                for b in live}  # fmt: skip
        assert held == one.live
        assert unknown(books) == one.unknown
    assert books.missed(60 * SECOND) == len(one.waiting)


def test_a_table_of_blocks_keeps_each_where_it_is_found() -> None:
    dice = np.random.default_rng(11)
    table, really = BlockTable(500), {}
    for _ in range(300):
        addresses = dice.choice(2000, int(dice.integers(1, 80)), replace=False)
        blocks = np.zeros(len(addresses), BLOCK)
        blocks["address"], blocks["process"] = addresses, 1 + addresses % 3
        blocks["bytes"] = dice.integers(1, 1 << 40, len(addresses))
        place = table.find(blocks)
        here = place > 0
        assert here.tolist() == [int(a) in really for a in addresses]
        found = table.blocks(place[here])
        assert found["bytes"].tolist() == [really[int(a)] for a in addresses[here]]
        if here.any():
            table.remove(place[here])
        for a in addresses[here].tolist():
            del really[a]
        new = blocks[~here]
        room = table.add(new)
        assert room == min(len(new), 500 - len(really))
        really |= dict(
            zip(new["address"][:room].tolist(), new["bytes"][:room].tolist(), strict=True)
        )
        assert len(table) == len(really)


def test_what_finds_no_place_stays_live_and_is_told_apart() -> None:
    books = Ledger(3)
    take(books, *(entry(ADD, 10 + i, 0x1000 * i, bytes=100, context=5 + i % 2) for i in range(8)))
    assert (freed(books), len(books), books.lost) == ((0, 0), 3, 5)
    assert books.placeless() == {1: (5, 500)}
    take(books, entry(FREE, 100, 0x7000))
    assert (freed(books), unknown(books)) == ((0, 0), 1)
    take(books, *(entry(FREE, 100, 0x1000 * i) for i in range(3)), entry(ADD, 200, 0x7000, bytes=7))
    assert (freed(books), len(books)) == ((3, 300), 1)
    books.forget(set(), {5})
    assert books.placeless() == {1: (3, 300)}
    books.forget({1}, set())
    assert (books.placeless(), len(books), books.lost) == ({}, 0, 5)


def test_blocks_of_what_ended_go_bit_by_bit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ledger, "SWEPT", 10)
    books = Ledger()
    take(books, *(entry(ADD, 10, i, bytes=1, context=5 + i % 2) for i in range(100)))
    books.forget(set(), {5})
    books.over(set(), {5})
    assert len(books) > 50
    assert len(books.blocks(0, 1000)[0]) == 50  # none of them is seen any more
    take(books, entry(FREE, 20, 98), entry(ADD, 21, 98, bytes=3, context=6))
    assert (freed(books), unknown(books)) == ((0, 0), 1)
    for _ in range(10):
        books.go_on()
    assert len(books) == 51
    take(books, entry(ADD, 30, 2, bytes=1, context=5))  # a number that is over may come again
    assert len(books) == 52


def test_a_long_range_waits_for_its_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(vmmledger, "AT_ONCE", 0)

    class Kernel:
        asked = 0

        def unmap(
            self, process: int, start: int, end: int, t: int, steps: int
        ) -> tuple[list[vmmledger.Block], int]:
            self.asked += 1
            block = vmmledger.Block(5, 1, 0, 0, MAPPED, 0, 0, 0)
            return [block], min(start + steps, end)

    books = Ledger()
    books.vmm.mappings = kernel = Kernel()
    take(books, entry(ADD, 10, 900, kind=MAPPED, bytes=100))
    take(books, entry(REST, 20, 0, kind=MAPPED, bytes=4 * vmmledger.STEPS))
    for already in range(1, 4):
        assert (kernel.asked, freed(books)[0]) == (already, already + (already > 3))
        books.vmm.go_on()
    assert (kernel.asked, freed(books), len(books)) == (4, (5, 120), 0)
    assert unknown(books) == 0


def test_two_million_blocks_take_little_time_and_memory() -> None:
    """What a fast allocator sends in 50 ms is taken in less, whatever is kept already."""
    books = Ledger()
    n, every = 2_000_000, 40_000
    took = []
    tracemalloc.start()
    try:
        for start in range(0, n, every):
            rows = ledger.ENTRIES.empty(every)
            rows["address"] = 0x7000000000 + 512 * np.arange(start, start + every, dtype=np.uint64)
            rows["t"], rows["bytes"], rows["process"], rows["stack"] = start + 1, 512, 1, 9
            began = time.thread_time()
            books.take(rows)
            took.append(time.thread_time() - began)
        assert tracemalloc.get_traced_memory()[0] < 100 * n
    finally:
        tracemalloc.stop()
    assert len(books) == n
    rows["entry"], rows["t"] = FREE, n
    began = time.thread_time()
    books.take(rows)
    took.append(time.thread_time() - began)
    assert freed(books) == (every, every * 512)
    assert max(took) < 0.3
    assert sorted(took)[len(took) // 2] < 0.05
