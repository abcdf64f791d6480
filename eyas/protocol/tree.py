"""Draft trees: tokens and parents, with depths, masks and children.

Node 0 is the root: the last committed token. Every other node is a guess for the token after its parent. A tree of one node
is ordinary decoding.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import chain, groupby, repeat
from operator import attrgetter, lt
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
import numpy.typing as npt

from eyas.errors import InvalidTree

Ints = npt.NDArray[np.int64]
Int32s = npt.NDArray[np.int32]
Floats = npt.NDArray[np.float32]
Bools = npt.NDArray[np.bool_]
Cells = npt.NDArray[np.generic]

MASS_TOLERANCE = 1e-4
WORD = (1 << 64) - 1


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
    """How the nodes of a sampled tree were drawn.

    Siblings are in the order in which they were drawn, and no node was added, left out or moved because of its token.

    draft_probs: by node, for exactly the nodes that have children.
    replacement: whether each sibling was drawn from the whole distribution, so that tokens may repeat; else each from what
        the siblings before it left.
    """

    draft_probs: Mapping[int, DraftProbs]
    replacement: bool = False


@dataclass(frozen=True)
class DraftTree:
    """A tree of guesses below the last committed token.

    tokens: token id of each node; tokens[0] is the root.
    parents: index of each node's parent, always smaller than the node's own; the root is its own parent.
    log_probs: cumulative score of each node under the drafter; 0.0 at the root. Used only to rank nodes.
    grown_ahead: whether the tree was grown before its root was known.
    sampled: how the nodes were drawn; None for a deterministic proposal.
    sources: of a combined drafter, which of its parts proposed each node: 1 for the first, 2 for the second, 3 for both; 0
        for the root. Empty for other drafters, and unless the commit wants them.
    batch, number: arrays that hold its nodes too, if any, and its number among the trees there.
    num_nodes: the root included.
    """

    tokens: tuple[int, ...]
    parents: tuple[int, ...]
    log_probs: tuple[float, ...]
    grown_ahead: bool = False
    sampled: SampledProposal | None = None
    sources: tuple[int, ...] = ()
    batch: TreeBatch | None = field(default=None, init=False, repr=False, compare=False)
    number: int = field(default=0, init=False, repr=False, compare=False)
    num_nodes: int = field(init=False, repr=False, compare=False)

    if not TYPE_CHECKING:  # to which attributes are as declared

        def __getattr__(self, name: str) -> Any:
            """Make on first use what `TreeBatch.trees` leaves out."""
            if name == "num_nodes":
                found = {name: len(self.tokens)}
            elif name in ("tokens", "parents", "log_probs") and self.batch is not None:
                found = self.batch.columns(self.number)
            else:
                raise AttributeError(f"a draft tree has no {name!r}")
            self.__dict__.update(found)
            return found[name]

    @classmethod
    def root_only(cls, token: int) -> DraftTree:
        """The tree of plain decoding."""
        return cls((token,), (0,), (0.0,))

    @classmethod
    def chain(cls, tokens: Sequence[int]) -> DraftTree:
        """A single path; tokens[0] is the root."""
        return cls(tuple(tokens), tuple(max(i - 1, 0) for i in range(len(tokens))), (0.0,) * len(tokens))

    def __len__(self) -> int:
        return self.num_nodes

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

    @cached_property
    def guesses(self) -> dict[tuple[int, int], int]:
        """By node and token, the first child that guesses it."""
        return dict(
            zip(zip(self.parents[:0:-1], self.tokens[:0:-1], strict=True), range(len(self.tokens) - 1, 0, -1), strict=True)
        )

    def child(self, node: int, token: int) -> int | None:
        """The first child of `node` that guesses `token`, or None."""
        return self.guesses.get((node, token))

    def path(self, node: int) -> tuple[int, ...]:
        """Nodes from the root to `node`, both included."""
        path = [node]
        while path[-1] != 0:
            path.append(self.parents[path[-1]])
        return tuple(reversed(path))

    def pruned(self, nodes: Sequence[int]) -> DraftTree:
        """The tree of these nodes only, for a deterministic proposal.

        nodes: ascending, the root first, all with their parents.
        """
        numbers = {node: number for number, node in enumerate(nodes)}
        return DraftTree(
            tokens=tuple(self.tokens[node] for node in nodes),
            parents=tuple(numbers[self.parents[node]] for node in nodes),
            log_probs=tuple(self.log_probs[node] for node in nodes),
            grown_ahead=self.grown_ahead,
            sources=tuple(self.sources[node] for node in nodes) if self.sources else (),
        )

    def ancestor_mask(self) -> Bools:
        """mask[i, j] is true where node j lies on the path from the root to node i, i itself included; [N, N]."""
        seen = [1]  # of each node, the nodes on its path as the bits of a number
        for node, parent in enumerate(self.parents[1:], 1):
            seen.append(seen[parent] | 1 << node)
        words = [[bits >> shift & WORD for bits in seen] for shift in range(0, len(self), 64)] if len(self) > 64 else seen
        packed = np.ascontiguousarray(np.array(words, dtype="<u8").T).reshape(len(self), -1).view(np.uint8)
        return np.unpackbits(packed, axis=1, count=len(self), bitorder="little").view(np.bool_)

    def validate(self, root: int, vocab_size: int, max_nodes: int, max_depth: int) -> None:
        """Range-check a tree that may come from an untrusted drafter.

        root: the token that must stand at node 0; max_nodes counts the root.
        Raises InvalidTree saying which rule is broken.
        """
        tokens, parents, num_nodes = self.tokens, self.parents, len(self.tokens)
        if not num_nodes == len(parents) == len(self.log_probs):
            raise InvalidTree(f"{num_nodes} tokens, {len(parents)} parents, {len(self.log_probs)} scores")
        if not 1 <= num_nodes <= max_nodes:
            raise InvalidTree(f"{num_nodes} nodes where 1 to {max_nodes} are allowed")
        if tokens[0] != root or parents[0] != 0:
            raise InvalidTree(f"root is token {tokens[0]} with parent {parents[0]}, expected {root} and 0")
        comes_before = min(parents) >= 0 and all(map(lt, parents[1:], range(1, num_nodes)))
        if not comes_before or min(tokens) < 0 or max(tokens) >= vocab_size:
            self._name_fault(vocab_size)
        if max(self.depths) > max_depth:
            raise InvalidTree(f"depth {self.depth} where {max_depth} is allowed")
        if self.sources and len(self.sources) != len(self):
            raise InvalidTree(f"sources of {len(self.sources)} nodes in a tree of {len(self)}")
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


@dataclass(frozen=True, eq=False)
class TreeBatch:
    """The nodes of several trees as arrays, one tree after the other.

    A drafter that has arrays makes trees of them by `trees`, and `of` gives these arrays back. So nothing is copied node by
    node from the drafter to the pass.

    counts: nodes of each tree, int64 [B]. tokens, parents: int64 [R], log_probs: float64 [R], as those of DraftTree.
    """

    counts: Ints
    tokens: Ints
    parents: Ints
    log_probs: npt.NDArray[np.float64]

    @classmethod
    def of(cls, trees: Sequence[DraftTree]) -> TreeBatch:
        """The arrays of at least one tree.

        Raises InvalidTree for one without nodes, or with lists of different lengths.
        """
        runs = groupby(trees, attrgetter("batch"))
        parts = [
            cls._packed(list(run)) if batch is None else batch.taken([tree.number for tree in run]) for batch, run in runs
        ]
        if len(parts) == 1:
            return parts[0]
        columns = zip(*((part.counts, part.tokens, part.parents, part.log_probs) for part in parts), strict=True)
        return cls(*map(np.concatenate, columns))

    @classmethod
    def below(cls, roots: Sequence[int], tokens: Cells, parents: Cells, log_probs: Cells, counts: Ints) -> TreeBatch:
        """Trees of drafted nodes below roots.

        tokens, parents, log_probs: of the first `counts` nodes of each row; 0 is the root's number [B, N].
        """
        is_filled, firsts = np.arange(tokens.shape[1]) < counts[:, None], counts.cumsum() - counts + np.arange(len(counts))
        num_nodes = int(counts.sum()) + len(counts)
        batch = cls(counts + 1, np.zeros(num_nodes, np.int64), np.zeros(num_nodes, np.int64), np.zeros(num_nodes))
        is_drafted = np.ones(num_nodes, np.bool_)
        is_drafted[firsts], batch.tokens[firsts] = False, roots
        batch.tokens[is_drafted], batch.parents[is_drafted] = tokens[is_filled], parents[is_filled]
        batch.log_probs[is_drafted] = log_probs[is_filled]
        return batch

    @cached_property
    def firsts(self) -> Ints:
        """The row of each root [B]."""
        firsts: Ints = self.counts.cumsum() - self.counts
        return firsts

    def trees(self, grown_ahead: Iterable[bool] = repeat(False)) -> list[DraftTree]:
        """The trees. Their tuples are made on first use. grown_ahead: of each."""
        trees = []
        for number, (num_nodes, ahead) in enumerate(zip(self.counts.tolist(), grown_ahead, strict=False)):
            tree = object.__new__(DraftTree)
            tree.__dict__.update(batch=self, number=number, num_nodes=num_nodes, grown_ahead=ahead)
            trees.append(tree)
        return trees

    def cut(self, is_kept: Bools) -> TreeBatch:
        """The trees with some of their nodes only: all roots, and no node without its parent. is_kept: [R]."""
        numbers, firsts = is_kept.cumsum() - 1, np.repeat(self.firsts, self.counts)
        parents = numbers[self.parents + firsts] - numbers[firsts]
        counts = np.add.reduceat(is_kept, self.firsts, dtype=np.int64)
        return TreeBatch(counts, self.tokens[is_kept], parents[is_kept], self.log_probs[is_kept])

    def columns(self, number: int) -> dict[str, tuple[Any, ...]]:
        """The tuples of one tree."""
        first = int(self.firsts[number])
        own = slice(first, first + int(self.counts[number]))
        columns = {"tokens": self.tokens, "parents": self.parents, "log_probs": self.log_probs}
        return {name: tuple(values[own].tolist()) for name, values in columns.items()}

    @classmethod
    def _packed(cls, trees: Sequence[DraftTree]) -> TreeBatch:
        """`of` trees without arrays. They are kept, as they may be asked for again."""
        counts = np.array([len(tree.tokens) for tree in trees], dtype=np.int64)
        others = np.array([[len(tree.parents), len(tree.log_probs), len(tree.sources or tree.tokens)] for tree in trees])
        if not counts.all() or (others != counts[:, None]).any():
            raise InvalidTree("there is a tree without nodes, or with lists of different lengths")
        flat = {n: chain.from_iterable(map(attrgetter(n), trees)) for n in ("tokens", "parents", "log_probs")}
        tokens, parents = (np.fromiter(flat[name], np.int64) for name in ("tokens", "parents"))
        batch = cls(counts, tokens, parents, np.fromiter(flat["log_probs"], np.float64))
        for number, tree in enumerate(trees):
            tree.__dict__.update(batch=batch, number=number)
        return batch

    def taken(self, numbers: list[int]) -> TreeBatch:
        """The arrays of some trees, in this order."""
        if len(numbers) == len(self.counts) and numbers == list(range(len(numbers))):
            return self
        counts, firsts = self.counts[numbers], self.firsts[numbers]
        rows = np.repeat(firsts - counts.cumsum() + counts, counts) + np.arange(int(counts.sum()))
        return TreeBatch(counts, self.tokens[rows], self.parents[rows], self.log_probs[rows])


def cut_trees(trees: Sequence[DraftTree], is_kept: Bools) -> list[DraftTree]:
    """Trees with some of their nodes: roots, and what is kept of the drafted nodes of all trees, one after the other."""
    if is_kept.all():
        return list(trees)
    batch = TreeBatch.of(trees)
    is_drafted = np.ones(len(batch.tokens), np.bool_)
    is_drafted[batch.firsts] = False
    kept = ~is_drafted
    kept[is_drafted] = is_kept
    parts = batch.cut(kept).trees([tree.grown_ahead for tree in trees])
    return [
        tree.pruned(np.flatnonzero(kept[first : first + len(tree)]).tolist()) if tree.sources else part
        for tree, part, first in zip(trees, parts, batch.firsts.tolist(), strict=True)
    ]


@dataclass(frozen=True, eq=False)
class TreeArrays:
    """A deterministic tree of many nodes, as arrays: tokens, parents int32 [N], log_probs float32 [N], as in DraftTree."""

    tokens: Int32s
    parents: Int32s
    log_probs: Floats

    @classmethod
    def of(cls, tree: DraftTree) -> TreeArrays:
        """The same tree."""
        return cls(np.array(tree.tokens, np.int32), np.array(tree.parents, np.int32), np.array(tree.log_probs, np.float32))

    def __len__(self) -> int:
        return len(self.tokens)

    def tree(self) -> DraftTree:
        """The same tree, grown ahead."""
        return DraftTree(
            tuple(self.tokens.tolist()), tuple(self.parents.tolist()), tuple(self.log_probs.tolist()), grown_ahead=True
        )

    def validate(self, vocab_size: int, max_nodes: int) -> None:
        """As `DraftTree.validate`, for any root and depth."""
        num_nodes = len(self)
        if 1 <= num_nodes == len(self.parents) == len(self.log_probs) <= max_nodes and self.parents[0] == 0:
            comes_before = self.parents.min() >= 0 and bool((self.parents[1:] < np.arange(1, num_nodes)).all())
            if comes_before and 0 <= self.tokens.min() <= self.tokens.max() < vocab_size:
                return
        tree = self.tree()
        tree.validate(tree.tokens[0] if tree.tokens else 0, vocab_size, max_nodes, num_nodes)

    def below(self, path: Sequence[int], max_nodes: int, max_depth: int) -> DraftTree | None:
        """The best descendants of the node behind a path of tokens, as a tree grown ahead; None if there are none.

        path: of tokens below the root. max_nodes: counts the new root. Ties go to the earlier node. A node ranks no higher
        than its parent, whatever an untrusted drafter says; without a score that is a number it is left out.
        """
        parents, root = self.parents, 0
        for token in path:
            found = np.flatnonzero((self.tokens[root + 1 :] == token) & (parents[root + 1 :] == root))
            if not len(found):
                return None
            root += 1 + int(found[0])
        with np.errstate(invalid="ignore"):  # infinite ones
            scores = self.log_probs.astype(np.float64) - self.log_probs[root]
        scores[root], level, levels = 0.0, np.array([root]), list[Ints]()
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
        numbers = np.searchsorted(kept, parents[best])
        return DraftTree(
            tuple(self.tokens[kept].tolist()), (0, *numbers.tolist()), tuple(scores[kept].tolist()), grown_ahead=True
        )


@dataclass(frozen=True)
class PreparedTree:
    """A tree that holds the next drafts of likely next commits. Its root is the committed token before `committed_length`.

    committed_length: tokens of the session up to the root; later commits may have been foreseen since.
    """

    MAX_NODES: ClassVar[int] = 2048

    session: str
    epoch: int
    committed_length: int
    tree: TreeArrays
