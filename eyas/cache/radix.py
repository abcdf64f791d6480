"""A radix tree over token ids: token sequences and their slots in, the longest known prefix of a new one out.

Integers only; knows no tensors, no requests, and not who owns what is not in it.
"""

from __future__ import annotations

import heapq
import itertools
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from eyas.cache.slots import Slots

Tokens = npt.NDArray[np.int64]

_SPARE_ENTRIES = 64


@dataclass(eq=False)
class Node:
    """A run of tokens behind its parent's, with one slot each. children: by their first token.

    holders: how many hold this node or one below it; what is held is never evicted.
    used: when it was last of use; it may lie in the future, for what is to be kept that long.
    """

    tokens: Tokens
    slots: Slots
    parent: Node | None
    children: dict[int, Node] = field(default_factory=dict)
    holders: int = 0
    used: float = float("-inf")

    def path(self) -> Iterator[Node]:
        """This node and those above it, without the root."""
        node = self
        while node.parent is not None:
            yield node
            node = node.parent

    def path_slots(self) -> Slots:
        """The slots of the whole prefix that ends with this node, in order."""
        runs = [node.slots for node in self.path()]
        return np.concatenate([np.zeros(0, dtype=np.int64), *reversed(runs)])


@dataclass(frozen=True, order=True)
class _Entry:
    """A leaf that might be evicted, unless something has become of it since."""

    used: float
    number: int
    node: Node = field(compare=False)

    @property
    def valid(self) -> bool:
        node = self.node
        return node.parent is not None and not node.children and not node.holders and node.used == self.used


class RadixTree:
    """Prefixes at the granularity of one token. Evicts from the end of the leaf that has been of no use for longest."""

    def __init__(self) -> None:
        self.root = Node(np.zeros(0, dtype=np.int64), np.zeros(0, dtype=np.int64), None)
        self.num_slots = 0
        self.num_evictable = 0
        self._num_nodes = 0
        self._numbers = itertools.count()
        self._entries: list[_Entry] = []

    def match(self, tokens: Tokens) -> Node:
        """The node that ends the longest known prefix of `tokens`; the root if there is none."""
        node, done = self.root, 0
        while done < len(tokens) and (child := node.children.get(int(tokens[done]))) is not None:
            length = _num_equal(child.tokens, tokens[done:])
            done += length
            if length < len(child.tokens):
                return self._split(child, length)
            node = child
        return node

    def insert(self, tokens: Tokens, slots: Slots) -> Node:
        """The node that ends `tokens`, whose slots become the tree's where it did not know the tokens yet."""
        node = self.match(tokens)
        known = sum(len(above.tokens) for above in node.path())
        if known == len(tokens):
            return node
        leaf = Node(tokens[known:].copy(), slots[known:].copy(), node)
        node.children[int(leaf.tokens[0])] = leaf
        self._num_nodes += 1
        self.num_slots += len(leaf.slots)
        self.num_evictable += len(leaf.slots)
        self._offer(leaf)
        return leaf

    def hold(self, node: Node) -> None:
        """Protect a prefix from eviction until it is released."""
        for above in node.path():
            if not above.holders:
                self.num_evictable -= len(above.slots)
            above.holders += 1

    def release(self, node: Node, used: float) -> None:
        """End one hold. used: until when the prefix was, or will be, of use."""
        for above in node.path():
            assert above.holders, "a prefix is released that nobody holds"
            above.holders -= 1
            above.used = max(above.used, used)
            if not above.holders:
                self.num_evictable += len(above.slots)
        self._offer(node)

    def evict(self, count: int) -> Slots:
        """Forget `count` tokens and give their slots back; the caller must have made sure that so many are evictable."""
        assert count <= self.num_evictable, f"{count} slots to be evicted, {self.num_evictable} evictable"
        evicted: list[Slots] = []
        while count > 0:
            leaf = self._stalest()
            kept = max(len(leaf.slots) - count, 0)
            evicted.append(leaf.slots[kept:])
            self._shorten(leaf, kept)
            count -= len(evicted[-1])
        return np.concatenate([np.zeros(0, dtype=np.int64), *evicted])

    def nodes(self) -> Iterator[Node]:
        """Every node but the root."""
        below = list(self.root.children.values())
        while below:
            node = below.pop()
            below += node.children.values()
            yield node

    def check(self, held: Iterable[Node]) -> None:
        """Assert that counts and links are whole, and that exactly the `held` nodes are held, each once per mention."""
        holders = Counter(above for node in held for above in node.path())
        nodes = list(self.nodes())
        for node in nodes:
            assert node.parent is not None
            assert node.parent.children[int(node.tokens[0])] is node, "a node is not where its parent looks for it"
            assert len(node.tokens) == len(node.slots) > 0, "a node has as many tokens as slots"
            assert node.holders == holders[node], f"a node counts {node.holders} holders, {holders[node]} hold it"
        offered = {entry.node for entry in self._entries if entry.valid}
        assert holders.keys() <= set(nodes), "a node is held that has been evicted"
        assert self._num_nodes == len(nodes)
        assert self.num_slots == sum(len(node.slots) for node in nodes)
        assert self.num_evictable == sum(len(node.slots) for node in nodes if not node.holders)
        assert offered == {node for node in nodes if not node.children and not node.holders}, "a leaf cannot be evicted"

    def _split(self, node: Node, length: int) -> Node:
        """Cut a node in two; the upper one, which is new. Whoever holds the lower one holds the upper one too."""
        assert node.parent is not None
        upper = Node(node.tokens[:length], node.slots[:length], node.parent, {}, node.holders, node.used)
        node.parent.children[int(upper.tokens[0])] = upper
        node.tokens, node.slots, node.parent = node.tokens[length:], node.slots[length:], upper
        upper.children[int(node.tokens[0])] = node
        self._num_nodes += 1
        return upper

    def _shorten(self, leaf: Node, kept: int) -> None:
        """Forget the end of an unheld leaf, or all of it."""
        self.num_slots -= len(leaf.slots) - kept
        self.num_evictable -= len(leaf.slots) - kept
        if kept:
            leaf.tokens, leaf.slots = leaf.tokens[:kept].copy(), leaf.slots[:kept].copy()
            self._offer(leaf)
        elif leaf.parent is not None:
            parent, leaf.parent = leaf.parent, None
            del parent.children[int(leaf.tokens[0])]
            self._num_nodes -= 1
            self._offer(parent)

    def _offer(self, node: Node) -> None:
        """Let a node be evicted in its turn, if it is an unheld leaf."""
        entry = _Entry(node.used, next(self._numbers), node)
        if not entry.valid:
            return
        heapq.heappush(self._entries, entry)
        if len(self._entries) > 2 * self._num_nodes + _SPARE_ENTRIES:
            latest = {entry.node: entry for entry in self._entries if entry.valid}
            self._entries = sorted(latest.values())

    def _stalest(self) -> Node:
        while not (entry := heapq.heappop(self._entries)).valid:
            pass
        return entry.node


def _num_equal(left: Tokens, right: Tokens) -> int:
    """Length of the common prefix."""
    length = min(len(left), len(right))
    different = np.flatnonzero(left[:length] != right[:length])
    return int(different[0]) if len(different) else length
