"""The runner of deterministic mode: the same works in, the same logits out, whatever else shares the step."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from eyas.cache.kv import SlotPools
from eyas.engine.runner import ModelRunner, segment_of
from eyas.engine.sequence import Work
from eyas.errors import ConfigError
from eyas.models.heads.features import FeatureFuser
from eyas.models.inputs import Segment, pack
from eyas.models.numerics.blocks import blocks, exact_attend
from eyas.models.target import TargetModel
from eyas.models.tensors import upload


class FixedRunner(ModelRunner):
    """Every forward pass has the same number of rows, all of one sequence, and attention that does not feel the order of
    its keys: plain and speculative runs go through the same kernels. Beside it stands ModelRunner, the fast one."""

    def __init__(self, target: TargetModel, pools: SlotPools, fuser: FeatureFuser | None, rows: int) -> None:
        """rows: of every pass; no tree may have more.

        Raises ConfigError for a target that routes rows to experts: how many rows an expert gets cannot be fixed.
        """
        super().__init__(target, pools, fuser)
        if target.routes_rows:
            raise ConfigError(f"deterministic mode cannot hold for {target.config.model_type}, which routes rows to experts")
        self._rows, self._spare = rows, pools.scratch

    def forward(self, works: Seq[Work]) -> Tensor:
        parts = [self._block(block) for work in works for block in blocks(segment_of(work), self._rows, self._spare)]
        return torch.cat(parts)

    def _block(self, block: Segment) -> Tensor:
        """Logits of the block's wanted rows; all rows go through the output head, or none."""
        count = len(block.tokens) if len(block.wanted) else 0
        whole = replace(block, wanted=np.arange(count))
        logits = self._run(self.target, replace(pack([whole], self.target.device), attend=exact_attend))
        return logits[upload(block.wanted, logits.device)]
