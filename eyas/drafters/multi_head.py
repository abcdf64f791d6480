"""Medusa (Cai et al. 2024): several heads on the target's final state, each guessing one token further; and Hydra
(Ankner et al. 2024): such heads that also see the embeddings of the path below the root.

Legend: S sessions, R new features of all sessions, W frontier rows, H hidden, D draft vocabulary.
"""

from __future__ import annotations

import heapq
import math
import sys
from collections.abc import Collection, Sequence
from dataclasses import replace
from functools import partial

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from eyas.cache.kv_cache import KVShape
from eyas.cache.prefix_cache import Slots
from eyas.config import DraftingConfig, MedusaConfig, TreeChoices, TreeConfig
from eyas.device.transfer import upload
from eyas.drafters.base import DraftContext, DraftWork
from eyas.drafters.neural import NeuralDrafter, plan_tree_slots
from eyas.drafters.sessions import KVLedger, KVSession, make_kv_cache, num_features
from eyas.drafters.trees.growth import Expansion, IndependentExpansion, StaticTree
from eyas.drafters.trees.rows import GrowthShape, Roots, RowLayout, TreeSlots
from eyas.errors import ConfigError
from eyas.kernels.arguments import NO_SLOTS
from eyas.models.backends.attention_metadata import Tiling
from eyas.models.backends.cuda_graphs import Capture, padded_size
from eyas.models.heads.hydra import HydraHead, PrefixLayer
from eyas.models.heads.medusa import MedusaHead
from eyas.models.heads.slots import cache_and_attend
from eyas.models.inputs import PackedInputs

# Estimate for the default static tree: the child of rank r is right with a probability proportional to
# (r + 1) ** -RANK_DECAY, any child at all with CHILD_PROBABILITY.
RANK_DECAY = 1.6
CHILD_PROBABILITY = 0.9


class MultiHeadDrafter(NeuralDrafter[None]):
    """Trees of Medusa or Hydra heads. They attend to no cached prefix.

    They grow from the last feature of a session. Hydra heads may have a prefix layer (prefix-mlp): then they grow from that
    layer's output behind all features of the session, whose keys and values are cached.

    Raises ConfigError for a tree that the heads cannot grow.

    Args:
        capture: how to capture whole trees as CUDA graphs.
    """

    def __init__(
        self,
        head: MedusaHead | HydraHead,
        tree: TreeConfig,
        config: DraftingConfig,
        medusa: MedusaConfig,
        capture: Capture | None = None,
    ) -> None:
        tree, static_tree = _tree_shape(head, tree, medusa)
        if tree.top_k > len(head.draft_ids):
            raise ConfigError(f"a tree of width {tree.top_k} needs as many draft tokens; there are {len(head.draft_ids)}")
        self._head, self._prefix = head, head.prefix if isinstance(head, HydraHead) else None
        dtype = next(head.parameters()).dtype
        sessions: KVLedger[None] = KVLedger(0, sys.maxsize)
        slots = None
        if self._prefix:
            sizes, length = self._prefix.sizes, len(self._prefix.rotary)
            shapes = [KVShape(sizes.num_kv_heads, sizes.head_dim, sizes.head_dim)]
            self._kv = make_kv_cache(config, shapes, dtype, head.draft_ids.device)
            sessions = KVLedger(self._kv.scratch, length)
            slots = plan_tree_slots(self._kv, shapes, sizes.num_heads, length, (), config.cuda_graph_max_batch, capture)
        elif capture:  # no row has a slot
            nothing = RowLayout((), Tiling(1, 1, 1), 1, head.draft_ids.device)
            slots = TreeSlots(nothing, nothing, padded_size(config.cuda_graph_max_batch))
        super().__init__(config, tree, static_tree, head.draft_ids, sessions)
        run = partial(self._run_prefix, self._prefix) if self._prefix else None
        self._use_slots(slots, capture, head.hidden, dtype, run, head.hidden)

    @property
    def work(self) -> DraftWork:
        passes = (self.tree.num_steps if isinstance(self._head, HydraHead) else 1) + bool(self._prefix)
        return DraftWork(passes, passes)

    def _claim(self, session: KVSession[None], context: DraftContext, busy: Collection[str]) -> bool:
        count = num_features(context)
        return self.sessions.claim(session, count if self._prefix else 0, 0, busy) and count > 0

    def _extend(self, contexts: Sequence[DraftContext]) -> Tensor:
        features = self._features(contexts)
        if self._prefix:
            return self._run_new(contexts, features, partial(self._run_prefix, self._prefix))
        return features[upload(np.cumsum([num_features(context) for context in contexts]) - 1, features.device)]

    def _run_prefix(self, layer: PrefixLayer, features: Tensor, rows: PackedInputs, last: PackedInputs) -> Tensor:
        """Return an ExtendPass: cache keys and values of the new features, and run the last one of each session."""
        projected, ends = layer.project(features, rows.positions), rows.logits_indices
        attended = cache_and_attend(self._kv, 0, projected, rows.slots, projected.query[ends], last)
        return layer.finish(attended, projected.residual[ends])

    def _prefix_slots(self, contexts: Sequence[DraftContext]) -> list[Slots]:
        return [NO_SLOTS] * len(contexts)

    def _expand(self, roots: Roots, shape: GrowthShape) -> Expansion:
        if isinstance(self._head, HydraHead):
            return HydraExpansion(self._head, roots.states, roots.tokens)
        return IndependentExpansion(self._head.logits(roots.states, shape.num_steps))


