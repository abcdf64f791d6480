"""What runs beside the target for a drafter: tapped hidden states in, the features that drafters are fed out.

Legend: R rows, T tapped states, C target hidden, H width of the features.
"""

from __future__ import annotations

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
    """An EAGLE-3 head's fc, weight [H, T * C]."""

    def __init__(self, weight: Tensor, taps: tuple[int, ...]) -> None:
        super().__init__(taps, weight.shape[0])
        self.weight = nn.Parameter(weight, requires_grad=False)

    def forward(self, tapped: Tensor) -> Tensor:
        return F.linear(tapped, self.weight)


def final_state(width: int) -> FeatureFuser:
    """The target's last hidden states themselves, as its lm_head sees them, `width` wide: EAGLE-1 and -2, Medusa, Hydra."""
    return FeatureFuser((AFTER_NORM,), width)
