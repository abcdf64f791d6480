"""Medusa (Cai et al. 2024): several heads on the target's final state, each guessing one token further.

`MultiHeadDrafter` is common to Medusa and Hydra. Legend: S sessions, R new features of all sessions, W frontier rows,
H hidden, D draft vocabulary.
"""

from __future__ import annotations

import heapq
import math
import sys
from abc import abstractmethod
from collections.abc import Collection, Sequence
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from eyas.cache.prefix_cache import Slots
from eyas.config import DraftingConfig, MedusaConfig, TreeChoices, TreeConfig
from eyas.drafters.base import DraftContext, DrafterNeeds
from eyas.drafters.cuda_graphs import Roots
from eyas.drafters.neural import NeuralDrafter
from eyas.drafters.scoring import Scorer
from eyas.drafters.sessions import KVLedger, KVSession, no_slots, num_features
from eyas.drafters.tree_growth import Expansion, StaticTree
from eyas.errors import ConfigError
from eyas.models.cuda.graphs import Capture
from eyas.models.heads.medusa import MedusaHead
from eyas.tensors import moved, upload

# Estimate for the default static tree: the child of rank r is right with a probability proportional to
# (r + 1) ** -RANK_DECAY, any child at all with CHILD_PROBABILITY.
RANK_DECAY = 1.6
CHILD_PROBABILITY = 0.9


class MultiHeadDrafter(NeuralDrafter[None]):
    """Trees of Medusa or Hydra heads. They grow from final target states and attend to no cached prefix."""

    def __init__(
        self,
        num_heads: int,
        hidden: int,
        dtype: torch.dtype,
        draft_ids: Tensor,
        sessions: KVLedger[None],
        tree: TreeConfig,
        config: DraftingConfig,
        medusa: MedusaConfig,
        capture: Capture | None,
    ) -> None:
        """capture: how to capture whole trees as CUDA graphs. Raises ConfigError for a tree that the heads cannot grow."""
        tree, static_tree = _tree_shape(num_heads, tree, medusa)
        if tree.top_k > len(draft_ids):
            raise ConfigError(f"a tree of width {tree.top_k} needs as many draft tokens; there are {len(draft_ids)}")
        super().__init__(config, tree, static_tree, draft_ids, sessions)
        self._hidden, self._dtype = hidden, dtype
        self._capture_trees(capture, hidden, dtype)

    @property
    def needs(self) -> DrafterNeeds:
        return DrafterNeeds(features=True, feature_size=self._hidden)

    @abstractmethod
    def _read_features(self, features: Tensor, contexts: Sequence[DraftContext]) -> Tensor:
        """The state [S, H] behind each session's last feature.

        features: of all sessions, one session after the other, at least one of each, [R, H].
        """

    def _num_slots(self, num_new: int) -> int:
        """Slots that `num_new` features take."""
        return 0

    def _claim(self, session: KVSession[None], context: DraftContext, busy: Collection[str]) -> bool:
        count = num_features(context)
        return self._sessions.claim(session, self._num_slots(count), 0, busy) and count > 0

    def _extend(self, contexts: Sequence[DraftContext]) -> Tensor:
        features = torch.cat([context.features for context in contexts if context.features is not None])
        return self._read_features(moved(features, self._draft_ids.device, self._dtype), contexts)

    def _prefix_slots(self, contexts: Sequence[DraftContext]) -> list[Slots]:
        return [no_slots()] * len(contexts)


def last_feature_rows(contexts: Sequence[DraftContext], device: torch.device) -> Tensor:
    """Row of each session's last feature among the features of all, int64 [S]."""
    return upload(np.cumsum([num_features(context) for context in contexts]) - 1, device)


def _tree_shape(num_heads: int, tree: TreeConfig, medusa: MedusaConfig) -> tuple[TreeConfig, StaticTree | None]:
    """The size of the trees, and their shape if it is static."""
    if tree.num_draft_tokens < 2 or tree.num_steps < 1:
        raise ConfigError(
            f"tree.num_draft_tokens {tree.num_draft_tokens} and tree.num_steps {tree.num_steps} leave no room for a guess; "
            "set 2 and 1 or more"
        )
    tree = replace(tree, num_steps=min(tree.num_steps, num_heads))
    if medusa.shape == "dynamic":
        return tree, None
    static_tree = StaticTree(medusa.tree_choices or likely_paths(tree))
    if static_tree.shape.num_steps > num_heads:
        raise ConfigError(
            f"methods.medusa.tree_choices reach {static_tree.shape.num_steps} levels deep, but there are {num_heads} heads"
        )
    return static_tree.shape, static_tree


def likely_paths(tree: TreeConfig) -> TreeChoices:
    """The likeliest `num_draft_tokens - 1` paths, best first, if a child's probability depends on its rank alone."""
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


class MedusaDrafter(MultiHeadDrafter):
    """Trees of Medusa heads. Sessions cache nothing: the state is the last feature itself."""

    def __init__(
        self,
        head: MedusaHead,
        tree: TreeConfig,
        config: DraftingConfig,
        medusa: MedusaConfig,
        capture: Capture | None = None,
    ) -> None:
        sessions: KVLedger[None] = KVLedger(0, sys.maxsize)
        dtype = head.outputs.dtype
        super().__init__(head.num_heads, head.hidden, dtype, head.draft_ids, sessions, tree, config, medusa, capture)
        self._head = head

    def _read_features(self, features: Tensor, contexts: Sequence[DraftContext]) -> Tensor:
        return features[last_feature_rows(contexts, features.device)]

    def _expand(self, roots: Roots, scorer: Scorer, shape: TreeConfig) -> Expansion:
        return MedusaExpansion(self._head, scorer, roots.states, shape.num_steps)


class MedusaExpansion:
    """Implements Expansion. Head i guesses the same tokens below every node of level i, so all heads run at once, and one
    row of scores serves all nodes of a level."""

    def __init__(self, head: MedusaHead, scorer: Scorer, states: Tensor, num_steps: int) -> None:
        self._logits = head.logits(states, num_steps)
        self._scorer = scorer

    def first(self) -> Tensor:
        return self._score(0)

    def next(self, level: int, parents: Tensor, tokens: Tensor) -> Tensor:
        return self._score(level)

    def _score(self, level: int) -> Tensor:
        return self._scorer.scores(self._logits[:, level : level + 1], level)
