"""Slots of two kinds of owners: those who are at work, and the prefix cache, which keeps what may be used again.

Integers only; knows no tensors and no requests.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from eyas.cache.announce import cached_blocks
from eyas.cache.radix import Node, RadixTree, Tokens
from eyas.cache.slots import SlotAllocator, Slots


@dataclass(frozen=True)
class Prefix:
    """Slots of the cache that somebody holds, in order of position; they stay as they are until it is released."""

    node: Node
    slots: Slots

    def __len__(self) -> int:
        return len(self.slots)


class PrefixCache:
    """Every slot is free, owned by somebody at work, or cached. Cached prefixes that nobody holds give way at need."""

    def __init__(self, num_slots: int) -> None:
        self._allocator = SlotAllocator(num_slots)
        self._tree = RadixTree()
        self.no_slots: Slots = self._tree.root.slots

    @property
    def num_available(self) -> int:
        """Slots that `take` could give: free ones, and cached ones that nobody holds."""
        return self._allocator.num_free + self._tree.num_evictable

    @property
    def num_cached(self) -> int:
        """Slots of the cache, held or not."""
        return self._tree.num_slots

    def take(self, count: int) -> Slots:
        """Own `count` slots. The caller must have made sure that so many are available."""
        shortage = count - self._allocator.num_free
        if shortage > 0:
            self._allocator.free(self._tree.evict(shortage))
        return self._allocator.take(count)

    def free(self, slots: Slots) -> None:
        """Give owned slots back; what is in them is lost."""
        self._allocator.free(slots)

    def find(self, tokens: Tokens) -> Prefix:
        """Hold the longest cached prefix of `tokens`."""
        node = self._tree.match(tokens)
        self._tree.hold(node)
        return Prefix(node, node.path_slots())

    def store(self, tokens: Tokens, slots: Slots, prefix: Prefix) -> Prefix:
        """Hand over the slots of `tokens`, the first of which are `prefix`; what holds them all instead is given back.

        Slots of tokens that the cache had already are freed: the prefix names the cache's own in their place.
        """
        node = self._tree.insert(tokens, slots)
        self._tree.hold(node)
        stored = Prefix(node, node.path_slots())
        own = slots[len(prefix) :]
        self._allocator.free(own[own != stored.slots[len(prefix) :]])
        self._tree.release(prefix.node, prefix.node.used)
        return stored

    def release(self, prefix: Prefix, used: float) -> None:
        """Hold a prefix no longer. used: until when it was, or will be, of use; the smallest is evicted first."""
        self._tree.release(prefix.node, used)

    def blocks(self, limit: int) -> list[int]:
        """Hashes of at most `limit` cached blocks, the most useful ones; see eyas.prefixes."""
        return cached_blocks(self._tree, limit)

    def check(self, owners: list[Slots], prefixes: Sequence[Prefix]) -> None:
        """Assert that every slot is free, cached, or with exactly one of `owners`, and that only `prefixes` are held."""
        self._allocator.check_owners(owners + [node.slots for node in self._tree.nodes()])
        self._tree.check(prefix.node for prefix in prefixes)
        for prefix in prefixes:
            assert np.array_equal(prefix.slots, prefix.node.path_slots()), "a held prefix has changed"
