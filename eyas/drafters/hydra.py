"""Hydra (Ankner et al. 2024): Medusa-like heads that also see the embeddings of the path below the root.

Legend: S sessions, R new features of all sessions, W frontier rows, H hidden.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from eyas.cache.kv_cache import KVCache
from eyas.config import DraftingConfig, MedusaConfig, TreeConfig
from eyas.drafters.base import DraftContext
from eyas.drafters.cuda_graphs import Roots
from eyas.drafters.medusa import MultiHeadDrafter, last_feature_rows
from eyas.drafters.neural import last_rows, newest_rows
from eyas.drafters.scoring import Scorer
from eyas.drafters.sessions import KVLedger, count_slots, num_features
from eyas.drafters.tree_growth import Expansion
from eyas.models.attention import attend
from eyas.models.cuda.graphs import Capture
from eyas.models.heads.hydra import HydraHead, PrefixLayer
from eyas.models.inputs import pack
from eyas.tensors import upload


class HydraDrafter(MultiHeadDrafter):
    """Trees of Hydra heads.

    With a prefix layer (prefix-mlp), the state is that layer's output behind all features of a session, whose keys and
    values are cached; without one it is the last feature itself.
    """

    def __init__(
        self, head: HydraHead, tree: TreeConfig, config: DraftingConfig, medusa: MedusaConfig, capture: Capture | None = None
    ) -> None:
        sessions: KVLedger[None] = KVLedger(0, sys.maxsize)
        if head.prefix:
            sizes, weight = head.prefix.sizes, head.prefix.norm
            shapes = [(sizes.num_kv_heads, sizes.head_dim)]
            num_slots = count_slots(config, shapes, weight.dtype, weight.device)
            sessions = KVLedger(num_slots, sizes.max_model_len)
            self._kv = KVCache(num_slots, shapes, 0, weight.dtype, weight.device)
        dtype = head.embedding.dtype
        super().__init__(head.num_heads, head.hidden, dtype, head.draft_ids, sessions, tree, config, medusa, capture)
        self._head = head

    def _num_slots(self, num_new: int) -> int:
        return num_new if self._head.prefix else 0

    def _read_features(self, features: Tensor, contexts: Sequence[DraftContext]) -> Tensor:
        if self._head.prefix:
            return self._run_prefix(self._head.prefix, features, contexts)
        return features[last_feature_rows(contexts, features.device)]

    def _run_prefix(self, layer: PrefixLayer, features: Tensor, contexts: Sequence[DraftContext]) -> Tensor:
        """Cache keys and values of the new features; the layer's output [S, H] behind each session's last one."""
        (keys,), (values,) = self._kv.keys, self._kv.values
        slots = [self._sessions[context.session].slots for context in contexts]
        new, positions = newest_rows(slots, [num_features(context) for context in contexts])
        rows = layer.project(features, upload(positions, keys.device))
        index = upload(new, keys.device)
        keys.index_copy_(0, index, rows.key)
        values.index_copy_(0, index, rows.value)
        last = last_feature_rows(contexts, keys.device)
        packed = pack([last_rows(own, 1) for own in slots], keys.device)
        attended = attend(rows.query[last], keys, values, packed, layer.sizes.head_dim**-0.5)
        return layer.finish(attended, rows.residual[last])

    def _expand(self, roots: Roots, scorer: Scorer, shape: TreeConfig) -> Expansion:
        return HydraExpansion(self._head, scorer, roots.states, roots.tokens)


class HydraExpansion:
    """Implements Expansion. A row is the state and the embeddings of its path, [S, W, (2 + level) H] at a level."""

    def __init__(self, head: HydraHead, scorer: Scorer, states: Tensor, roots: Tensor) -> None:
        """roots: the target's token ids, int64 [S]."""
        self._head, self._scorer = head, scorer
        self._rows = torch.cat([states, F.embedding(roots, head.embedding)], -1)[:, None]

    def first(self) -> Tensor:
        return self._scorer.scores(self._head.logits(self._rows, 0), 0)

    def next(self, level: int, parents: Tensor, tokens: Tensor) -> Tensor:
        above = self._rows.gather(1, parents[:, :, None].expand(-1, -1, self._rows.shape[2]))
        embedded = F.embedding(self._head.draft_ids[tokens], self._head.embedding)
        self._rows = torch.cat([above, embedded], -1)
        return self._scorer.scores(self._head.logits(self._rows, level), level)
