"""P-EAGLE (2602.01469): an EAGLE-3 head that drafts all levels of a tree in one pass, as rows of a mask token.

Legend: S sessions, H hidden, D draft vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from eyas.arrays import Bools
from eyas.cache.kv_cache import KVCache
from eyas.config import DraftingConfig, TreeConfig
from eyas.drafters.eagle import EagleDrafter
from eyas.drafters.trees.growth import Expansion, IndependentExpansion, StaticTree, ddtree_shape
from eyas.drafters.trees.rows import GrowthShape, Roots, SlotLevels
from eyas.models.backends.cuda_graphs import Capture
from eyas.models.heads.eagle import EagleHead


class PEagleDrafter(EagleDrafter):
    """The best trees of levels that do not know each other's tokens (DDTree, 2604.12989).

    Raises ConfigError for a tree that the head cannot grow.

    Args:
        capture: how to capture whole trees as CUDA graphs.
    """

    def __init__(self, head: EagleHead, tree: TreeConfig, config: DraftingConfig, capture: Capture | None = None) -> None:
        self._parallel_head = head
        super().__init__(head, ddtree_shape(tree, head.config.draft_vocab_size), config, capture=capture)

    def _widths(self, tree: TreeConfig, static_tree: StaticTree | None) -> Sequence[int]:
        return [tree.num_steps - 1]

    def _visible(self, tree: TreeConfig) -> Bools | None:
        return np.tri(tree.num_steps - 1, dtype=np.bool_)

    @property
    def _num_passes(self) -> int:
        return min(self.tree.num_steps, 2)

    def _expand(self, roots: Roots, shape: GrowthShape) -> Expansion:
        levels = self.tree.num_steps if isinstance(roots.rows, SlotLevels) else shape.num_steps
        return IndependentExpansion(parallel_logits(self._parallel_head, self._kv, roots, levels))


def parallel_logits(head: EagleHead, kv: KVCache, roots: Roots, num_steps: int) -> Tensor:
    """Return logits [S, num_steps, D] of the last pair, and of rows behind it, which see those before.

    These rows have a learned feature and a mask token.
    """
    states, count = roots.states[:, None], num_steps - 1
    assert head.mask_feature is not None
    assert head.config.mask_token_id is not None
    if not count:
        return head.raw_logits(states)
    tokens = torch.full((len(states), count), head.config.mask_token_id, device=states.device)
    rows = roots.rows.all_at_once(tokens, is_causal=True)
    found = head.run_slots(head.mask_feature.expand(tokens.numel(), -1), rows.packed, kv)
    return head.raw_logits(torch.cat([states, found.view(*tokens.shape, -1)], 1))
