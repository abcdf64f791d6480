"""Free slots, and slots of cached prefixes that sequences may share. Integers only.

Every slot is free, owned by a running sequence, or owned by the prefix cache: a radix tree over token ids for each salt.
"""

from __future__ import annotations

import heapq
import itertools
import math
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from eyas.cache.states import START, StateRows
from eyas.protocol.prefix_hash import BLOCK_TOKENS, BlockHasher

Slots = npt.NDArray[np.int64]
Tokens = npt.NDArray[np.int64]

_SPARE_ENTRIES = 64


class SlotAllocator:
    """Allocator of slots 0 .. num_slots-1, one per token. Last returned is first handed out again.

    num_free: slots without an owner.
    """

    def __init__(self, num_slots: int) -> None:
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

    def check_owners(self, owners: list[Slots]) -> None:
        """Assert that every slot is free, once, or owned, and that `owners` hold every owned slot exactly once."""
        free = self._stack[: self.num_free]
        assert not (np.bincount(free) > 1).any(), "a slot is free twice"
        assert not self._owned[free].any(), "a slot is free and owned"
        assert int(self._owned.sum()) + self.num_free == len(self._owned), "a slot is neither free nor owned"
        held = np.concatenate([np.zeros(0, dtype=np.int64), *owners])
        assert not (np.bincount(held) > 1).any(), "a slot has two owners"
        assert self._owned[held].all(), "a slot is held without being owned"
        assert len(held) == int(self._owned.sum()), "an owned slot has no owner"


@dataclass(eq=False)
class Node:
    """A run of tokens after its parent's, with one slot each.

    Attributes:
        children: by their first token.
        holders: sequences that hold this node or one below it; a held node is never evicted.
        used: time of its last use; a time in the future keeps it longer.
        salt: of a root.
        state: row of the pools of recurrent states with the state behind its tokens; START if it has none.
    """

    tokens: Tokens
    slots: Slots
    parent: Node | None
    children: dict[int, Node] = field(default_factory=dict)
    holders: int = 0
    used: float = float("-inf")
    salt: str = ""
    state: int = START

    @property
    def is_evictable(self) -> bool:
        """Return whether it is a leaf that no sequence holds."""
        return self.parent is not None and not self.children and not self.holders

    def path(self) -> Iterator[Node]:
        """Return this node and the nodes above it, without the root."""
        node = self
        while node.parent is not None:
            yield node
            node = node.parent


@dataclass(frozen=True)
class CachedPrefix:
    """Slots of a held prefix, in order of position. They do not change until it is released.

    Attributes:
        num_known: tokens that are cached, also those behind the last state that a recurrent model can go on from.
    """

    node: Node
    slots: Slots
    num_known: int = 0


# A leaf that may be evicted, unless it has changed since: its last use then, a number that is its own, and the leaf.
_Entry = tuple[float, int, Node]


