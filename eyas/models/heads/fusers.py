"""Fuse target features for a draft head."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from eyas.models.backends.packed_weights import PackedProduct
from eyas.models.heads.layers import frozen, rms_norm
from eyas.models.hidden_states import FINAL_NORM_OUTPUT


class FeatureFuser(nn.Module):
    """Hidden states of the target [R, T * C] to features [R, H].

    This class passes them on unchanged. By default they are the target's final states, as its lm_head sees them: EAGLE-1
    and -2, Medusa, Hydra.

    Args:
        width: H.
        aux_hidden_state_layers: what `load_target` is to collect.
    """

    def __init__(self, width: int, aux_hidden_state_layers: tuple[int, ...] = (FINAL_NORM_OUTPUT,)) -> None:
        super().__init__()
        self.width = width
        self.aux_hidden_state_layers = aux_hidden_state_layers

    @property
    def state_width(self) -> int:
        """Numbers of a row of states, T * C."""
        return self.width

    def forward(self, states: Tensor) -> Tensor:
        return states


class LinearFuser(FeatureFuser):
    """A head's fc, weight [H, T * C], bias [H] if it has one.

    Args:
        norms: weights [n, T * C / n] of root-mean-square norms before fc, one over all states side by side, or one for
            each.
        output_norm: weight [H] of a norm behind fc, as block heads have it.
    """

    def __init__(
        self,
        weight: Tensor,
        aux_hidden_state_layers: tuple[int, ...],
        bias: Tensor | None = None,
        norms: Tensor | None = None,
        eps: float = 0.0,
        output_norm: Tensor | None = None,
    ) -> None:
        super().__init__(weight.shape[0], aux_hidden_state_layers)
        self.weight = frozen(weight)
        self.bias = None if bias is None else frozen(bias)
        self.norms = None if norms is None else frozen(norms)
        self.output_norm = None if output_norm is None else frozen(output_norm)
        self._eps = eps
        self._product: Callable[[Tensor], Tensor] | None = None

    @property
    def state_width(self) -> int:
        """Numbers of a row of states, T * C."""
        return self.weight.shape[1]

    def serve(self) -> None:
        """Lay out the weight for fast products on the CPU in float32. It cannot be trained any more."""
        if self.weight.device.type == "cpu" and self.weight.dtype == torch.float32:
            self._product = PackedProduct(self.weight.detach(), self.bias)

    def normed(self, states: Tensor) -> Tensor:
        """Return states [..., T * C] as fc reads them."""
        if self.norms is None:
            return states
        return rms_norm(states.view(-1, *self.norms.shape), self.norms, self._eps).view(states.shape)

    def forward(self, states: Tensor) -> Tensor:
        states = self.normed(states)
        is_packed = self.weight.dtype == torch.float32 and states.device.type == "cpu"
        fused = self._product(states) if self._product and is_packed else F.linear(states, self.weight, self.bias)
        return fused if self.output_norm is None else rms_norm(fused, self.output_norm, self._eps)
