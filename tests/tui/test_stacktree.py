"""The tree of stacks: what its nodes add up to, which rows it has, and that nodes keep their
numbers."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as some

from dsprobe.recordings.stacks import Frame, Stacks
from dsprobe.tui.stacktree import Branch, StackTree, branches
from tests.tui.memory import MemorySession


class Held(Stacks):
    """Stacks by number, as frames from the outermost on; frames are single letters."""

    def __init__(self, paths: Sequence[str]) -> None:
        super().__init__(MemorySession())
        self.paths = dict(enumerate(paths, 1))

    def frames(self, id: int) -> tuple[Frame, ...]:
        if id not in self.paths:
            return (Frame(-id, "status", f"stack {id} is not explained in this session"),)
        return tuple(Frame(ord(c), "python", c, "x.py", 1) for c in reversed(self.paths[id]))


stacks = some.lists(
    some.tuples(some.integers(1, 3), some.text("abc", min_size=1, max_size=6),
                some.integers(0, 1000)),
    max_size=20,
)  # fmt: skip


@settings(max_examples=80, deadline=None)
@given(stacks, stacks)
def test_every_node_adds_up_the_stacks_through_it(
    first: list[tuple[int, str, int]], then: list[tuple[int, str, int]]
) -> None:
    """Also of a tree that has grown since it last added up."""
    held = Held([path for _, path, _ in (*first, *then)])
    tree = StackTree(held)
    for base, rows in ((0, first), (len(first), then)):
        leaves = [tree.leaf(p, base + i) for i, (p, _, _) in enumerate(rows, 1)]
        sums = tree.up(leaves, np.array([[n, 1] for _, _, n in rows], float).reshape(-1, 2))
        for process in (1, 2, 3):
            mine = [(path, n) for p, path, n in rows if p == process]
            assert (
                sums[tree.process(process)].tolist() == [sum(n for _, n in mine), len(mine)]
                if (mine)
                else True
            )
            for path, _ in mine:
                for depth in range(1, len(path) + 1):
                    node = tree.process(process)
                    for c in path[:depth]:
                        (node,) = [k for k in tree.children[node] if tree.frame[k].function == c]  # type: ignore[union-attr]
                    through = [n for other, n in mine if other.startswith(path[:depth])]
                    assert sums[node].tolist() == [sum(through), len(through)]


def test_a_stack_that_is_explained_later_moves_and_others_keep_their_numbers() -> None:
    held = Held(["ab"])
    tree = StackTree(held)
    known, unknown = tree.leaf(1, 1), tree.leaf(1, 2)
    assert "stack 2 is not explained" in tree.text(unknown)
    held.paths[2] = "abc"
    assert tree.leaf(1, 2) != unknown
    assert tree.parent[tree.leaf(1, 2)] == known == tree.leaf(1, 1)
    assert [f.function for f in tree.path(tree.leaf(1, 2))] == ["c", "b", "a"]


def shown(paths: Sequence[str], closed: str = "") -> list[str]:
    tree = StackTree(Held(paths))
    roots = [tree.process(1)]
    leaves = [tree.leaf(1, i) for i in range(1, len(paths) + 1)]
    sums = tree.up(leaves, np.ones((len(leaves), 1)))[:, 0]
    ends = np.zeros(len(tree.parent), bool)
    ends[leaves] = True

    def name(branch: Branch) -> str:
        frames = [tree.frame[n] for n in branch.nodes]
        return " " * branch.depth + "".join(f.function if f else "process" for f in frames)

    def is_open(node: int) -> bool:
        frame = tree.frame[node]
        return frame is None or frame.function not in closed

    found = branches(tree, roots, ends, sums > 0, lambda n: (-sums[n],), is_open)
    return [name(b) + {None: "", True: " -", False: " +"}[b.opened] for b in found]


@pytest.mark.parametrize(
    ("paths", "closed", "want"),
    [
        (["abc"], "", ["process -", " abc"]),
        (["abc", "abd"], "", ["process -", " ab -", "  c", "  d"]),
        (["abc", "abd"], "b", ["process -", " ab +"]),
        (["ab", "abc"], "", ["process -", " ab -", "  c"]),
        (["a", "bc", "bd"], "", ["process -", " b -", "  c", "  d", " a"]),
        ([], "", ["process"]),
    ],
)
def test_frames_with_nothing_beside_them_are_one_row(
    paths: list[str], closed: str, want: list[str]
) -> None:
    assert shown(paths, closed) == want


def test_a_very_deep_stack_is_no_danger() -> None:
    assert len(shown(["ab" * 600, "ab" * 600 + "c"])) == 3
