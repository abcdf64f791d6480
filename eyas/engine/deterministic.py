"""Runs each sequence by itself, so that its numerics do not depend on its batch: the engine's deterministic mode."""

from __future__ import annotations

import logging
from collections.abc import Sequence as Seq
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from eyas.cache.kv_cache import KVCache
from eyas.device.placement import why_uncompiled
from eyas.device.transfer import upload
from eyas.engine.runner import ModelRunner
from eyas.errors import ConfigError
from eyas.models.backends.base import ForwardBackend
from eyas.models.heads.fusers import FeatureFuser
from eyas.models.inputs import Segment, pack
from eyas.models.layers.fused import is_batch_invariant
from eyas.models.layers.numerics import batch_invariant_attend, fixed_size_blocks
from eyas.models.target import TargetModel
from eyas.sampling.acceptance import StepLogits

log = logging.getLogger(__name__)


class BatchInvariantRunner(ModelRunner):
    """The runner of deterministic mode: a token's logits do not depend on what else shares the step.

    keeps_batches: whether the target's passes have that property by themselves, by kernels of the CPU or of CUDA. Then they
    hold all sequences. Otherwise every forward pass has the same number of rows, all of one sequence, and its attention does
    not depend on the order of keys in memory: plain and speculative decoding run the same kernels. ModelRunner is the fast
    one.

    Raises ConfigError for a target that routes rows to experts: the number of rows of an expert cannot be fixed. So for
    recurrent layers, whose rows are computed in pieces of other sizes.

    Args:
        rows: of every pass; no tree may have more.
        backend: one with parts at fixed positions, if not the target itself.
    """

    def __init__(
        self,
        target: TargetModel,
        kv_cache: KVCache,
        fuser: FeatureFuser | None,
        rows: int,
        backend: ForwardBackend | None = None,
    ) -> None:
        super().__init__(target, kv_cache, fuser, backend)
        if target.is_mixture_of_experts or target.state_shapes:
            reason = "routes rows to experts" if target.is_mixture_of_experts else "has recurrent layers"
            raise ConfigError(f"deterministic mode cannot hold for {target.config.model_type}, which {reason}")
        self._rows = rows
        is_kept_here = target.device.type == "cpu" and is_batch_invariant(target.model) and not kv_cache.is_narrow
        self.keeps_batches = self.backend is not target or is_kept_here
        if not self.keeps_batches and target.device.type == "cpu":
            message = "deterministic mode runs each sequence by itself, in passes of %d rows, which is slow: %s"
            log.warning(message, rows, self._why_alone())

    def _why_alone(self) -> str:
        """Return why the kernels of the CPU do not keep batches, and what to do."""
        if reason := why_uncompiled():
            return reason
        if self.kv_cache.is_narrow:
            return "keys and values have 8 bits; set engine.kv_cache_dtype to auto"
        return "the kernels do not know this model's layers, or this processor lacks AVX2 and FMA"

    def forward(self, segments: Seq[Segment]) -> StepLogits:
        if self.keeps_batches:
            return super().forward(segments)
        scratch = self.kv_cache.scratch
        blocks = [block for segment in segments for block in fixed_size_blocks(segment, self._rows, scratch)]
        return StepLogits(torch.cat([self._run_block(block) for block in blocks]))

    def _run_block(self, block: Segment) -> Tensor:
        """Return logits of the block's wanted rows; either all rows go through the output head or none."""
        count = len(block.tokens) if len(block.logits_indices) else 0
        whole = block._replace(logits_indices=np.arange(count))
        packed = replace(pack([whole], self.target.device), attend=batch_invariant_attend)
        out = self.target.forward(packed, self.kv_cache)
        self._store_features(packed.slots, out)
        return out.logits[upload(block.logits_indices, out.logits.device)]
