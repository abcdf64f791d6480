"""One decoder layer of a draft head: normed inputs in, query, key and value out; attention output in, next state out.

Legend: R rows, H draft hidden, X width of the inputs (2 H in an EAGLE-3 head's first layer).

EAGLE heads of all generations: features and tokens in, states and draft logits out. Knows no sessions and no trees.

Li et al. 2024 (EAGLE, EAGLE-2) and 2025 (EAGLE-3). Legend: R rows, H draft hidden, D draft vocabulary.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from eyas.errors import CheckpointError
from eyas.models.heads.eagle_config import EagleHeadConfig, prefix


@dataclass(frozen=True)
class Projected:
    """What a layer needs of its rows: query [R, heads, d], key and value [R, kv heads, d], residual [R, H]."""

    query: Tensor
    key: Tensor
    value: Tensor
    residual: Tensor


class DraftLayer(nn.Module):
    """Weights under their published names without the layer's prefix; q, k, v and gate, up are fused."""

    def __init__(self, config: EagleHeadConfig, weights: Mapping[str, Tensor]) -> None:
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


# Attention of one layer: its number and projected rows in, attention output [R, heads, d] out.
Attention = Callable[[int, Projected], Tensor]


class EagleHead(nn.Module, ABC):
    """Decoder layers over pairs (feature i, token i+1).

    A state is what is fed on in a feature's place. RoPE has the head's own base, sized for the target's context. draft_ids
    maps draft vocabulary ids to the target's. tensors: in the published layout; embedding and lm_head may be the target's.
    """

    def __init__(
        self, config: EagleHeadConfig, tensors: Mapping[str, Tensor], embedding: Tensor, lm_head: Tensor, context_length: int
    ) -> None:
        super().__init__()
        self.config = config
        self.embedding = frozen(embedding)
        self.lm_head = linear(lm_head)
        self.norm = frozen(tensors["norm.weight"]) if "norm.weight" in tensors else None
        self.layers = nn.ModuleList(
            DraftLayer(config, _under(prefix(config, layer), tensors)) for layer in range(config.num_layers)
        )
        ids = torch.arange(config.draft_vocab_size)
        self.register_buffer("draft_ids", ids + tensors["d2t"] if "d2t" in tensors else ids)
        self.register_buffer("rotary", _rotary_table(config, context_length).to(embedding.dtype))
        self.draft_ids: Tensor
        self.rotary: Tensor

    @property
    def context_length(self) -> int:
        """Positions that the head can rotate."""
        return int(self.rotary.shape[0])

    def project(self, features: Tensor, tokens: Tensor, positions: Tensor) -> Projected:
        """Into the first layer: features [R, H], tokens and positions [R]."""
        inputs, residual = self._enter(F.embedding(tokens, self.embedding), features)
        return self._layer(0).project(inputs, residual, self.rotary[positions])

    def deepen(self, layer: int, states: Tensor, positions: Tensor) -> Projected:
        """Into a later layer: states [R, H] of the one before it, positions [R]."""
        below = self._layer(layer)
        assert below.input_norm is not None
        return below.project(self._rms(states, below.input_norm), states, self.rotary[positions])

    def finish(self, attended: Tensor, residual: Tensor, layer: int = -1) -> Tensor:
        """Out of a layer, the last by default: attention output [R, heads, d] and residual [R, H] to states [R, H]."""
        state = self._layer(layer).finish(attended, residual)
        feeds_norm = self.config.wiring.output == "normed" and layer in (-1, len(self.layers) - 1)
        return self._final(state) if feeds_norm else state

    def run(self, features: Tensor, tokens: Tensor, positions: Tensor, attention: Attention) -> Tensor:
        """Through all layers: features [R, H], tokens and positions [R] to states [R, H]."""
        rows = self.project(features, tokens, positions)
        states = self.finish(attention(0, rows), rows.residual, 0)
        for layer in range(1, len(self.layers)):
            rows = self.deepen(layer, states, positions)
            states = self.finish(attention(layer, rows), rows.residual, layer)
        return states

    def logits(self, states: Tensor) -> Tensor:
        """Draft logits float32 [..., D] of states [..., H]."""
        return self.lm_head(self._final(states) if self.config.wiring.output == "state" else states).float()  # type: ignore[no-any-return]

    @abstractmethod
    def _enter(self, embedded: Tensor, features: Tensor) -> tuple[Tensor, Tensor]:
        """What the first layer's attention sees of embeddings and features [R, H], and its residual [R, H]."""

    def _layer(self, layer: int) -> DraftLayer:
        found = self.layers[layer]
        assert isinstance(found, DraftLayer)
        return found

    def _final(self, states: Tensor) -> Tensor:
        assert self.norm is not None
        return self._rms(states, self.norm)

    def _rms(self, x: Tensor, weight: Tensor) -> Tensor:
        return rms(x, weight, self.config.rms_norm_eps)


class Eagle1Head(EagleHead):
    """EAGLE-1 and -2: fc joins embedding and feature, the first layer has no norm before attention, the target's lm_head
    reads the states."""

    def __init__(
        self, config: EagleHeadConfig, tensors: Mapping[str, Tensor], embedding: Tensor, lm_head: Tensor, context_length: int
    ) -> None:
        super().__init__(config, tensors, embedding, lm_head, context_length)
        self.fc = linear(tensors["fc.weight"], tensors["fc.bias"] if config.fc_bias else None)

    def _enter(self, embedded: Tensor, features: Tensor) -> tuple[Tensor, Tensor]:
        joined = self.fc(torch.cat([embedded, features], -1))
        return joined, joined


class Eagle3Head(EagleHead):
    """EAGLE-3: embedding and feature are normed and stand side by side, embedding first; fc runs beside the target."""

    def _enter(self, embedded: Tensor, features: Tensor) -> tuple[Tensor, Tensor]:
        first = self._layer(0)
        assert first.input_norm is not None
        assert first.hidden_norm is not None
        normed = self._rms(features, first.hidden_norm)
        inputs = torch.cat([self._rms(embedded, first.input_norm), normed], -1)
        return inputs, normed if self.config.wiring.norm_before_residual else features


def _under(prefix: str, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {name.removeprefix(prefix): tensor for name, tensor in tensors.items() if name.startswith(prefix)}


def _rotary_table(config: EagleHeadConfig, length: int) -> Tensor:
    """cos and sin of every position, [length, 2, d]. Raises CheckpointError for a scaling that nobody knows."""
    from transformers import LlamaConfig
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

    try:
        llama = LlamaConfig(
            hidden_size=config.num_heads * config.head_dim,
            num_attention_heads=config.num_heads,
            head_dim=config.head_dim,
            max_position_embeddings=config.max_positions,
            rope_parameters=dict(config.rotary),
        )
        rotate = LlamaRotaryEmbedding(llama)
    except KeyError as error:
        raise CheckpointError(f"the head's RoPE is {dict(config.rotary)}, of which transformers says: {error}") from error
    cos, sin = rotate(torch.zeros(1), torch.arange(length)[None])
    return torch.stack([cos[0], sin[0]], dim=1)
