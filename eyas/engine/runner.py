"""Turns the work of a step into one forward pass: slots and tokens in, logits out; features stay in their slots.

The runner of deterministic mode: the same works in, the same logits out, whatever else shares the step.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from eyas.cache.kv_cache import KVCache
from eyas.cache.prefix_cache import Slots
from eyas.engine.sequence import ScheduledSequence
from eyas.errors import ConfigError
from eyas.models.cuda.backend import ForwardBackend
from eyas.models.heads.features import FeatureFuser
from eyas.models.inputs import PackedInputs, Segment, pack
from eyas.models.numerics import batch_invariant_attend, fixed_size_blocks
from eyas.models.target import TargetModel
from eyas.models.workers import SingleWorker, TargetWorkers
from eyas.tensors import upload


class ModelRunner:
    """Owns the target, its slot pools and the part of the draft head that runs beside it.

    passes: how the target's forward passes run; plainly if left out. ranks: who else computes.
    """

    def __init__(
        self,
        target: TargetModel,
        pools: KVCache,
        fuser: FeatureFuser | None,
        passes: ForwardBackend | None = None,
        ranks: TargetWorkers | None = None,
    ) -> None:
        self.target = target
        self.passes: ForwardBackend = passes or target
        self._pools = pools
        self._fuser = fuser
        self._ranks = ranks or SingleWorker()

    def forward(self, works: Seq[ScheduledSequence]) -> Tensor:
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

    def _run(self, passes: ForwardBackend, packed: PackedInputs) -> Tensor:
        out = passes.forward(packed, self._pools)
        if self._fuser is not None and out.aux_hidden_states is not None:
            with torch.inference_mode():
                self._pools.features.index_copy_(0, packed.slots, self._fuser(out.aux_hidden_states))
        return out.logits


def segment_of(work: ScheduledSequence) -> Segment:
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
            logits_indices=np.arange(len(work.slots) - work.num_wanted, len(work.slots)),
        )
    return Segment(
        tokens=np.array(tree.tokens, dtype=np.int64),
        positions=work.first + np.array(tree.depths, dtype=np.int64),
        slots=work.slots,
        prefix=sequence.slots,
        visible=tree.ancestor_mask(),
        logits_indices=np.arange(len(tree)),
    )


class BatchInvariantRunner(ModelRunner):
    """Every forward pass has the same number of rows, all of one sequence, and attention that does not feel the order of
    its keys: plain and speculative runs go through the same kernels. Beside it stands ModelRunner, the fast one."""

    def __init__(self, target: TargetModel, pools: KVCache, fuser: FeatureFuser | None, rows: int) -> None:
        """rows: of every pass; no tree may have more.

        Raises ConfigError for a target that routes rows to experts: how many rows an expert gets cannot be fixed.
        """
        super().__init__(target, pools, fuser)
        if target.is_mixture_of_experts:
            raise ConfigError(f"deterministic mode cannot hold for {target.config.model_type}, which routes rows to experts")
        self._rows, self._spare = rows, pools.scratch

    def forward(self, works: Seq[ScheduledSequence]) -> Tensor:
        parts = [
            self._block(block) for work in works for block in fixed_size_blocks(segment_of(work), self._rows, self._spare)
        ]
        return torch.cat(parts)

    def _block(self, block: Segment) -> Tensor:
        """Logits of the block's wanted rows; all rows go through the output head, or none."""
        count = len(block.tokens) if len(block.logits_indices) else 0
        whole = replace(block, logits_indices=np.arange(count))
        logits = self._run(self.target, replace(pack([whole], self.target.device), attend=batch_invariant_attend))
        return logits[upload(block.logits_indices, logits.device)]
