"""Turns the work of a step into one forward pass: slots and tokens in, logits out; features stay in their slots."""

from __future__ import annotations

from collections.abc import Sequence as Seq

import numpy as np
import torch
from torch import Tensor

from eyas.cache.kv import SlotPools
from eyas.cache.slots import Slots
from eyas.engine.sequence import Work
from eyas.models.heads.eagle import FeatureFuser
from eyas.models.inputs import Segment, pack
from eyas.models.parallel.ranks import Alone, Ranks
from eyas.models.target import TargetModel


class ModelRunner:
    """Owns the target, its slot pools and the part of the draft head that runs beside it. ranks: who else computes."""

    def __init__(
        self, target: TargetModel, pools: SlotPools, fuser: FeatureFuser | None, ranks: Ranks | None = None
    ) -> None:
        self.target = target
        self._pools = pools
        self._fuser = fuser
        self._ranks = ranks or Alone()

    def forward(self, works: Seq[Work]) -> Tensor:
        """Logits float32 of every tree node and of the last row of every finished prompt, in order; [N, V]."""
        segments = [_segment(work) for work in works]
        with self._ranks.forward(segments):
            return self.run(segments)

    def run(self, segments: Seq[Segment]) -> Tensor:
        """The forward pass itself, the same on every rank: logits float32 [N, V] of the wanted rows."""
        packed = pack(segments, self.target.device)
        out = self.target.forward(packed, self._pools)
        if self._fuser is not None and out.taps is not None:
            with torch.inference_mode():
                self._pools.features.index_copy_(0, packed.slots, self._fuser(out.taps))
        return out.logits

    def features(self, slots: Slots) -> Tensor:
        """Fused features [n, H] of slots; H is 0 without a head."""
        return self._pools.features[torch.from_numpy(slots).to(self._pools.features.device)]


def _segment(work: Work) -> Segment:
    sequence, tree = work.sequence, work.tree
    if tree is None:
        end = work.first + len(work.slots)
        return Segment(
            tokens=np.array(sequence.tokens[work.first : end], dtype=np.int64),
            positions=np.arange(work.first, end),
            slots=work.slots,
            prefix=sequence.slots,
            visible=None,
            wanted=np.array([len(work.slots) - 1] if work.emits else [], dtype=np.int64),
        )
    return Segment(
        tokens=np.array(tree.tokens, dtype=np.int64),
        positions=work.first + np.array(tree.depths, dtype=np.int64),
        slots=work.slots,
        prefix=sequence.slots,
        visible=tree.ancestor_mask(),
        wanted=np.arange(len(tree)),
    )
