"""A small model in the middle of growing trees: logits of roots in, scored children of each level out.

Legend: S sessions, W rows of a level, L levels that are run, P longest prefix, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from eyas.cache.kv import SlotPools
from eyas.cache.slots import Slots
from eyas.config import TreeConfig
from eyas.drafters.ranking import Scorer
from eyas.drafters.small.rows import TreeRows
from eyas.models.inputs import Group, PackedInputs
from eyas.models.target import TargetModel


class SmallExpansion:
    """Implements Expansion: each level is one forward pass, whose rows see the prefix and their own ancestors."""

    def __init__(
        self,
        model: TargetModel,
        scorer: Scorer,
        pools: SlotPools,
        prefixes: Sequence[Slots],
        scratch: Sequence[Slots],
        logits: Tensor,
        shape: TreeConfig,
    ) -> None:
        """prefixes: slots of each session's tokens, the root's the last; scratch: at least W * (depth - 1) slots of each;
        logits: of the roots [S, V]."""
        self._model, self._scorer, self._pools, self._logits = model, scorer, pools, logits
        self._width, levels, device = shape.width, shape.depth - 1, logits.device
        self._scratch = np.stack([slots[: levels * shape.width] for slots in scratch])
        lengths = torch.tensor([len(slots) for slots in prefixes], device=device)
        self._length = int(max(len(slots) for slots in prefixes))
        padded = np.stack([np.pad(slots, (0, self._length - len(slots))) for slots in prefixes])
        self._keys = torch.from_numpy(np.concatenate([padded, self._scratch], 1)).to(device)
        self._seen = torch.arange(self._length, device=device) < lengths[:, None]
        self._seen = self._seen[:, None].expand(-1, shape.width, -1)
        self._root = lengths[:, None] - 1
        self._key_positions = torch.arange(self._length, device=device).expand(len(prefixes), -1)
        self._tokens: list[Tensor] = []
        self._parents: list[Tensor] = []

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

    def rows(self) -> list[TreeRows | None]:
        """What was run, for each session; None where nothing was. One copy to the host."""
        if not self._tokens:
            return [None] * len(self._scratch)
        host = torch.stack([torch.stack(self._tokens, 1), torch.stack(self._parents, 1)]).cpu().numpy()
        slots = self._scratch.reshape(len(self._scratch), -1, self._width)[:, : len(self._tokens)]
        return [TreeRows(host[0, s], host[1, s], slots[s]) for s in range(len(slots))]

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
