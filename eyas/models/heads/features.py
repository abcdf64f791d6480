"""What runs beside the target for a drafter: tapped hidden states in, the features that drafters are fed out.

Legend: R rows, T tapped states, C target hidden, H width of the features.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

# As a tap: the state behind the target's final norm.
AFTER_NORM = -1


class FeatureFuser(nn.Module):
    """Tapped states [R, T * C] to features [R, H]. taps: what `load_target` is to tap."""

    def __init__(self, taps: tuple[int, ...], width: int) -> None:
        super().__init__()
        self.taps = taps
        self.width = width

    def forward(self, tapped: Tensor) -> Tensor:
        return tapped


class LinearFuser(FeatureFuser):
    """An EAGLE-3 head's fc, weight [H, T * C], bias [H] if it has one."""

    def __init__(self, weight: Tensor, taps: tuple[int, ...], bias: Tensor | None = None) -> None:
        super().__init__(taps, weight.shape[0])
        self.weight = nn.Parameter(weight, requires_grad=False)
        self.bias = None if bias is None else nn.Parameter(bias, requires_grad=False)

    def forward(self, tapped: Tensor) -> Tensor:
        return F.linear(tapped, self.weight, self.bias)


class NormedFuser(LinearFuser):
    """fc behind root-mean-square norms, weights [n, T * C / n]: one over all tapped states, or one for each."""

    def __init__(self, weight: Tensor, taps: tuple[int, ...], bias: Tensor | None, norms: Tensor, eps: float) -> None:
        super().__init__(weight, taps, bias)
        self.norms = nn.Parameter(norms, requires_grad=False)
        self._eps = eps

    def forward(self, tapped: Tensor) -> Tensor:
        parts = tapped.view(-1, *self.norms.shape).float()
        scale = torch.rsqrt(parts.square().mean(-1, keepdim=True) + self._eps)
        return super().forward(((parts * scale).to(tapped.dtype) * self.norms).flatten(1))


def final_state(width: int) -> FeatureFuser:
    """The target's last hidden states themselves, as its lm_head sees them, `width` wide: EAGLE-1 and -2, Medusa, Hydra."""
    return FeatureFuser((AFTER_NORM,), width)
