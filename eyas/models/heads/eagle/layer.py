"""One decoder layer of a draft head: normed inputs in, query, key and value out; attention output in, next state out.

Legend: R rows, H draft hidden, X width of the inputs (2 H in an EAGLE-3 head's first layer).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from eyas.models.heads.eagle.config import HeadConfig


@dataclass(frozen=True)
class Projected:
    """What a layer needs of its rows: query [R, heads, d], key and value [R, kv heads, d], residual [R, H]."""

    query: Tensor
    key: Tensor
    value: Tensor
    residual: Tensor


class DraftLayer(nn.Module):
    """Weights under their published names without the layer's prefix; q, k, v and gate, up are fused."""

    def __init__(self, config: HeadConfig, weights: Mapping[str, Tensor]) -> None:
        super().__init__()
        self.config = config
        biases = [weights[f"self_attn.{p}_proj.bias"] for p in "qkv"] if config.qkv_bias else []
        self.qkv = linear(
            torch.cat([weights[f"self_attn.{p}_proj.weight"] for p in "qkv"]), torch.cat(biases) if biases else None
        )
        self.out = linear(weights["self_attn.o_proj.weight"], weights["self_attn.o_proj.bias"] if config.out_bias else None)
        self.gate_up = linear(torch.cat([weights["mlp.gate_proj.weight"], weights["mlp.up_proj.weight"]]))
        self.down = linear(weights["mlp.down_proj.weight"])
        self.post_norm = frozen(weights["post_attention_layernorm.weight"])
        self.input_norm = frozen(weights["input_layernorm.weight"]) if "input_layernorm.weight" in weights else None
        self.hidden_norm = frozen(weights["hidden_norm.weight"]) if "hidden_norm.weight" in weights else None

    def project(self, inputs: Tensor, residual: Tensor, rotary: Tensor) -> Projected:
        """inputs [R, X] as attention sees them, residual [R, H], rotary [R, 2, d] of the rows' positions."""
        c = self.config
        qkv = self.qkv(inputs).view(-1, c.num_heads + 2 * c.num_kv_heads, c.head_dim)
        rotated = _rotate(qkv[:, : c.num_heads + c.num_kv_heads], rotary)
        return Projected(
            rotated[:, : c.num_heads], rotated[:, c.num_heads :], qkv[:, c.num_heads + c.num_kv_heads :], residual
        )

    def finish(self, attended: Tensor, residual: Tensor) -> Tensor:
        """The rest of the layer: attention output [R, heads, d] and residual [R, H] to the next state [R, H]."""
        state = residual + self.out(attended.flatten(1))
        gate, up = self.gate_up(rms(state, self.post_norm, self.config.rms_norm_eps)).chunk(2, -1)
        return state + self.down(F.silu(gate) * up)  # type: ignore[no-any-return]


def rms(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Root-mean-square norm over the last dimension, in float32."""
    return F.rms_norm(x.float(), x.shape[-1:], eps=eps).to(x.dtype) * weight


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


def _rotate(x: Tensor, rotary: Tensor) -> Tensor:
    """Rotary embedding of x [R, heads, d]."""
    cos, sin = rotary[:, :, None].unbind(1)
    left, right = x.chunk(2, -1)
    return x * cos + torch.cat([-right, left], -1) * sin
