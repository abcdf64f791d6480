"""Draft trees: tokens and parents, with depths, masks and children.

Node 0 is the root: the last committed token. Every other node is a guess for the token after its parent. A tree of one node
is ordinary decoding.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from operator import lt
from typing import ClassVar

import numpy as np
import numpy.typing as npt

from eyas.errors import InvalidTree

Ints = npt.NDArray[np.int64]
Int32s = npt.NDArray[np.int32]
Floats = npt.NDArray[np.float32]
Bools = npt.NDArray[np.bool_]

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
    """

    tokens: tuple[int, ...]
    parents: tuple[int, ...]
    log_probs: tuple[float, ...]
    grown_ahead: bool = False
    sampled: SampledProposal | None = None
    sources: tuple[int, ...] = ()

    @classmethod
    def root_only(cls, token: int) -> DraftTree:
        """The tree of plain decoding."""
        return cls((token,), (0,), (0.0,))

    @classmethod
    def chain(cls, tokens: Sequence[int]) -> DraftTree:
        """A single path; tokens[0] is the root."""
        return cls(tuple(tokens), tuple(max(i - 1, 0) for i in range(len(tokens))), (0.0,) * len(tokens))

    def __len__(self) -> int:
        return len(self.tokens)

    @property
    def num_drafted(self) -> int:
        """Number of guesses, the root excluded."""
        return len(self.tokens) - 1

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
        for node in range(1, len(self)):
            if not 0 <= self.parents[node] < node:
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
        raise InvalidTree(f"the root is token {tree.tokens[0]}, outside [0, {vocab_size})")

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
