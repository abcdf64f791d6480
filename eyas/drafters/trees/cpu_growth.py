"""Grows trees of EAGLE and one-pass heads by compiled kernels of the CPU."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
from torch import Tensor

from eyas.arrays import Ints
from eyas.cache.kv_cache import KVCache
from eyas.cache.prefix_cache import Slots
from eyas.drafters.base import limits_of
from eyas.drafters.trees.rows import GrowthShape
from eyas.models.backends.packed_weights import PackedProduct
from eyas.protocol.commit import TreeBudget
from eyas.protocol.tree import DraftTrees

if TYPE_CHECKING:
    from eyas.kernels.cpu.eagle_trees import EagleTrees
    from eyas.models.heads.compiled import CompiledEagle


class EagleGrowth:
    """Trees of an EAGLE head, level by level. As `TreeGrowth`, without nodes whose children cannot be chosen.

    Args:
        head: runs by compiled kernels, all layers in one.
        kv: of its layers.
        tree_slots: for the rows of each tree.
    """

    def __init__(self, head: CompiledEagle, kv: KVCache, tree_slots: Ints) -> None:
        from eyas.kernels.cpu import drafting, eagle_trees
        from eyas.kernels.cpu.sampling import shared_noise

        drafting.compile_kernels()
        eagle_trees.compile_kernels()
        self._kernels, self._noise = eagle_trees, shared_noise
        self._head, self._kv, self._tree_slots = head, kv, tree_slots
        self._weights = head.weights

    def trees(
        self,
        states: Tensor,
        roots: Sequence[int],
        words: Ints,
        budgets: Sequence[TreeBudget],
        shape: GrowthShape,
        prefixes: Sequence[Slots],
    ) -> DraftTrees:
        """Return the trees below the last commits of sessions.

        Args:
            states: behind their last pairs [S, H].
            roots: the target's ids.
            words: see `scoring.unmasked_words`.
            shape: most levels, and nodes expanded at each.
            prefixes: slots of each session.
        """
        growth = self._start(words, budgets, shape, prefixes)
        logits = self._head.logits(states)
        for level in range(int(growth.depths.max())):
            rows = self._kernels.grow_eagle_level(self._weights, growth, level, logits.numpy(), states.numpy())
            if not growth.widths.any():
                break
            states, logits = self._head.run_level(rows, self._kv)
        most = int(growth.limits.max())
        cells, scores = np.zeros((2, len(roots), most + 1), np.int64), np.empty((len(roots), most), np.float32)
        self._kernels.select_eagle_trees(self._weights, growth, cells, scores)
        return DraftTrees.below(roots, cells[0, :, :-1], cells[1, :, :-1], scores, cells[0, :, -1])

    def _start(
        self, words: Ints, budgets: Sequence[TreeBudget], shape: GrowthShape, prefixes: Sequence[Slots]
    ) -> EagleTrees:
        limits, depths = limits_of(budgets)
        depths = np.minimum(depths, shape.num_steps)
        sessions, k, num_levels = len(budgets), shape.top_k, int(depths.max())
        noise = np.empty((sessions if words[2].any() else 0, num_levels, len(self._weights.draft_ids)), np.float32)
        if len(noise):
            self._noise(words, self._weights.draft_ids, noise)
        room = k + max(num_levels - 1, 0) * k * k
        return self._kernels.EagleTrees(
            noise,
            words,
            limits,
            depths,
            widths=np.ones(sessions, np.int64),
            frontiers=np.zeros((sessions, k), np.int64),
            counts=np.zeros(sessions, np.int64),
            scores=np.empty((sessions, room), np.float32),
            tokens=np.empty((sessions, room), np.int64),
            parents=np.empty((sessions, room), np.int64),
            starts=np.arange(sessions),
            num_run=np.zeros(sessions, np.int64),
            seen=np.zeros((sessions, k, k * num_levels), np.bool_),
            prefix=np.concatenate(prefixes),
            prefix_ends=np.cumsum([len(own) for own in prefixes]),
            tree_slots=self._tree_slots,
        )


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
            words: see `scoring.unmasked_words`.
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
