"""What lives in the slots: keys, values and fused features. Tensors only; knows no sequences.

Legend: S slots, J key-value heads, D head width, H width of fused features.
"""

from __future__ import annotations

import torch
from torch import Tensor


class SlotPools:
    """Per layer one key and one value tensor [S, J, D], and one feature tensor [S, H]; H is 0 without a head.

    scratch: a slot behind those that are handed out; padding rows write there, and nobody reads it.
    """

    def __init__(
        self, num_slots: int, shapes: list[tuple[int, int]], feature_width: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        """shapes: (key-value heads, head width) of each layer."""
        self.scratch = num_slots
        self.keys = [torch.zeros(num_slots + 1, *shape, dtype=dtype, device=device) for shape in shapes]
        self.values = [torch.zeros(num_slots + 1, *shape, dtype=dtype, device=device) for shape in shapes]
        self.features: Tensor = torch.zeros(num_slots + 1, feature_width, dtype=dtype, device=device)
