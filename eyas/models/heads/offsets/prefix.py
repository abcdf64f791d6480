"""The prefix layer of Hydra's prefix-mlp: one Llama layer over the target's final states, with the target's own sizes.

Legend: R rows, H hidden, d head width.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from eyas.models.checkpoint import read_target_config
from eyas.models.heads.config import whole_number
from eyas.models.heads.eagle import Projected
from eyas.models.support import read_model_config

# As the authors spell it.
PREFIX = "prefix_embeding_layer."


@dataclass(frozen=True)
class PrefixSizes:
    """Those of the target, whose config the layer was made with."""

    hidden: int
    intermediate: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rms_norm_eps: float
    context_length: int

    @classmethod
    def of(cls, target: Path) -> PrefixSizes:
        """Raises CheckpointError for a target whose config lacks one of them."""
        config, source = read_target_config(target), target / "config.json"
        hidden, heads = (whole_number(config, key, source) for key in ("hidden_size", "num_attention_heads"))
        return cls(
            hidden=hidden,
            intermediate=whole_number(config, "intermediate_size", source),
            num_heads=heads,
            num_kv_heads=whole_number(config, "num_key_value_heads", source, heads),
            head_dim=whole_number(config, "head_dim", source, hidden // heads),
            rms_norm_eps=float(config.get("rms_norm_eps", 1e-6)),
            context_length=whole_number(config, "max_position_embeddings", source),
        )


class PrefixLayer(nn.Module):
    """A decoder layer with its norm before and the model's norm behind it. Row i stands at position i."""

    def __init__(self, sizes: PrefixSizes, tensors: Mapping[str, Tensor], target: Path) -> None:
        super().__init__()
        self.sizes = sizes
        layer = {name.removeprefix("layers.0."): tensor for name, tensor in tensors.items()}
        self.qkv = _frozen(torch.cat([layer[f"self_attn.{p}_proj.weight"] for p in "qkv"]))
        self.out = _frozen(layer["self_attn.o_proj.weight"])
        self.gate_up = _frozen(torch.cat([layer["mlp.gate_proj.weight"], layer["mlp.up_proj.weight"]]))
        self.down = _frozen(layer["mlp.down_proj.weight"])
        self.input_norm = _frozen(layer["input_layernorm.weight"])
        self.post_norm = _frozen(layer["post_attention_layernorm.weight"])
        self.norm = _frozen(tensors["norm.weight"])
        self.register_buffer("rotary", _rotary_table(target, sizes.context_length).to(self.out.dtype))
        self.rotary: Tensor

    def project(self, states: Tensor, positions: Tensor) -> Projected:
        """Norm, project and rotate; states [R, H], positions [R]."""
        s = self.sizes
        qkv = F.linear(self._rms(states, self.input_norm), self.qkv).view(-1, s.num_heads + 2 * s.num_kv_heads, s.head_dim)
        rotated = self._rotate(qkv[:, : s.num_heads + s.num_kv_heads], positions)
        return Projected(
            rotated[:, : s.num_heads], rotated[:, s.num_heads :], qkv[:, s.num_heads + s.num_kv_heads :], states
        )

    def finish(self, attended: Tensor, residual: Tensor) -> Tensor:
        """The rest: attention output [R, heads, d] and residual [R, H] to what the heads are given, [R, H]."""
        state = residual + F.linear(attended.flatten(1), self.out)
        gate, up = F.linear(self._rms(state, self.post_norm), self.gate_up).chunk(2, -1)
        return self._rms(state + F.linear(F.silu(gate) * up, self.down), self.norm)

    def _rms(self, x: Tensor, weight: Tensor) -> Tensor:
        return F.rms_norm(x.float(), x.shape[-1:], eps=self.sizes.rms_norm_eps).to(x.dtype) * weight

    def _rotate(self, x: Tensor, positions: Tensor) -> Tensor:
        """Rotary embedding of x [R, heads, d] at positions [R]."""
        cos, sin = self.rotary[positions][:, :, None].unbind(1)
        left, right = x.chunk(2, -1)
        return x * cos + torch.cat([-right, left], -1) * sin


def prefix_layout(s: PrefixSizes, vocab: int) -> dict[str, tuple[int, ...]]:
    """Names and shapes; the embedding and the frequencies came along in training and are not used."""
    q, kv = s.num_heads * s.head_dim, s.num_kv_heads * s.head_dim
    layer = {
        "self_attn.q_proj.weight": (q, s.hidden),
        "self_attn.k_proj.weight": (kv, s.hidden),
        "self_attn.v_proj.weight": (kv, s.hidden),
        "self_attn.o_proj.weight": (s.hidden, q),
        "mlp.gate_proj.weight": (s.intermediate, s.hidden),
        "mlp.up_proj.weight": (s.intermediate, s.hidden),
        "mlp.down_proj.weight": (s.hidden, s.intermediate),
        "input_layernorm.weight": (s.hidden,),
        "post_attention_layernorm.weight": (s.hidden,),
        "self_attn.rotary_emb.inv_freq": (s.head_dim // 2,),
    }
    outside = {"norm.weight": (s.hidden,), "embed_tokens.weight": (vocab, s.hidden)}
    return {f"{PREFIX}layers.0.{name}": shape for name, shape in layer.items()} | {
        f"{PREFIX}{name}": shape for name, shape in outside.items()
    }


PREFIX_OPTIONAL = frozenset({f"{PREFIX}embed_tokens.weight", f"{PREFIX}layers.0.self_attn.rotary_emb.inv_freq"})


def _rotary_table(target: Path, length: int) -> Tensor:
    """cos and sin of every position, [length, 2, d], by the target's own rule."""
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

    config: Any = read_model_config(target)
    cos, sin = LlamaRotaryEmbedding(config.get_text_config())(torch.zeros(1), torch.arange(length)[None])
    return torch.stack([cos[0], sin[0]], dim=1)


def _frozen(tensor: Tensor) -> nn.Parameter:
    return nn.Parameter(tensor.contiguous(), requires_grad=False)