class PrefixCache:
    """The slots: free, owned by a running sequence, or cached in a radix tree at the granularity of one token.

    Each salt has a tree of its own: a request finds nothing that was stored under another salt.
    Cached prefixes that are not held are evicted at need, from the end of the least recently used leaf of all trees.

    num_available: slots that `take` can give: free ones, and cached ones that are not held. num_cached: slots of all trees.

    Args:
        states: rows for the states of recurrent layers, if the target has some: a node may have one.
    """

    def __init__(self, num_slots: int, states: StateRows | None = None) -> None:
        self._allocator = SlotAllocator(num_slots)
        self.states = states
        self._with_state: dict[Node, bool] = {}  # and whether it is one of a prompt's that others rarely go on from
        self.no_slots: Slots = np.zeros(0, dtype=np.int64)
        self.num_available = num_slots
        self.num_cached = 0
        self._roots: dict[str, Node] = {}  # by salt, the one last stored under at the end; none is empty
        self._num_nodes = 0
        self._numbers = itertools.count()
        self._entries: list[_Entry] = []

    def take(self, count: int) -> Slots:
        """Own `count` slots. The caller must have checked `num_available`."""
        if count > self._allocator.num_free:
            self._evict(count - self._allocator.num_free)
        self.num_available -= count
        return self._allocator.take(count)

    def free(self, slots: Slots) -> None:
        """Return owned slots; their content is lost."""
        self._allocator.free(slots)
        self.num_available += len(slots)

    def find(self, tokens: Tokens, salt: str = "", to_resume: bool = False) -> CachedPrefix:
        """Hold the longest prefix of `tokens` cached under the salt: it is not evicted until it is released.

        to_resume: whether a sequence goes on behind it, which a recurrent model can do where there is a state.
        """
        node = self._roots.get(salt) or Node(self.no_slots, self.no_slots, None, salt=salt)
        done, runs = 0, [self.no_slots]
        while done < len(tokens) and (child := node.children.get(int(tokens[done]))) is not None:
            different = np.flatnonzero(child.tokens[: len(tokens) - done] != tokens[done : done + len(child.tokens)])
            length = int(different[0]) if len(different) else min(len(child.tokens), len(tokens) - done)
            node = child if length == len(child.tokens) else self._split(child, length)
            if not node.holders:
                self.num_available -= length
            node.holders += 1
            runs.append(node.slots)
            done += length
        while to_resume and self.states is not None and node.parent is not None and node.state == START:
            above = node.parent
            self._let_go(node)
            self._offer(node)
            node = above
            runs.pop()
        return CachedPrefix(node, np.concatenate(runs), done)

    def store(self, tokens: Tokens, slots: Slots, prefix: CachedPrefix, salt: str = "") -> CachedPrefix:
        """Give the slots of `tokens`, which begin with `prefix`, to the cache; returns the prefix that covers all of them.

        Slots of tokens that the cache had already are freed: the new prefix has the cache's own in their place.
        salt: the one that `prefix` was found under.
        """
        stored = self.find(tokens, salt)
        known, length = len(stored.slots), len(prefix.slots)
        if known < len(tokens):
            leaf = Node(tokens[known:].copy(), slots[known:].copy(), stored.node, holders=1)
            stored.node.children[int(leaf.tokens[0])] = leaf
            if stored.node.parent is None:
                self._roots[salt] = stored.node
            self._num_nodes += 1
            self.num_cached += len(leaf.slots)
            stored = CachedPrefix(leaf, np.concatenate([stored.slots, leaf.slots]), len(tokens))
        if (root := self._roots.pop(salt, None)) is not None:
            self._roots[salt] = root
        own = slots[length:]
        self.free(own[own != stored.slots[length:]])
        self.release(prefix, prefix.node.used)
        return stored

    def release(self, prefix: CachedPrefix, used: float) -> None:
        """End the hold of a prefix. used: time until which it counts as in use; the smallest is evicted first."""
        for above in prefix.node.path():
            above.used = max(above.used, used)
            self._let_go(above)
        self._offer(prefix.node)

    def take_state(self, is_mark: bool = False) -> int:
        """Return a row for a state, held once. If none is free, a state of the cache is forgotten: one `in_passing` before
        others, the least recently used first.

        is_mark: whether it waits for `keep_state` in a sequence that has its two rows. Then START if there is no room.
        """
        states = self._state_rows
        if is_mark:
            if states.num_marked >= states.most_marked:
                return START
            states.num_marked += 1
        if not states.num_free:
            spare = [node for node in self._with_state if not states.is_shared(node.state)]
            self._forget_state(min(spare, key=lambda node: (node.holders > 0, not self._with_state[node], node.used)))
        return states.take()

    def release_mark(self, row: int) -> None:
        """Give up a row that was taken as a mark."""
        self._state_rows.num_marked -= 1
        self._state_rows.release(row)

    def keep_state(self, prefix: CachedPrefix, position: int, row: int, in_passing: bool = False) -> None:
        """Give one hold of a row, with the state after the first `position` tokens of a held prefix, to the cache.

        in_passing: whether it is only likely that another sequence goes on there.
        """
        node, end = prefix.node, len(prefix.slots)
        while node.parent is not None and end - len(node.slots) >= position:
            end -= len(node.slots)
            node = node.parent
        if node.parent is None or position > end or (position == end and node.state != START):
            self._state_rows.release(row)
            return
        if position < end:
            node = self._split(node, len(node.slots) - (end - position))
        node.state = row
        self._with_state[node] = in_passing

    @property
    def _state_rows(self) -> StateRows:
        assert self.states is not None, "the target has recurrent layers"
        return self.states

    def _forget_state(self, node: Node) -> None:
        if node.state != START:
            self._state_rows.release(node.state)
            node.state = START
            del self._with_state[node]

    def _let_go(self, node: Node) -> None:
        """End one hold of a node."""
        assert node.holders, "a prefix is released that is not held"
        node.holders -= 1
        if not node.holders:
            self.num_available += len(node.slots)

    def cached_blocks(self, limit: int) -> list[int]:
        """Return the hashes of at most `limit` cached blocks: held ones first, then by last use. No block comes without
        those before it.

        Looks at the `limit` salts last stored under, so that work is proportional to `limit`, whatever the trees' sizes.
        See eyas.protocol.prefix_hash.
        """
        found: list[int] = []
        numbers = itertools.count()
        latest = itertools.islice(reversed(self._roots.items()), limit)
        heap = [(-math.inf, next(numbers), root, BlockHasher(salt)) for salt, root in latest]
        # With recurrent layers no sequence goes on after the last state.
        useful = {above for node in self._with_state for above in node.path()}
        while heap and len(found) < limit:
            _, _, node, above = heapq.heappop(heap)
            hasher = above.copy()
            found += hasher.update(node.tokens[: (limit - len(found)) * BLOCK_TOKENS].tolist())
            for child in node.children.values():
                if self.states is not None and child not in useful:
                    continue
                heapq.heappush(heap, (-math.inf if child.holders else -child.used, next(numbers), child, hasher))
        return found

    def check(self, owners: list[Slots], prefixes: Sequence[CachedPrefix], held_states: Sequence[int] = ()) -> None:
        """Assert that every slot is free, cached, or with exactly one of `owners`, and that exactly `prefixes` are held.

        held_states: one for each hold of a row of states by a sequence.
        """
        if self.states is not None:
            self.states.check([*held_states, *(node.state for node in self._with_state)])
        holders = Counter(above for prefix in prefixes for above in prefix.node.path())
        assert all(root.children for root in self._roots.values()), "a salt has an empty tree"
        nodes, below = list[Node](), [*self._roots.values()]
        while below:
            children = below.pop().children.values()
            nodes += children
            below += children
        self._allocator.check_owners(owners + [node.slots for node in nodes])
        for node in nodes:
            assert node.parent is not None
            assert node.parent.children[int(node.tokens[0])] is node, "a node is not where its parent looks for it"
            assert len(node.tokens) == len(node.slots) > 0, "a node has as many tokens as slots"
            assert node.holders == holders[node], f"a node counts {node.holders} holders, {holders[node]} hold it"
        assert holders.keys() <= set(nodes), "a node is held that has been evicted"
        assert self._num_nodes == len(nodes)
        assert {node for node in nodes if node.state != START} == self._with_state.keys(), "a state has no node"
        assert self.num_cached == sum(len(node.slots) for node in nodes)
        num_evictable = sum(len(node.slots) for node in nodes if not node.holders)
        assert self.num_available == self._allocator.num_free + num_evictable
        offered = {node for used, _, node in self._entries if node.used == used and node.is_evictable}
        assert offered == {node for node in nodes if not node.children and not node.holders}, "a leaf cannot be evicted"
        for prefix in prefixes:
            runs = [node.slots for node in prefix.node.path()]
            assert np.array_equal(prefix.slots, np.concatenate([self.no_slots, *reversed(runs)])), (
                "a held prefix has changed"
            )

    def _split(self, node: Node, length: int) -> Node:
        """Cut a node in two and return the upper one, which is new. Holders of the lower one hold the upper one too."""
        assert node.parent is not None
        upper = Node(node.tokens[:length], node.slots[:length], node.parent, {}, node.holders, node.used)
        node.parent.children[int(upper.tokens[0])] = upper
        node.tokens, node.slots, node.parent = node.tokens[length:], node.slots[length:], upper
        upper.children[int(node.tokens[0])] = node
        self._num_nodes += 1
        return upper

    def _evict(self, count: int) -> None:
        """Forget `count` cached tokens and free their slots."""
        num_evictable = self.num_available - self._allocator.num_free
        assert count <= num_evictable, f"{count} slots to be evicted, {num_evictable} evictable"
        while count > 0:
            used, _, leaf = heapq.heappop(self._entries)
            parent = leaf.parent
            if parent is None or leaf.used != used or not leaf.is_evictable:
                continue
            kept = max(len(leaf.slots) - count, 0)
            count -= len(leaf.slots) - kept
            self.num_cached -= len(leaf.slots) - kept
            self._allocator.free(leaf.slots[kept:])
            self._forget_state(leaf)
            if kept:
                leaf.tokens, leaf.slots = leaf.tokens[:kept].copy(), leaf.slots[:kept].copy()
                self._offer(leaf)
            else:
                leaf.parent = None
                del parent.children[int(leaf.tokens[0])]
                self._num_nodes -= 1
                self._offer(parent)
                if parent.parent is None and not parent.children:
                    del self._roots[parent.salt]

    def _offer(self, node: Node) -> None:
        """Make a node a candidate for eviction, if it is an unheld leaf."""
        if not node.is_evictable:
            return
        heapq.heappush(self._entries, (node.used, next(self._numbers), node))
        if len(self._entries) > 2 * self._num_nodes + _SPARE_ENTRIES:
            latest = {entry[2]: entry for entry in self._entries if entry[2].used == entry[0] and entry[2].is_evictable}
            self._entries = sorted(latest.values())
