"""Chooses what computes between the products of layers: Triton's kernels, or plain operations with the same signatures."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from eyas.device.placement import runs_triton
from eyas.kernels.plain import layers as plain


def layer_kernels(x: Tensor) -> Any:
    """Return the kernels for rows of a draft head: plain ones on the CPU, without Triton, and in training, which needs
    gradients.
    """
    if not torch.is_inference_mode_enabled() or not runs_triton(x.device):
        return plain
    from eyas.kernels.cuda import layers as compiled

    return compiled


def fused_kernels(rows: Tensor, has_attention: bool) -> Any:
    """Return the kernels for rows of a fused layer: Triton's on a GPU, where attention has its own, too; else plain ones."""
    if not has_attention or rows.device.type == "cpu":
        return plain
    from eyas.kernels.cuda import layers as compiled

    return compiled
