"""Which slots are free, and which hold a cached prefix that sequences may share. Integers only.

Every slot is free, owned by a running sequence, or owned by the prefix cache: a radix tree over token ids.
"""

from __future__ import annotations

import heapq
import itertools
import math
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from eyas.block_hash import BLOCK_TOKENS, BlockHasher

Slots = npt.NDArray[np.int64]
Tokens = npt.NDArray[np.int64]

_SPARE_ENTRIES = 64


class SlotAllocator:
    """Hands out slots 0 .. num_slots-1, one per token. Last returned is first handed out again.

    num_free: slots without an owner.
    """

    def __init__(self, num_slots: int) -> None:
        self.num_slots = num_slots
        self._stack: Slots = np.arange(num_slots, dtype=np.int64)[::-1].copy()
        self.num_free = num_slots
        self._owned = np.zeros(num_slots, dtype=np.bool_)

    def take(self, count: int) -> Slots:
        """Own `count` slots. The caller must have checked that they are free."""
        assert count <= self.num_free, f"{count} slots asked for, {self.num_free} free"
        start = self.num_free - count
        taken = self._stack[start : self.num_free][::-1].copy()
        self.num_free = start
        self._owned[taken] = True
        return taken

    def free(self, slots: Slots) -> None:
        """Return slots; each must be owned."""
        assert self._owned[slots].all(), f"slots {slots[~self._owned[slots]]} are freed without being owned"
        self._owned[slots] = False
        self._stack[self.num_free : self.num_free + len(slots)] = slots[::-1]
        self.num_free += len(slots)

    def check(self) -> None:
        """Assert that every slot is either free, once, or owned."""
        free = self._stack[: self.num_free]
        assert len(np.unique(free)) == len(free), "a slot is free twice"
        assert not self._owned[free].any(), "a slot is free and owned"
        assert int(self._owned.sum()) + self.num_free == self.num_slots, "a slot is neither free nor owned"

    def check_owners(self, owners: list[Slots]) -> None:
        """Assert integrity, and that `owners` hold every owned slot exactly once."""
        self.check()
        held = np.concatenate([np.zeros(0, dtype=np.int64), *owners])
        assert len(np.unique(held)) == len(held), "a slot has two owners"
        assert self._owned[held].all(), "a slot is held without being owned"
        assert len(held) == int(self._owned.sum()), "an owned slot has no owner"


