"""Linear layers on the CPU over weights packed for oneDNN: a float32 model in, the same model out, faster over few rows.

torch multiplies float32 matrices by MKL, which takes two to three times as long for the 8 to 64 rows of a tree on processors
that are not Intel's (docs/decisions/0024-packed-weights.md). Legend: R rows, K inputs, N outputs.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

# Multiplications below which calling oneDNN costs more than it saves.
WORTH_PACKED = 100_000
# Rows that the packed layout is made for; it serves any number.
PACKED_ROWS = 8


class PackedLinear(nn.Linear):
    """A linear layer with its weight in oneDNN's layout. A weight so large that even one row goes there is kept only so."""

    packed: Tensor
    few: int  # numbers in an input for which packing is not worth its call

    def forward(self, rows: Tensor) -> Tensor:
        """rows [..., K] to [..., N]."""
        if rows.numel() < self.few:
            return F.linear(rows, self.weight, self.bias)
        return torch.ops.mkldnn._linear_pointwise(rows, self.packed, self.bias, "none", [], "")  # type: ignore[no-any-return]


def pack_weights(model: nn.Module) -> None:
    """Pack every plain linear layer of float32 on the CPU, where torch was built with oneDNN; others stay as they are."""
    if not torch.backends.mkldnn.is_available():  # type: ignore[no-untyped-call]
        return
    for module in model.modules():
        if type(module) is nn.Linear and _packs(module.weight):
            _pack(module)


def _packs(weight: Any) -> bool:
    return type(weight) is nn.Parameter and weight.device.type == "cpu" and weight.dtype == torch.float32


@torch.no_grad()
def _pack(module: Any) -> None:
    module.packed = torch.ops.mkldnn._reorder_linear_weight(module.weight.detach(), PACKED_ROWS)
    module.few = -(-WORTH_PACKED // module.out_features)
    module.__class__ = PackedLinear
    if module.few <= module.in_features:
        module.few, module.weight = 0, None
