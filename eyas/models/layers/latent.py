"""Latent attention (DeepSeek-V2, section 2.1): a token's slot holds one latent vector and one rotated key for all heads.

A head's keys are W_K c and its values W_V c, of a latent c. So queries are multiplied by W_K and outputs by W_V, and
attention runs over the latents alone, as over one key-value head. Legend: R rows, H query heads, N width of a head's keys
without and P with rotation, V width of its values, C width of a latent, S slots, K keys.
"""

from __future__ import annotations

from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from eyas.errors import CheckpointError

# Segments of more rows expand keys and values of their heads, which takes fewer operations than wide products do.
MOST_ABSORBED_ROWS = 128
# Numbers of expanded keys at a time; their heads are attended one group after another.
EXPANDED_ELEMENTS = 1 << 25
PROJECTION = "kv_b_proj"


class LatentProjection(nn.Module):
    """The weight [H * (N + V), C] that makes keys and values of heads from latents. Takes the place of a linear layer."""

    def __init__(self, weight: nn.Parameter, key_width: int, value_width: int) -> None:
        super().__init__()
        self.weight = weight
        self.widths = key_width, value_width

    @property
    def parts(self) -> tuple[Tensor, Tensor]:
        """Return W_K [H, N, C] and W_V [H, V, C] of this rank's heads."""
        whole = self.weight.view(-1, sum(self.widths), self.weight.shape[1])
        return whole[:, : self.widths[0]], whole[:, self.widths[0] :]

    def absorb(self, query: Tensor) -> Tensor:
        """Return queries [R, H, N + P] for latents, [R, H, C + P]."""
        plain = query[..., : self.widths[0]].transpose(0, 1)
        return torch.cat([(plain @ self.parts[0]).transpose(0, 1), query[..., self.widths[0] :]], -1)

    def values_of(self, attended: Tensor) -> Tensor:
        """Return values of heads [R, H, V] for what they attended to, [R, H, C]."""
        return (attended.transpose(0, 1) @ self.parts[1].transpose(1, 2)).transpose(0, 1)

    def attend_expanded(self, query: Tensor, latents: Tensor, bias: Tensor | None, scaling: float) -> Tensor:
        """Return the attention of a layer's own query [R, H, N + P] over latents [K, C + P], as [R, H, V]: by expanded keys
        and values of some heads at a time.
        """
        value_width = self.widths[1]
        width = self.weight.shape[1]
        compressed, rotated = latents[:, :width], latents[:, width:]
        most = max(1, EXPANDED_ELEMENTS // (len(latents) * query.shape[2]))
        out = []
        for heads, keys, values in zip(*(torch.split(x, most) for x in (query.transpose(0, 1), *self.parts)), strict=True):
            own = compressed @ keys.transpose(1, 2)
            key = torch.cat([own, rotated.expand(len(own), -1, -1)], -1)
            value = compressed @ values.transpose(1, 2)
            # as wide as keys: operations of torch that keep no scores want equal widths
            value = F.pad(value, (0, max(0, query.shape[2] - value_width)))
            out.append(F.scaled_dot_product_attention(heads[None], key[None], value[None], bias, scale=scaling)[0])
        return torch.cat(out)[..., :value_width].transpose(0, 1)


def use_latents(model: nn.Module) -> Any:
    """Let every latent attention of a model give its latents to the attention function, as one key-value head. Returns the
    model.

    transformers expands latents in a method of the module, which is replaced. Raises CheckpointError for a projection whose
    weight cannot be read.
    """
    for module in model.modules():
        projection: Any = getattr(module, PROJECTION, None)
        if projection is None or isinstance(projection, LatentProjection):
            continue
        if callable(getattr(module, "expand_kv", None)):
            if not isinstance(projection, nn.Linear):
                raise CheckpointError(
                    f"{PROJECTION} of latent attention is a {type(projection).__name__}, whose weight Eyas cannot read; "
                    "take a checkpoint whose attention is not quantised, or quantised by fp8 or torchao"
                )
            own: Any = module
            # the norm is another layer's where that layer's latents are read
            plain = (weight for weight in own.parameters() if weight.is_floating_point() and weight.itemsize > 1)
            like = next(plain) if own.kv_a_layernorm is None else own.kv_a_layernorm.weight
            weight = _plain_weight(projection, like)
            setattr(module, PROJECTION, LatentProjection(weight, own.qk_nope_head_dim, own.v_head_dim))
            own.expand_kv = _joined
    return model


@torch.no_grad()
def _plain_weight(projection: nn.Linear, like: Tensor) -> nn.Parameter:
    """Return the weight of a projection; of a quantised one, what it makes of an identity, in the dtype of `like`."""
    if type(projection) is nn.Linear and type(projection.weight.data) is Tensor:
        return cast(nn.Parameter, projection.weight)
    rows = torch.eye(projection.in_features, dtype=like.dtype, device=like.device)
    return nn.Parameter(projection(rows).T.contiguous(), requires_grad=False)


def latent_projection(module: nn.Module) -> LatentProjection | None:
    """Return the projection of an attention module whose slots hold latents; None for others."""
    found = getattr(module, PROJECTION, None)
    return found if isinstance(found, LatentProjection) else None


def _joined(latent: Tensor, rotated: Tensor) -> tuple[Tensor, Tensor]:
    """Return a latent [1, 1, R, C] with its rotated key [1, 1, R, P] side by side, and as values the latent."""
    return torch.cat([latent, rotated], -1), latent
