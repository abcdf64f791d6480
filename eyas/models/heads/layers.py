"""What draft heads are made of: a decoder layer of the Llama kind, its norm and its rotary embedding.

Legend: R rows, H draft hidden, X width of the inputs (2 H in an EAGLE-3 head's first layer), d head width.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class LayerSizes(Protocol):
    """Sizes of a decoder layer that its weights do not show."""

    @property
    def num_heads(self) -> int: ...
    @property
    def num_kv_heads(self) -> int: ...
    @property
    def head_dim(self) -> int: ...
    @property
    def rms_norm_eps(self) -> float: ...


@dataclass(frozen=True)
class Projected:
    """What attention needs of a layer's rows: query [R, heads, d], key and value [R, kv heads, d], residual [R, H]."""

    query: Tensor
    key: Tensor
    value: Tensor
    residual: Tensor


class DraftLayer(nn.Module):
    """A decoder layer without its attention and its input norm: project, attend elsewhere, finish."""

    def __init__(self, sizes: LayerSizes, weights: Mapping[str, Tensor]) -> None:
        """weights: under their published names without the layer's prefix. q, k, v and gate, up are fused."""
        super().__init__()
        self.sizes = sizes
        biases = [weights[name] for p in "qkv" if (name := f"self_attn.{p}_proj.bias") in weights]
        qkv = torch.cat([weights[f"self_attn.{p}_proj.weight"] for p in "qkv"])
        self.qkv = linear(qkv, torch.cat(biases) if biases else None)
        self.out = linear(weights["self_attn.o_proj.weight"], weights.get("self_attn.o_proj.bias"))
        self.gate_up = linear(torch.cat([weights["mlp.gate_proj.weight"], weights["mlp.up_proj.weight"]]))
        self.down = linear(weights["mlp.down_proj.weight"])
        self.post_norm = frozen(weights["post_attention_layernorm.weight"])
        self.input_norm = frozen(weights["input_layernorm.weight"]) if "input_layernorm.weight" in weights else None
        self.hidden_norm = frozen(weights["hidden_norm.weight"]) if "hidden_norm.weight" in weights else None

    def project(self, inputs: Tensor, residual: Tensor, rotary: Tensor) -> Projected:
        """inputs [R, X] as attention sees them, residual [R, H], rotary [R, 2, d] of the rows' positions."""
        heads, kv_heads = self.sizes.num_heads, self.sizes.num_kv_heads
        qkv = self.qkv(inputs).view(-1, heads + 2 * kv_heads, self.sizes.head_dim)
        rotated = rotate(qkv[:, : heads + kv_heads], rotary)
        return Projected(rotated[:, :heads], rotated[:, heads:], qkv[:, heads + kv_heads :], residual)

    def finish(self, attended: Tensor, residual: Tensor) -> Tensor:
        """The rest of the layer: attention output [R, heads, d] and residual [R, H] to the next state [R, H]."""
        state = residual + self.out(attended.flatten(1))
        gate, up = self.gate_up(rms_norm(state, self.post_norm, self.sizes.rms_norm_eps)).chunk(2, -1)
        return state + self.down(F.silu(gate) * up)  # type: ignore[no-any-return]


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Root-mean-square norm over the last dimension, in float32."""
    return F.rms_norm(x.float(), x.shape[-1:], eps=eps).to(x.dtype) * weight


def rotary_table(config: Any, length: int) -> Tensor:
    """cos and sin of every position, [length, 2, d], for transformers' config of a Llama. Raises KeyError for its RoPE."""
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

    cos, sin = LlamaRotaryEmbedding(config)(torch.zeros(1), torch.arange(length)[None])
    return torch.stack([cos[0], sin[0]], dim=1)


def rotate(x: Tensor, rotary: Tensor) -> Tensor:
    """Rotary embedding of x [R, heads, d]; rotary [R, 2, d]."""
    cos, sin = rotary[:, :, None].unbind(1)
    left, right = x.chunk(2, -1)
    return x * cos + torch.cat([-right, left], -1) * sin


def linear(weight: Tensor, bias: Tensor | None = None) -> nn.Linear:
    """A linear layer that is not trained: weight [N, K], bias [N]."""
    layer = nn.Linear(weight.shape[1], weight.shape[0], bias=bias is not None, device="meta")
    layer.weight = frozen(weight)
    if bias is not None:
        layer.bias = frozen(bias)
    return layer


def frozen(tensor: Tensor) -> nn.Parameter:
    """A parameter that is not trained."""
    return nn.Parameter(tensor.contiguous(), requires_grad=False)


def under_prefix(tensors: Mapping[str, Tensor], prefix: str) -> dict[str, Tensor]:
    """The tensors whose names begin with the prefix, without it."""
    return {name.removeprefix(prefix): tensor for name, tensor in tensors.items() if name.startswith(prefix)}
