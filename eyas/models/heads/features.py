"""What runs beside the target for a drafter: tapped hidden states in, the features that drafters are fed out.

Legend: R rows, T tapped states, C target hidden, H width of the features.

The vocabulary of heads, and whether it is the target's: a checkpoint's tensors in, target ids of draft ids out.

Legend: D draft vocabulary, V target vocabulary, H hidden.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from eyas.errors import CheckpointError

# As a tap: the state behind the target's final norm.
FINAL_NORM_OUTPUT = -1


class FeatureFuser(nn.Module):
    """Tapped states [R, T * C] to features [R, H]. aux_hidden_state_layers: what `load_target` is to tap."""

    def __init__(self, aux_hidden_state_layers: tuple[int, ...], width: int) -> None:
        super().__init__()
        self.aux_hidden_state_layers = aux_hidden_state_layers
        self.width = width

    def forward(self, tapped: Tensor) -> Tensor:
        return tapped


class LinearFuser(FeatureFuser):
    """An EAGLE-3 head's fc, weight [H, T * C], bias [H] if it has one."""

    def __init__(self, weight: Tensor, aux_hidden_state_layers: tuple[int, ...], bias: Tensor | None = None) -> None:
        super().__init__(aux_hidden_state_layers, weight.shape[0])
        self.weight = nn.Parameter(weight, requires_grad=False)
        self.bias = None if bias is None else nn.Parameter(bias, requires_grad=False)

    def forward(self, tapped: Tensor) -> Tensor:
        return F.linear(tapped, self.weight, self.bias)


class NormedFuser(LinearFuser):
    """fc behind root-mean-square norms, weights [n, T * C / n]: one over all tapped states, or one for each."""

    def __init__(
        self, weight: Tensor, aux_hidden_state_layers: tuple[int, ...], bias: Tensor | None, norms: Tensor, eps: float
    ) -> None:
        super().__init__(weight, aux_hidden_state_layers, bias)
        self.norms = nn.Parameter(norms, requires_grad=False)
        self._eps = eps

    def forward(self, tapped: Tensor) -> Tensor:
        parts = tapped.view(-1, *self.norms.shape).float()
        scale = torch.rsqrt(parts.square().mean(-1, keepdim=True) + self._eps)
        return super().forward(((parts * scale).to(tapped.dtype) * self.norms).flatten(1))


def final_state_fuser(width: int) -> FeatureFuser:
    """The target's last hidden states themselves, as its lm_head sees them, `width` wide: EAGLE-1 and -2, Medusa, Hydra."""
    return FeatureFuser((FINAL_NORM_OUTPUT,), width)


def check_target(tensors: Mapping[str, Tensor], hidden: int, vocab_size: int, source: Path) -> None:
    """Raises CheckpointError for heads of another target, as far as their output layers tell."""
    for output in (tensor for name, tensor in tensors.items() if "lm_head" in name and tensor.dim() == 2):
        rows = vocab_size if "token_map" in tensors else len(output)
        for what, mine, its in (("hidden size", output.shape[1], hidden), ("vocabulary size", rows, vocab_size)):
            if mine != its:
                raise CheckpointError(f"{source} was made for a target of {what} {mine}, but this target has {its}")


def draft_ids(tensors: dict[str, Tensor], vocab_size: int, source: Path) -> Tensor:
    """Take `token_map` out of `tensors` and cut output layers of the whole vocabulary to it; int64 [D].

    Without a map draft ids are target ids. Raises CheckpointError for a map that is none.
    """
    mapped = tensors.pop("token_map", None)
    if mapped is None:
        return torch.arange(vocab_size)
    ids = mapped.long()
    if ids.dim() != 1 or int(ids.min()) < 0 or int(ids.max()) >= vocab_size or len(set(ids.tolist())) != len(ids):
        raise CheckpointError(f"{source}: token_map does not map draft ids to distinct target ids below {vocab_size}")
    for name, tensor in tensors.items():
        if "lm_head" in name and len(tensor) == vocab_size:
            tensors[name] = tensor[ids]
    return ids
