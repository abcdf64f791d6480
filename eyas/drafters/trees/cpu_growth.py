"""Grows trees of EAGLE and one-pass heads by compiled kernels of the CPU."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from torch import Tensor

from eyas.arrays import Bools, Ints
from eyas.cache.prefix_cache import Slots
from eyas.drafters.base import limits_of
from eyas.drafters.trees.rows import GrowthShape
from eyas.kernels.arguments import RowKeys
from eyas.models.backends.packed_weights import PackedProduct
from eyas.protocol.commit import TreeBudget
from eyas.protocol.tree import DraftTrees


class FrontierRows(NamedTuple):
    """The nodes that are expanded next, as rows for the kernels of the CPU, [R] each.

    Attributes:
        sources: the rows above theirs, among those of the level before.
        tokens: the target's ids.
        slots: for their keys and values.
        keys: what they see: the prefix, their ancestors and themselves.
    """

    sources: Ints
    tokens: Ints
    slots: Ints
    keys: RowKeys


class LevelGrowth:
    """Trees that grow level by level on the CPU. As `TreeGrowth`, without nodes whose children cannot be chosen.

    widths, frontiers: of each session the number of nodes to expand next, and these as candidates [S], [S, k].

    Args:
        draft_ids, words: see CompiledGrowth.
        shape: most levels, and nodes expanded at each.
        prefixes: slots of each session.
        tree_slots: for the rows of each tree.
    """

    def __init__(
        self,
        draft_ids: Tensor,
        words: Ints,
        budgets: Sequence[TreeBudget],
        shape: GrowthShape,
        prefixes: Sequence[Slots],
        tree_slots: Ints,
        max_model_len: int,
    ) -> None:
        from eyas.kernels.cpu import drafting as kernels
        from eyas.kernels.cpu.sampling import shared_noise

        self._kernels, self._noise = kernels, kernels.NO_NOISE
        self._draft_ids, self._words = draft_ids.numpy(), words
        self._limits, depths = limits_of(budgets)
        self._depths, sessions, k = np.minimum(depths, shape.num_steps), len(budgets), shape.top_k
        if words[2].any():
            self._noise = np.empty((sessions, shape.num_steps, len(self._draft_ids)), np.float32)
            shared_noise(words, self._draft_ids, self._noise)
        room = k + (shape.num_steps - 1) * k * k
        self._tokens, self._parents = np.empty((2, sessions, room), np.int64)
        self._scores, self._counts = np.empty((sessions, room), np.float32), np.zeros(sessions, np.int64)
        self._firsts = self._counts.copy()  # of the candidates of the last level
        self.widths, self.frontiers = np.ones(sessions, np.int64), np.zeros((sessions, k), np.int64)
        self._num_levels = 0
        self._prefixes, self._tree_slots, self._max_model_len = prefixes, tree_slots, max_model_len
        self._seen: list[Bools] = [np.zeros((1, 0), np.bool_) for _ in prefixes]  # which rows the newest rows see
        self._starts = np.arange(sessions)  # of each session's newest rows

    def add(self, logits: Tensor) -> None:
        """Record the children of all frontiers, float32 [R, D] session by session."""
        self._firsts[:] = self._counts
        self._kernels.grow_level(
            logits.numpy(), self._num_levels, self._noise, self._words, self._limits, self._depths, self.widths,
            self.frontiers, self._counts, self._scores, self._tokens, self._parents,
        )  # fmt: skip
        self._num_levels += 1

    def rows(self) -> FrontierRows:
        """Return the frontiers as rows of the next pass."""
        sessions, widths = np.flatnonzero(self.widths).tolist(), self.widths
        owners, num_children = np.repeat(np.arange(len(widths)), widths), self.frontiers.shape[1]
        candidates = np.concatenate([self.frontiers[s, : widths[s]] for s in sessions])
        is_first = self._num_levels == 1
        parents = np.zeros_like(candidates) if is_first else (candidates - self._firsts[owners]) // num_children
        ends, before = np.cumsum(widths), [self._seen[s].shape[1] for s in sessions]
        sources = self._starts[owners] + parents
        for s in sessions:
            above = self._seen[s][parents[ends[s] - widths[s] : ends[s]]]
            self._seen[s] = np.concatenate([above, np.eye(widths[s], dtype=np.bool_)], 1)
        self._starts = ends - widths
        prefixes = [
            np.concatenate([self._prefixes[s], self._tree_slots[s, :n]]) for s, n in zip(sessions, before, strict=True)
        ]
        slots = np.concatenate([self._tree_slots[s, n : n + widths[s]] for s, n in zip(sessions, before, strict=True)])
        positions = np.array([len(own) for own in self._prefixes])[owners] + (self._num_levels - 1)
        keys = RowKeys(
            starts=self._starts[sessions],
            ends=ends[sessions],
            prefix=np.concatenate(prefixes),
            prefix_ends=np.cumsum([len(own) for own in prefixes]),
            causal=np.zeros(len(sessions), np.bool_),
            num_masked=np.array(before),
            visible=np.concatenate([self._seen[s].ravel() for s in sessions]),
            positions=np.minimum(positions, self._max_model_len - 1),
        )
        return FrontierRows(sources, self._draft_ids[self._tokens[owners, candidates]], slots, keys)

    def trees(self, roots: Sequence[int]) -> DraftTrees:
        """Return the trees below the roots, the target's ids."""
        most = int(self._limits.max())
        cells, scores = np.zeros((2, len(roots), most + 1), np.int64), np.empty((len(roots), most), np.float32)
        self._kernels.select_trees(
            self._limits, self._counts, self._draft_ids, self._scores, self._tokens, self._parents, cells, scores
        )
        return DraftTrees.below(roots, cells[0, :, :-1], cells[1, :, :-1], scores, cells[0, :, -1])