def _tree_shape(
    head: MedusaHead | HydraHead, tree: TreeConfig, medusa: MedusaConfig
) -> tuple[TreeConfig, StaticTree | None]:
    """Return the size of the trees, and their shape if it is static."""
    if tree.num_draft_tokens < 2 or tree.num_steps < 1:
        raise ConfigError(
            f"tree.num_draft_tokens {tree.num_draft_tokens} and tree.num_steps {tree.num_steps} leave no room for a guess; "
            "set 2 and 1 or more"
        )
    tree = replace(tree, num_steps=min(tree.num_steps, head.num_heads))
    if medusa.shape == "dynamic":
        return tree, None
    static_tree = StaticTree(medusa.tree_choices or likely_paths(tree), head.draft_ids.device)
    if static_tree.shape.num_steps > head.num_heads:
        raise ConfigError(
            f"methods.medusa.tree_choices reach {static_tree.shape.num_steps} levels deep, but there are {head.num_heads} "
            "heads"
        )
    return static_tree.shape, static_tree


def likely_paths(tree: TreeConfig) -> TreeChoices:
    """Return the likeliest `num_draft_tokens - 1` paths, best first, if a child's probability depends on its rank alone."""
    weights = [(rank + 1.0) ** -RANK_DECAY for rank in range(tree.top_k)]
    costs = [-math.log(CHILD_PROBABILITY * weight / math.fsum(weights)) for weight in weights]
    paths: list[tuple[int, ...]] = []
    waiting: list[tuple[float, int, tuple[int, ...]]] = [(0.0, 0, ())]
    while waiting and len(paths) < tree.num_draft_tokens:
        cost, length, path = heapq.heappop(waiting)
        paths.append(path)
        if length < tree.num_steps:
            for rank, further in enumerate(costs):
                heapq.heappush(waiting, (cost + further, length + 1, (*path, rank)))
    return tuple(paths[1:])


class HydraExpansion:
    """Expansion by Hydra heads. A row is the state and the embeddings of its path, [S, W, (2 + level) H] at a level.

    Args:
        roots: the target's token ids, int64 [S].
    """

    def __init__(self, head: HydraHead, states: Tensor, roots: Tensor) -> None:
        self._head = head
        self._rows = torch.cat([states, F.embedding(roots, head.embedding)], -1)[:, None]

    def first(self) -> Tensor:
        return self._head.logits(self._rows, 0)

    def next(self, level: int, parents: Tensor, tokens: Tensor) -> Tensor:
        above = self._rows.gather(1, parents[:, :, None].expand(-1, -1, self._rows.shape[2]))
        embedded = F.embedding(self._head.draft_ids[tokens], self._head.embedding)
        self._rows = torch.cat([above, embedded], -1)
        return self._head.logits(self._rows, level)
