"""Draft trees: flat arrays of their nodes from the drafter to the commit, and a view of each single tree.

Node 0 is the root: the last committed token. Every other node is a guess for the token after its parent. A tree of one node
is ordinary decoding. Two trees as arrays, with the tokens of the roots first:

    the (0) -- cat (1) -- sat (3)      a (0) -- dog (1)          counts   4, 2
           `-- dog (2)                                           tokens   the cat dog sat, a dog
                                                                 parents  0   0   0   1,   0 0
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import groupby
from operator import attrgetter, lt
from typing import ClassVar, overload

import numpy as np
import numpy.typing as npt

from eyas.arrays import Bools, Ints, Reals
from eyas.errors import InvalidTree

Cells = npt.NDArray[np.generic]

MASS_TOLERANCE = 1e-4
WORD = (1 << 64) - 1
ARRAYS: Callable[[DraftTree], DraftTrees] = attrgetter("trees")
NUMBER: Callable[[DraftTree], int] = attrgetter("number")


@dataclass(frozen=True)
class DraftProbs:
    """The distribution that a node's children were sampled from: token ids and their probabilities, 0 for all other tokens.

    Probabilities need not sum to 1 if only the likeliest tokens were kept: the draw was proportional to them. They travel as
    float32, so that a drafter must sample from float32 ones.
    """

    ids: tuple[int, ...]
    probs: tuple[float, ...]

    def validate(self, vocab_size: int) -> None:
        """Raises InvalidTree unless ids are distinct and in the vocabulary, probabilities in (0, 1], their sum up to 1."""
        if not self.ids or len(self.ids) != len(self.probs) or len(set(self.ids)) < len(self.ids):
            raise InvalidTree(
                f"{len(self.probs)} draft probabilities for {len(self.ids)} ids, {len(set(self.ids))} of them distinct"
            )
        if not 0 <= min(self.ids) <= max(self.ids) < vocab_size:
            raise InvalidTree(f"draft probabilities for ids {min(self.ids)} to {max(self.ids)}, outside [0, {vocab_size})")
        if not all(0 < prob <= 1 for prob in self.probs) or math.fsum(self.probs) > 1 + MASS_TOLERANCE:
            raise InvalidTree(f"draft probabilities from {min(self.probs)} to {max(self.probs)} with sum {sum(self.probs)}")


@dataclass(frozen=True)
class SampledProposal:
    """Proposal from which the nodes of a sampled tree were drawn.

    Siblings are in the order in which they were drawn, and no node was added, left out or moved because of its token.

    draft_probs: by node, for exactly the nodes that have children.
    replacement: whether each sibling was drawn from the whole distribution, so that tokens may repeat; else each from what
        the siblings before it left.
    """

    draft_probs: Mapping[int, DraftProbs]
    replacement: bool = False


@dataclass(frozen=True, eq=False)
class DraftTrees(Sequence["DraftTree"]):
    """Draft trees as flat arrays, one tree after the other: B trees with R nodes in all. An item is a view of one tree.

    Attributes:
        counts: nodes of each tree, the root included, int64 [B].
        tokens: token of each node, int64 [R]; the first one of a tree is its root.
        parents: number of each node's parent in its own tree, smaller than the node's own, int64 [R]; 0 for roots.
        log_probs: cumulative score of each node under the drafter, 0 at roots, float64 [R]. Used only to rank nodes.
        grown_ahead: whether each tree was grown before its root was known, bool [B].
        sampled: how the nodes of each tree were drawn, None for a deterministic proposal; empty if none was drawn.
        sources: of combined drafters, which of the parts proposed each node: 1 for the first, 2 for the second, 3 for both,
            0 for roots, int64 [R]. None for other drafters, and unless the commit wants them.
    """

    counts: Ints
    tokens: Ints
    parents: Ints
    log_probs: Reals
    grown_ahead: Bools
    sampled: tuple[SampledProposal | None, ...] = ()
    sources: Ints | None = None

    @classmethod
    def of(cls, trees: Sequence[DraftTree]) -> DraftTrees:
        """Return the arrays of at least one tree; without a copy if they are all trees of the same arrays, in order."""
        runs = [(arrays, list(map(NUMBER, run))) for arrays, run in groupby(trees, ARRAYS)]
        parts = [arrays if numbers == list(range(len(arrays.counts))) else arrays.taken(numbers) for arrays, numbers in runs]
        if len(parts) == 1:
            return parts[0]
        counts, tokens, parents, log_probs, grown_ahead = (
            np.concatenate([getattr(part, name) for part in parts])
            for name in ("counts", "tokens", "parents", "log_probs", "grown_ahead")
        )
        sampled = tuple([tree.sampled for tree in trees]) if [part for part in parts if part.sampled] else ()
        sources = None
        if [part for part in parts if part.sources is not None]:
            whole = [np.zeros_like(part.tokens) if part.sources is None else part.sources for part in parts]
            sources = np.concatenate(whole)
        return cls(counts, tokens, parents, log_probs, grown_ahead, sampled, sources)

    @classmethod
    def below(
        cls,
        roots: Sequence[int],
        tokens: Cells,
        parents: Cells,
        log_probs: Cells,
        counts: Ints,
        grown_ahead: Bools | None = None,
    ) -> DraftTrees:
        """Return trees of drafted nodes below roots.

        Args:
            roots: token of each root, B of them.
            tokens: of the drafted nodes of each tree, [B, N]; only the first `counts` of a row count.
            parents: of the same nodes; 0 is the root [B, N].
            log_probs: of the same nodes [B, N].
            counts: drafted nodes of each tree [B].
            grown_ahead: of each tree [B]; none was by default.
        """
        is_filled, firsts = np.arange(tokens.shape[1]) < counts[:, None], counts.cumsum() - counts + np.arange(len(counts))
        num_nodes = int(counts.sum()) + len(counts)
        is_drafted = np.ones(num_nodes, np.bool_)
        is_drafted[firsts] = False
        ahead = np.zeros(len(counts), np.bool_) if grown_ahead is None else grown_ahead
        zeros = np.zeros(num_nodes, np.int64), np.zeros(num_nodes, np.int64), np.zeros(num_nodes)
        trees = cls(counts + 1, *zeros, ahead)
        trees.tokens[firsts] = roots
        trees.tokens[is_drafted], trees.parents[is_drafted] = tokens[is_filled], parents[is_filled]
        trees.log_probs[is_drafted] = log_probs[is_filled]
        return trees

    @classmethod
    def root_only(cls, roots: Sequence[int]) -> DraftTrees:
        """Return trees of plain decoding."""
        size = len(roots)
        zeros = np.zeros(size, np.int64), np.zeros(size), np.zeros(size, np.bool_)
        return cls(np.ones(size, np.int64), np.array(roots, np.int64), *zeros)

    def __len__(self) -> int:
        return len(self.counts)

    @overload
    def __getitem__(self, number: int) -> DraftTree: ...

    @overload
    def __getitem__(self, number: slice) -> list[DraftTree]: ...

    def __getitem__(self, number: int | slice) -> DraftTree | list[DraftTree]:
        return list(self)[number]

    def __iter__(self) -> Iterator[DraftTree]:
        rows = zip(self.firsts.tolist(), self.counts.tolist(), strict=True)
        return iter([DraftTree(self, number, first, count) for number, (first, count) in enumerate(rows)])

    @cached_property
    def firsts(self) -> Ints:
        """The row of each root [B]."""
        firsts: Ints = self.counts.cumsum() - self.counts
        return firsts

    def cut(self, is_kept: Bools) -> DraftTrees:
        """Return the trees with some of their nodes only: all roots, and no node without its parent.

        A tree that was sampled must stay whole. is_kept: [R].
        """
        numbers, firsts = is_kept.cumsum() - 1, np.repeat(self.firsts, self.counts)
        parents = (numbers[self.parents + firsts] - numbers[firsts])[is_kept]
        counts = np.add.reduceat(is_kept, self.firsts, dtype=np.int64)
        sources = None if self.sources is None else self.sources[is_kept]
        columns = counts, self.tokens[is_kept], parents, self.log_probs[is_kept]
        return DraftTrees(*columns, self.grown_ahead, self.sampled, sources)

    def taken(self, numbers: list[int]) -> DraftTrees:
        """Return some trees, in this order."""
        counts, firsts = self.counts[numbers], self.firsts[numbers]
        rows = np.repeat(firsts - counts.cumsum() + counts, counts) + np.arange(int(counts.sum()))
        sampled = tuple([self.sampled[number] for number in numbers]) if self.sampled else ()
        sources = None if self.sources is None else self.sources[rows]
        columns = counts, self.tokens[rows], self.parents[rows], self.log_probs[rows]
        return DraftTrees(*columns, self.grown_ahead[numbers], sampled, sources)


class DraftTree:
    """A view of one of several trees, for what looks at single trees: grammars, penalties, JSON, errors and tests.

    Its nodes lie in the arrays of `trees`, which it keeps alive; see there for what they are. Tuples of them are made on
    first use.

    Args:
        number: of the tree among `trees`.
        first: row of its root there.
        num_nodes: the root included.
    """

    def __init__(self, trees: DraftTrees, number: int, first: int, num_nodes: int) -> None:
        self.trees = trees
        self.number = number
        self.num_nodes = num_nodes
        self._rows = slice(first, first + num_nodes)

    @classmethod
    def of(
        cls,
        tokens: Sequence[int] | Ints,
        parents: Sequence[int] | Ints,
        log_probs: Sequence[float] | npt.NDArray[np.floating],
        grown_ahead: bool = False,
        sampled: SampledProposal | None = None,
        sources: Sequence[int] = (),
    ) -> DraftTree:
        """Return a tree of these nodes. Raises InvalidTree for none, and for lists of different lengths."""
        num_nodes = len(tokens)
        if not num_nodes == len(parents) == len(log_probs):
            raise InvalidTree(f"{num_nodes} tokens, {len(parents)} parents, {len(log_probs)} scores")
        if len(sources) not in (0, num_nodes):
            raise InvalidTree(f"sources of {len(sources)} nodes in a tree of {num_nodes}")
        if not num_nodes:
            raise InvalidTree("a tree without nodes")
        columns = np.array(tokens, np.int64), np.array(parents, np.int64), np.array(log_probs, np.float64)
        ahead = np.array([grown_ahead])
        trees = DraftTrees(
            np.array([num_nodes]),
            *columns,
            ahead,
            (sampled,) if sampled else (),
            np.array(sources, np.int64) if sources else None,
        )
        return cls(trees, 0, 0, num_nodes)

    @classmethod
    def root_only(cls, token: int) -> DraftTree:
        """Return the tree of plain decoding."""
        return cls(DraftTrees.root_only([token]), 0, 0, 1)

    @classmethod
    def chain(
        cls, tokens: Sequence[int], log_probs: Sequence[float] = (), sampled: SampledProposal | None = None
    ) -> DraftTree:
        """Return a single path; tokens[0] is the root. log_probs: 0 by default."""
        parents = [max(node - 1, 0) for node in range(len(tokens))]
        return cls.of(tokens, parents, log_probs or (0.0,) * len(tokens), sampled=sampled)

    def __len__(self) -> int:
        return self.num_nodes

    def __eq__(self, other: object) -> bool:
        return isinstance(other, DraftTree) and self._fields == other._fields

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        return f"DraftTree.of{self._fields}"

    @property
    def _fields(self) -> tuple[object, ...]:
        return (self.tokens, self.parents, self.log_probs, self.grown_ahead, self.sampled, self.sources)

    @property
    def alone(self) -> DraftTrees:
        """Its nodes as arrays of their own."""
        return DraftTrees.of([self])

    @cached_property
    def tokens(self) -> tuple[int, ...]:
        return tuple(self.trees.tokens[self._rows].tolist())

    @cached_property
    def parents(self) -> tuple[int, ...]:
        return tuple(self.trees.parents[self._rows].tolist())

    @cached_property
    def log_probs(self) -> tuple[float, ...]:
        return tuple(self.trees.log_probs[self._rows].tolist())

    @property
    def sources(self) -> tuple[int, ...]:
        sources = self.trees.sources
        return () if sources is None else tuple(sources[self._rows].tolist())

    @property
    def grown_ahead(self) -> bool:
        return bool(self.trees.grown_ahead[self.number])

    @property
    def sampled(self) -> SampledProposal | None:
        return self.trees.sampled[self.number] if self.trees.sampled else None

    @property
    def num_drafted(self) -> int:
        """Number of guesses, the root excluded."""
        return self.num_nodes - 1

    @cached_property
    def depths(self) -> tuple[int, ...]:
        """Distance of each node from the root."""
        depths = [0]
        for parent in self.parents[1:]:
            depths.append(depths[parent] + 1)
        return tuple(depths)

    @property
    def depth(self) -> int:
        """Number of levels below the root."""
        return max(self.depths)

    @cached_property
    def families(self) -> dict[int, list[int]]:
        """The children of each node that has any, in order."""
        families: dict[int, list[int]] = {}
        for node, parent in enumerate(self.parents[1:], 1):
            families.setdefault(parent, []).append(node)
        return families

    def child(self, node: int, token: int) -> int | None:
        """Return the first child of `node` that guesses `token`, or None."""
        return next((child for child in self.families.get(node, ()) if self.tokens[child] == token), None)

    def path(self, node: int) -> tuple[int, ...]:
        """Return the nodes from the root to `node`, both included."""
        path = [node]
        while path[-1] != 0:
            path.append(self.parents[path[-1]])
        return tuple(reversed(path))

    def pruned(self, nodes: Sequence[int]) -> DraftTree:
        """Return the tree of these nodes only, of a deterministic proposal.

        nodes: ascending, the root first, all with their parents.
        """
        is_kept = np.zeros(self.num_nodes, np.bool_)
        is_kept[list(nodes)] = True
        return self.alone.cut(is_kept)[0]

    def with_sources(self, sources: Sequence[int]) -> DraftTree:
        """Return the tree with the parts that proposed each node."""
        return replace(self.alone, sources=np.array(sources, np.int64))[0]

    def with_sampled(self, sampled: SampledProposal | None) -> DraftTree:
        """Return the tree with how its nodes were drawn."""
        return replace(self.alone, sampled=(sampled,))[0]

    def ancestor_mask(self) -> Bools:
        """Return mask[i, j]: whether node j lies on the path from the root to node i, i itself included; [N, N]."""
        seen = [1]  # of each node, the nodes on its path as the bits of a number
        for node, parent in enumerate(self.parents[1:], 1):
            seen.append(seen[parent] | 1 << node)
        words = [[bits >> shift & WORD for bits in seen] for shift in range(0, len(self), 64)] if len(self) > 64 else seen
        packed = np.ascontiguousarray(np.array(words, dtype="<u8").T).reshape(len(self), -1).view(np.uint8)
        return np.unpackbits(packed, axis=1, count=len(self), bitorder="little").view(np.bool_)

    def below(self, path: Sequence[int], max_nodes: int, max_depth: int) -> DraftTree | None:
        """Return the best descendants of the node after a path of tokens, as a tree grown ahead; None if there are none.

        Ties go to the earlier node. A node ranks no higher than its parent, whatever an untrusted drafter says; one whose
        score is no number is left out.

        Args:
            path: tokens below the root.
            max_nodes: counts the new root.
            max_depth: levels below the new root.
        """
        own, root = self.alone, 0
        tokens, parents, log_probs = own.tokens, own.parents, own.log_probs
        for token in path:
            found = np.flatnonzero((tokens[root + 1 :] == token) & (parents[root + 1 :] == root))
            if not len(found):
                return None
            root += 1 + int(found[0])
        with np.errstate(invalid="ignore"):  # infinite ones
            scores = log_probs - log_probs[root]
        scores[root] = 0.0
        level = np.array([root])
        levels = list[Ints]()
        while len(level) and len(levels) < max_depth:
            is_above = np.zeros(len(self), np.bool_)
            is_above[level] = True
            children = root + 1 + np.flatnonzero(is_above[parents[root + 1 :]])
            level = children[scores[children] > -np.inf]
            scores[level] = np.minimum(scores[level], scores[parents[level]])
            levels.append(level)
        below = np.concatenate(levels) if levels else level[:0]
        if not len(below):
            return None
        best = np.sort(below[np.lexsort((below, -scores[below]))[: max_nodes - 1]])
        kept = np.append(root, best)
        numbers = np.append(0, np.searchsorted(kept, parents[best]))
        return DraftTree.of(tokens[kept], numbers, scores[kept], grown_ahead=True)

    def validate(self, root: int, vocab_size: int, max_nodes: int, max_depth: int) -> None:
        """Range-check a tree that may come from an untrusted drafter.

        root: the token that must stand at node 0; max_nodes counts the root.
        Raises InvalidTree saying which rule is broken.
        """
        tokens, parents, num_nodes = self.tokens, self.parents, self.num_nodes
        if not 1 <= num_nodes <= max_nodes:
            raise InvalidTree(f"{num_nodes} nodes where 1 to {max_nodes} are allowed")
        if tokens[0] != root or parents[0] != 0:
            raise InvalidTree(f"root is token {tokens[0]} with parent {parents[0]}, expected {root} and 0")
        comes_before = min(parents) >= 0 and all(map(lt, parents[1:], range(1, num_nodes)))
        if not comes_before or min(tokens) < 0 or max(tokens) >= vocab_size:
            self._name_fault(vocab_size)
        if max(self.depths) > max_depth:
            raise InvalidTree(f"depth {self.depth} where {max_depth} is allowed")
        if self.sampled is not None:
            self._validate_sampled(self.sampled, vocab_size)

    def _name_fault(self, vocab_size: int) -> None:
        """Raises InvalidTree for the first node whose parent or token is out of range."""
        for node in range(len(self)):
            if not 0 <= self.parents[node] < max(node, 1):
                raise InvalidTree(f"node {node} has parent {self.parents[node]}, which does not come before it")
            if not 0 <= self.tokens[node] < vocab_size:
                raise InvalidTree(f"node {node} has token {self.tokens[node]}, outside [0, {vocab_size})")

    def _validate_sampled(self, sampled: SampledProposal, vocab_size: int) -> None:
        if sampled.draft_probs.keys() != self.families.keys():
            raise InvalidTree(
                f"draft probabilities for nodes {sorted(sampled.draft_probs)}, children below nodes {sorted(self.families)}"
            )
        for parent, children in self.families.items():
            probs, tokens = sampled.draft_probs[parent], [self.tokens[child] for child in children]
            probs.validate(vocab_size)
            if not set(tokens) <= set(probs.ids):
                raise InvalidTree(
                    f"node {parent} has children {tokens}, which its {len(probs.ids)} draft probabilities do not hold"
                )
            if not sampled.replacement and len(set(tokens)) < len(tokens):
                raise InvalidTree(f"node {parent} has children {tokens}, drawn twice without replacement")


@dataclass(frozen=True)
class PreparedTree:
    """A tree that holds the next drafts of likely next commits. Its root is the committed token before `committed_length`.

    committed_length: tokens of the session up to the root; later commits may have been foreseen since.
    """

    MAX_NODES: ClassVar[int] = 2048

    session: str
    epoch: int
    committed_length: int
    tree: DraftTree