class CompiledGrowth:
    """Dynamic trees of heads that know all levels at once, and of a vanilla Markov head on top of them.

    Args:
        draft_ids: the target's ids, int64 [D]. embedding [V, r] and product, to [D], are of the Markov head.
    """

    def __init__(self, draft_ids: Tensor, embedding: Tensor | None = None, product: PackedProduct | None = None) -> None:
        from eyas.kernels.cpu import drafting as kernels

        kernels.compile_kernels()
        self._kernels, self._draft_ids = kernels, draft_ids.numpy()
        self._product, self._markov = product, kernels.MarkovBias()  # the former owns the weight
        if embedding is not None and product is not None:
            rows, weight = embedding.detach().contiguous().numpy(), product.weight
            self._markov = kernels.MarkovBias(rows, weight.layout.data_ptr(), weight.stored, 1.0 / product.scale)

    def trees(
        self, logits: Tensor, roots: Sequence[int], words: Ints, budgets: Sequence[TreeBudget], top_k: int
    ) -> DraftTrees:
        """Return the trees of `grow_dynamic` and `select_nodes` in `eyas.drafters.trees.growth`.

        Args:
            logits: of all levels, float32 [S, L, D].
            roots: the target's ids.
            words: see `scoring.unfiltered_words`.
        """
        values, kernels = logits.contiguous().numpy(), self._kernels
        noise = kernels.NO_NOISE
        if words[2].any():  # a session shares its noise
            noise = np.empty(values.shape, np.float32)
            kernels.shared_noise(words, self._draft_ids, noise)
        limits, depths = limits_of(budgets)
        depths, most = np.minimum(depths, values.shape[1]), int(limits.max())
        cells, scores = np.zeros((2, len(roots), most + 1), np.int64), np.empty((len(roots), most), np.float32)
        kernels.grow_trees(
            values, self._markov, np.array(roots), self._draft_ids, noise, words, limits, depths, top_k,
            cells, scores,
        )  # fmt: skip
        return DraftTrees.below(roots, cells[0, :, :-1], cells[1, :, :-1], scores, cells[0, :, -1])
