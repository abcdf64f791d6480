"""Turns the work of a step into one forward pass: slots and tokens in, logits out; features stay in their slots."""

from __future__ import annotations

from collections.abc import Sequence as Seq

import numpy as np
import torch
from torch import Tensor

from eyas.cache.kv import SlotPools
from eyas.cache.slots import Slots
from eyas.engine.sequence import Work
from eyas.models.cuda.passes import Passes
from eyas.models.heads.features import FeatureFuser
from eyas.models.inputs import PackedInputs, Segment
from eyas.models.parallel.ranks import Alone, Ranks
from eyas.models.target import TargetModel
from eyas.models.tensors import upload


class ModelRunner:
    """Owns the target, its slot pools and the part of the draft head that runs beside it.

    passes: how the target's forward passes run; plainly if left out. ranks: who else computes.
    """

    def __init__(
        self,
        target: TargetModel,
        pools: SlotPools,
        fuser: FeatureFuser | None,
        passes: Passes | None = None,
        ranks: Ranks | None = None,
    ) -> None:
        self.target = target
        self.passes: Passes = passes or target
        self._pools = pools
        self._fuser = fuser
        self._ranks = ranks or Alone()

    def forward(self, works: Seq[Work]) -> Tensor:
        """Logits float32 [R, V] of the rows that each work wants: every tree node, the last row of every finished prompt,
        and all rows of a prompt whose log-probabilities are asked for."""
        segments = [segment_of(work) for work in works]
        with self._ranks.forward(segments):
            return self.run(segments)

    def run(self, segments: Seq[Segment]) -> Tensor:
        """The forward pass itself, the same on every rank: logits float32 [R, V] of the wanted rows."""
        return self._run(self.passes, self.passes.pack(segments))

    def features(self, slots: Slots) -> Tensor:
        """Fused features [n, H] of slots; H is 0 without a head."""
        return self._pools.features[upload(slots, self._pools.features.device)]

    def _run(self, passes: Passes, packed: PackedInputs) -> Tensor:
        out = passes.forward(packed, self._pools)
        if self._fuser is not None and out.taps is not None:
            with torch.inference_mode():
                self._pools.features.index_copy_(0, packed.slots, self._fuser(out.taps))
        return out.logits


def segment_of(work: Work) -> Segment:
    """The rows of one sequence's work: prompt tokens, or the nodes of its tree."""
    sequence, tree = work.sequence, work.tree
    if tree is None:
        end = work.first + len(work.slots)
        return Segment(
            tokens=np.array(sequence.tokens[work.first : end], dtype=np.int64),
            positions=np.arange(work.first, end),
            slots=work.slots,
            prefix=sequence.slots,
            visible=None,
            wanted=np.arange(len(work.slots) - work.num_wanted, len(work.slots)),
        )
    return Segment(
        tokens=np.array(tree.tokens, dtype=np.int64),
        positions=work.first + np.array(tree.depths, dtype=np.int64),
        slots=work.slots,
        prefix=sequence.slots,
        visible=tree.ancestor_mask(),
        wanted=np.arange(len(tree)),
    )
