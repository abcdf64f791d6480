"""Medusa and Hydra heads in the middle of growing trees: states in, scored children of each level out.

Legend: S sessions, W frontier rows, R rows of the level above, H hidden, D draft vocabulary.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from eyas.drafters.ranking import Scorer
from eyas.models.heads.offsets.hydra import HydraHead
from eyas.models.heads.offsets.medusa import MedusaHead


class MedusaExpansion:
    """Implements Expansion. What head i guesses is the same below every node: all is computed at once, and one row scores
    all nodes of a level."""

    def __init__(self, head: MedusaHead, scorer: Scorer, states: Tensor, depth: int) -> None:
        self._logits = head.logits(states, depth)
        self._scorer = scorer

    def first(self) -> Tensor:
        return self._score(0)

    def next(self, level: int, parents: Tensor, tokens: Tensor) -> Tensor:
        return self._score(level)

    def _score(self, level: int) -> Tensor:
        return self._scorer.scores(self._logits[:, level : level + 1], level)


class HydraExpansion:
    """Implements Expansion. A row is the state and the embeddings of the path below it, one more at each level."""

    def __init__(self, head: HydraHead, scorer: Scorer, states: Tensor, roots: Tensor) -> None:
        """roots: the target's ids, int64 [S]."""
        self._head, self._scorer = head, scorer
        self._rows = torch.cat([states, F.embedding(roots, head.embedding)], -1)[:, None]

    def first(self) -> Tensor:
        return self._scorer.scores(self._head.logits(self._rows, 0), 0)

    def next(self, level: int, parents: Tensor, tokens: Tensor) -> Tensor:
        above = self._rows.gather(1, parents[:, :, None].expand(-1, -1, self._rows.shape[2]))
        embedded = F.embedding(self._head.draft_ids[tokens], self._head.embedding)
        self._rows = torch.cat([above, embedded], -1)
        return self._scorer.scores(self._head.logits(self._rows, level), level)
