"""A small model in the middle of growing trees: logits of roots in, scored children of each level out.

Legend: S sessions, W rows of a level, L levels that are run, P longest prefix, V vocabulary.
"""

from __future__ import annotations

import torch
from torch import Tensor

from eyas.cache.kv import SlotPools
from eyas.config import TreeConfig
from eyas.drafters.captured.prefix import Prefix
from eyas.drafters.ranking import Scorer
from eyas.models.inputs import Group, PackedInputs
from eyas.models.target import TargetModel


class SmallExpansion:
    """Implements Expansion: each level is one forward pass, whose rows see the prefix and their own ancestors."""

    def __init__(
        self,
        model: TargetModel,
        scorer: Scorer,
        pools: SlotPools,
        prefix: Prefix,
        scratch: Tensor,
        logits: Tensor,
        shape: TreeConfig,
    ) -> None:
        """prefix: slots of each session's tokens, the root's the last. scratch: W * (depth - 1) slots of each or more, int64
        [S, ...]. logits: of the roots [S, V]."""
        self._model, self._scorer, self._pools, self._logits = model, scorer, pools, logits
        index, lengths = prefix.index, prefix.lengths
        self._length = index.shape[1]
        self._keys = torch.cat([index, scratch], 1)
        places = torch.arange(self._length, device=logits.device)
        self._seen = (places < lengths[:, None])[:, None].expand(-1, shape.width, -1)
        self._root = lengths[:, None] - 1
        self._key_positions = places.expand(len(index), -1)
        self._tokens = [index[:, :0]]
        self._parents = [index[:, :0]]

    def first(self) -> Tensor:
        return self._scorer.scores(self._logits[:, None], 0)

    def next(self, level: int, parents: Tensor, tokens: Tensor) -> Tensor:
        sessions, width = tokens.shape
        self._tokens.append(tokens)
        self._parents.append(parents)
        # a session near the end of its context is expanded with the others; its budget cuts what lies beyond
        positions = (self._root + level).clamp(max=self._model.context_length - 1).expand_as(tokens)
        own = torch.eye(width, dtype=torch.bool, device=tokens.device).expand(sessions, -1, -1)
        inherited = self._seen.gather(1, parents[:, :, None].expand(-1, -1, self._seen.shape[2]))
        self._seen = torch.cat([inherited, own], dim=2)
        self._key_positions = torch.cat([self._key_positions, positions], dim=1)
        end = self._length + width * level
        packed = self._pack(tokens, positions, self._keys[:, :end], self._keys[:, end - width : end])
        logits = self._model.forward(packed, self._pools).logits
        return self._scorer.scores(logits.view(sessions, width, -1), level)

    def ran(self) -> Tensor:
        """Tokens, and rows of their parents in the level above, of all rows that were run, int64 [S, 2, L * W]."""
        return torch.stack([torch.cat(self._tokens, 1), torch.cat(self._parents, 1)], 1)

    def _pack(self, tokens: Tensor, positions: Tensor, keys: Tensor, slots: Tensor) -> PackedInputs:
        rows = torch.arange(tokens.numel(), device=tokens.device)
        group = LevelGroup(rows.view_as(tokens), keys, self._seen, positions, self._key_positions)
        return PackedInputs(tokens.flatten(), positions.flatten(), slots.flatten(), rows, (group,))


class LevelGroup(Group):
    """One level of all sessions' trees. What Group lays out from segments is on the device already."""

    def __init__(self, rows: Tensor, keys: Tensor, mask: Tensor, query_positions: Tensor, key_positions: Tensor) -> None:
        self.shape = (rows.shape[0], rows.shape[1])
        self.run = None
        self.whole = True
        self.open = False
        self.cells = None
        self.rows = rows
        self.keys = keys
        self.mask = mask
        self.query_positions = query_positions
        self.key_positions = key_positions
