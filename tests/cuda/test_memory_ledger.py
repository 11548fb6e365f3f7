"""Blocks kept outside the kernel: what order their entries can come in."""

from __future__ import annotations

from typing import Any

import numpy as np

from dsprobe.probes import ledger
from dsprobe.probes.ledger import ADD, DROP, FREE, MAPPED, PHYSICAL, RANGE, UNMAP, Ledger
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