@dataclass(eq=False)
class Node:
    """A run of tokens after its parent's, with one slot each.

    children: by their first token. holders: sequences that hold this node or one below it; a held node is never evicted.
    used: time of its last use; a time in the future keeps it longer.
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


@dataclass(frozen=True)
class CachedPrefix:
    """Slots of a held prefix, in order of position. They do not change until it is released."""

    node: Node
    slots: Slots

    def __len__(self) -> int:
        return len(self.slots)


@dataclass(frozen=True, order=True)
class _Entry:
    """A leaf that may be evicted, unless it has changed since."""

    used: float
    number: int
    node: Node = field(compare=False)

    @property
    def valid(self) -> bool:
        node = self.node
        return node.parent is not None and not node.children and not node.holders and node.used == self.used


class RadixTree:
    """Prefixes at the granularity of one token. Evicts from the end of the least recently used leaf."""

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
        """The node that ends `tokens`. The tree takes over the slots of those that it did not have yet."""
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

    def hold(self, node: Node) -> CachedPrefix:
        """Protect the prefix that ends with `node` from eviction until it is released."""
        runs: list[Slots] = []
        for above in node.path():
            if not above.holders:
                self.num_evictable -= len(above.slots)
            above.holders += 1
            runs.append(above.slots)
        return CachedPrefix(node, np.concatenate([self.root.slots, *reversed(runs)]))

    def release(self, node: Node, used: float) -> None:
        """End one hold. used: time until which the prefix counts as in use."""
        for above in node.path():
            assert above.holders, "a prefix is released that is not held"
            above.holders -= 1
            above.used = max(above.used, used)
            if not above.holders:
                self.num_evictable += len(above.slots)
        self._offer(node)

    def evict(self, count: int) -> Slots:
        """Forget `count` tokens and return their slots. The caller must have checked `num_evictable`."""
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
        """Assert that counts and links are consistent, and that exactly the `held` nodes are held, each as often as it is
        given.
        """
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
        """Cut a node in two and return the upper one, which is new. Holders of the lower one hold the upper one too."""
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
        """Make a node a candidate for eviction, if it is an unheld leaf."""
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


class PrefixCache:
    """The slots: free, owned by a running sequence, or cached. Cached prefixes that are not held are evicted at need."""

    def __init__(self, num_slots: int) -> None:
        self._allocator = SlotAllocator(num_slots)
        self.tree = RadixTree()
        self.no_slots: Slots = self.tree.root.slots

    @property
    def num_available(self) -> int:
        """Slots that `take` can give: free ones, and cached ones that are not held."""
        return self._allocator.num_free + self.tree.num_evictable

    @property
    def num_cached(self) -> int:
        """Slots of the cache, held or not."""
        return self.tree.num_slots

    def take(self, count: int) -> Slots:
        """Own `count` slots. The caller must have checked `num_available`."""
        shortage = count - self._allocator.num_free
        if shortage > 0:
            self._allocator.free(self.tree.evict(shortage))
        return self._allocator.take(count)

    def free(self, slots: Slots) -> None:
        """Return owned slots; their content is lost."""
        self._allocator.free(slots)

    def find(self, tokens: Tokens) -> CachedPrefix:
        """Hold the longest cached prefix of `tokens`."""
        return self.tree.hold(self.tree.match(tokens))

    def store(self, tokens: Tokens, slots: Slots, prefix: CachedPrefix) -> CachedPrefix:
        """Give the slots of `tokens`, which begin with `prefix`, to the cache; returns the prefix that covers all of them.

        Slots of tokens that the cache had already are freed: the new prefix has the cache's own in their place.
        """
        stored = self.tree.hold(self.tree.insert(tokens, slots))
        own = slots[len(prefix) :]
        self._allocator.free(own[own != stored.slots[len(prefix) :]])
        self.tree.release(prefix.node, prefix.node.used)
        return stored

    def release(self, prefix: CachedPrefix, used: float) -> None:
        """End the hold of a prefix. used: time until which it counts as in use; the smallest is evicted first."""
        self.tree.release(prefix.node, used)

    def check(self, owners: list[Slots], prefixes: Sequence[CachedPrefix]) -> None:
        """Assert that every slot is free, cached, or with exactly one of `owners`, and that only `prefixes` are held."""
        self._allocator.check_owners(owners + [node.slots for node in self.tree.nodes()])
        self.tree.check(prefix.node for prefix in prefixes)
        for prefix in prefixes:
            runs = [node.slots for node in prefix.node.path()]
            assert np.array_equal(prefix.slots, np.concatenate([self.no_slots, *reversed(runs)])), (
                "a held prefix has changed"
            )


def cached_blocks(tree: RadixTree, limit: int) -> list[int]:
    """Hashes of at most `limit` blocks of the tree: held ones first, then by last use. No block comes without those before
    it.

    Work is proportional to `limit`, whatever the tree's size. See eyas.block_hash.
    """
    found: list[int] = []
    numbers = itertools.count()
    heap: list[tuple[float, int, Node, BlockHasher]] = []

    def offer(node: Node, hasher: BlockHasher) -> None:
        for child in node.children.values():
            heapq.heappush(heap, (-math.inf if child.holders else -child.used, next(numbers), child, hasher))

    offer(tree.root, BlockHasher())
    while heap and len(found) < limit:
        _, _, node, above = heapq.heappop(heap)
        hasher = above.copy()
        found += hasher.update(node.tokens[: (limit - len(found)) * BLOCK_TOKENS].tolist())
        offer(node, hasher)
    return found
