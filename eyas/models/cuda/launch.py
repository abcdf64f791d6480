"""Passes over tables, launched kernel by kernel: segments in, logits out. Knows no sequences."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor

from eyas.models.attention import KVPools
from eyas.models.cuda.tables import Tiling, lay_out, num_wanted, tight_shape, upload, view
from eyas.models.inputs import PackedInputs, Segment, Shape
from eyas.models.target import TargetModel, TargetOutput


class KernelRunner:
    """A target whose attention is the kernel. scratch: the slot that padding rows write to."""

    def __init__(self, target: TargetModel, tiling: Tiling, scratch: int) -> None:
        self.target = target
        self.tiling = tiling
        self._scratch = scratch

    def pack(self, segments: Sequence[Segment]) -> PackedInputs:
        """Tables without padding."""
        return self.pad(segments, tight_shape(segments, self.tiling))

    def pad(self, segments: Sequence[Segment], shape: Shape) -> PackedInputs:
        """Tables padded to a shape that has room for the segments."""
        return view(self.words(segments, shape), shape, num_wanted(segments))

    def words(self, segments: Sequence[Segment], shape: Shape) -> Tensor:
        """What `pad` looks at, on the device."""
        return upload(lay_out(segments, shape, self._scratch), self.target.device)

    def forward(self, packed: PackedInputs, pools: KVPools) -> TargetOutput:
        """As TargetModel.forward. Of `taps`, rows at the end may be padding."""
        with _on(self.target.device):
            return self.target.forward(packed, pools)


def _on(device: torch.device) -> AbstractContextManager[object]:
    """Triton launches on the thread's current device, wherever the tensors are."""
    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()
