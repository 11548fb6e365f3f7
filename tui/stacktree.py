"""Stacks of processes as one tree: processes, under them frames from the outermost inwards.

The tree only grows, so that a node keeps its number from one refresh to the next and a refresh adds
up numbers alone: a frame is looked at when its stack is first seen.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

import numpy as np
import numpy.typing as npt

from dsprobe.recordings.stacks import Frame, Stacks

Amounts = npt.NDArray[np.float64]
Numbers = npt.NDArray[np.intp]


@dataclass(frozen=True, eq=False)
class _Level:
    """Nodes of one depth, those of one parent beside each other."""

    nodes: Numbers
    begins: Numbers
    parents: Numbers


class StackTree:
    """``parent``, ``frame`` and ``children`` are by node; a process has no frame and parent -1."""

    def __init__(self, stacks: Stacks) -> None:
        self._stacks = stacks
        self.parent: list[int] = []
        self.frame: list[Frame | None] = []
        self.children: list[list[int]] = []
        self._depth: list[int] = []
        self._root: list[int] = []
        self._times: dict[tuple[int, Hashable], int] = {}  # nodes of a process with that frame
        self._nodes: dict[tuple[int, Hashable], int] = {}
        self._leaves: dict[tuple[int, int], int] = {}
        self._texts: dict[int, str] = {}
        self._levels: list[_Level] = []
        self._levelled = 0

    def process(self, id: int) -> int:
        """The node of a process."""
        return self._node(-1, id, None)

    def leaf(self, process: int, stack: int) -> int:
        """The node in which a stack of a process ends."""
        found = self._leaves.get((process, stack))
        if found is not None:
            return found
        node = self.process(process)
        known = True
        for frame in reversed(self._stacks.frames(stack)):
            known &= frame.kind != "status" or frame.id >= 0
            node = self._node(node, replace(frame, id=0), frame)
        # What nobody has explained yet may be explained later.
        if known:
            self._leaves[process, stack] = node
        return node

    def _node(self, parent: int, key: Hashable, frame: Frame | None) -> int:
        node = self._nodes.get((parent, key))
        if node is None:
            node = self._nodes[parent, key] = len(self.parent)
            self.parent.append(parent)
            self.frame.append(frame)
            self.children.append([])
            self._depth.append(self._depth[parent] + 1 if parent >= 0 else 0)
            self._root.append(self._root[parent] if parent >= 0 else node)
            seen = (self._root[node], key)
            self._times[seen] = self._times.get(seen, 0) + 1
            if parent >= 0:
                self.children[parent].append(node)
        return node

    def alone(self, node: int) -> bool:
        """Whether no other stack of the process goes through its frame by another way."""
        frame = self.frame[node]
        return frame is not None and self._times[self._root[node], replace(frame, id=0)] == 1

    def root(self, node: int) -> int:
        """The process that a node is of."""
        return self._root[node]

    def path(self, node: int) -> list[Frame]:
        """Frames from the innermost to the outermost."""
        frames = []
        while node >= 0:
            frame = self.frame[node]
            if frame is not None:
                frames.append(frame)
            node = self.parent[node]
        return frames

    def text(self, node: int) -> str:
        """All that the frames of a path say, in small letters."""
        if node not in self._texts:
            self._texts[node] = " ".join(f.text for f in self.path(node)).lower()
        return self._texts[node]

    def up(self, leaves: Sequence[int], amounts: Amounts) -> Amounts:
        """(nodes, measures): what ``amounts`` (leaves, measures) add up to in every node."""
        total = np.zeros((len(self.parent), amounts.shape[1]))
        np.add.at(total, np.asarray(leaves, np.intp), amounts)
        for level in reversed(self._by_level()):
            total[level.parents] += np.add.reduceat(total[level.nodes], level.begins, axis=0)
        return total

    def _by_level(self) -> list[_Level]:
        if self.parent and self._levelled != len(self.parent):
            depth, parent = np.array(self._depth), np.array(self.parent)
            order = np.lexsort((parent, depth))
            edges = np.searchsorted(depth[order], np.arange(1, int(depth.max()) + 2))
            self._levels = []
            for first, last in pairwise(edges.tolist()):
                nodes = order[first:last]
                parents, begins = np.unique(parent[nodes], return_index=True)
                self._levels.append(_Level(nodes, begins, parents))
            self._levelled = len(self.parent)
        return self._levels


@dataclass(frozen=True)
class Branch:
    """One row of the tree: a run of nodes with nothing beside them, outermost first.

    ``opened`` is None where there is nothing to open.
    """

    nodes: tuple[int, ...]
    depth: int
    opened: bool | None

    @property
    def node(self) -> int:
        return self.nodes[-1]


def branches(
    tree: StackTree,
    processes: Sequence[int],
    ends: npt.NDArray[np.bool_],
    used: npt.NDArray[np.bool_],
    order: Callable[[int], tuple[float, ...]],
    is_open: Callable[[int], bool],
) -> Iterator[Branch]:
    """Rows from the top down: ``processes`` (nodes) and what is open below them, siblings by
    ``order``.

    ``used`` nodes are in it; a stack ends in those of ``ends``.
    """
    todo = [(node, 0) for node in sorted(processes, key=order)[::-1]]
    while todo:
        node, depth = todo.pop()
        run = [node]
        below = [n for n in tree.children[node] if used[n]]
        while depth and len(below) == 1 and not ends[run[-1]]:
            run.append(below[0])
            below = [n for n in tree.children[below[0]] if used[n]]
        opened = is_open(run[-1]) if below else None
        yield Branch(tuple(run), depth, opened)
        if opened:
            todo += [(n, depth + 1) for n in sorted(below, key=order)[::-1]]
