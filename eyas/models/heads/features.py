"""The part of a draft head that runs beside the target, and the draft vocabulary of Medusa and Hydra heads.

Legend: R rows, T hidden states that are collected, C target hidden, H width of the features, D draft vocabulary.
"""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from eyas.errors import CheckpointError
from eyas.models.heads.layers import frozen

# As an aux hidden state layer: the state behind the target's final norm.
FINAL_NORM_OUTPUT = -1


class FeatureFuser(nn.Module):
    """Hidden states of the target [R, T * C] to features [R, H]; this class passes them on unchanged.

    aux_hidden_state_layers: what `load_target` is to collect.
    """

    def __init__(self, aux_hidden_state_layers: tuple[int, ...], width: int) -> None:
        super().__init__()
        self.aux_hidden_state_layers = aux_hidden_state_layers
        self.width = width

    def forward(self, states: Tensor) -> Tensor:
        return states


class LinearFuser(FeatureFuser):
    """An EAGLE-3 head's fc, weight [H, T * C], bias [H] if it has one."""

    def __init__(self, weight: Tensor, aux_hidden_state_layers: tuple[int, ...], bias: Tensor | None = None) -> None:
        super().__init__(aux_hidden_state_layers, weight.shape[0])
        self.weight = frozen(weight)
        self.bias = None if bias is None else frozen(bias)

    def forward(self, states: Tensor) -> Tensor:
        return F.linear(states, self.weight, self.bias)


class NormedFuser(LinearFuser):
    """fc behind root-mean-square norms, weights [n, T * C / n]: one over all states side by side, or one for each."""

    def __init__(
        self, weight: Tensor, aux_hidden_state_layers: tuple[int, ...], bias: Tensor | None, norms: Tensor, eps: float
    ) -> None:
        super().__init__(weight, aux_hidden_state_layers, bias)
        self.norms = frozen(norms)
        self._eps = eps

    def forward(self, states: Tensor) -> Tensor:
        parts = states.view(-1, *self.norms.shape).float()
        scale = torch.rsqrt(parts.square().mean(-1, keepdim=True) + self._eps)
        return super().forward(((parts * scale).to(states.dtype) * self.norms).flatten(1))


def final_state_fuser(width: int) -> FeatureFuser:
    """The target's last hidden states, `width` wide, as its lm_head sees them: EAGLE-1 and -2, Medusa, Hydra."""
    return FeatureFuser((FINAL_NORM_OUTPUT,), width)


def take_draft_ids(tensors: dict[str, Tensor], hidden: int, vocab_size: int, source: Path) -> Tensor:
    """Take `token_map` out of `tensors` and cut output layers of the whole vocabulary to it; target ids, int64 [D].

    hidden, vocab_size: of the target. Without a map draft ids are target ids. Raises CheckpointError for output layers of
    another target, and for a map that does not hold distinct target ids.
    """
    for output in (tensor for name, tensor in tensors.items() if "lm_head" in name and tensor.dim() == 2):
        rows = vocab_size if "token_map" in tensors else len(output)
        for what, own, needed in (("hidden size", output.shape[1], hidden), ("vocabulary size", rows, vocab_size)):
            if own != needed:
                raise CheckpointError(f"{source} was made for a target of {what} {own}, but this target has {needed}")
    token_map = tensors.pop("token_map", None)
    if token_map is None:
        return torch.arange(vocab_size)
    ids = token_map.long()
    if ids.dim() != 1 or int(ids.min()) < 0 or int(ids.max()) >= vocab_size or len(set(ids.tolist())) != len(ids):
        raise CheckpointError(f"{source}: token_map does not map draft ids to distinct target ids below {vocab_size}")
    for name, tensor in tensors.items():
        if "lm_head" in name and len(tensor) == vocab_size:
            tensors[name] = tensor[ids]
    return ids
