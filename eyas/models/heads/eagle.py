"""EAGLE heads of all generations: features and tokens in, states and draft logits out.

Li et al. 2024 (EAGLE, EAGLE-2) and 2025 (EAGLE-3). Legend: R rows, H draft hidden, d head width, D draft vocabulary.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from eyas.errors import CheckpointError
from eyas.models.heads.eagle_config import EagleHeadConfig, layer_prefix
from eyas.models.heads.layers import DraftLayer, Projected, frozen, linear, rms_norm, rotary_table, under_prefix

# Attention of one layer: its number and projected rows to the attention output [R, heads, d].
Attention = Callable[[int, Projected], Tensor]


class EagleHead(nn.Module, ABC):
    """Decoder layers over pairs (feature i, token i+1). Each step's state takes the place of the next feature.

    RoPE has the head's own base and covers the target's context. draft_ids maps draft ids to the target's.
    """

    def __init__(
        self, config: EagleHeadConfig, tensors: Mapping[str, Tensor], embedding: Tensor, lm_head: Tensor, max_model_len: int
    ) -> None:
        """tensors: under their published names. embedding, lm_head: the head's own or the target's."""
        super().__init__()
        self.config = config
        self.embedding = frozen(embedding)
        self.lm_head = linear(lm_head)
        self.norm = frozen(tensors["norm.weight"]) if "norm.weight" in tensors else None
        self.layers = nn.ModuleList(
            DraftLayer(config, under_prefix(tensors, layer_prefix(config, layer))) for layer in range(config.num_layers)
        )
        ids = torch.arange(config.draft_vocab_size)
        self.register_buffer("draft_ids", ids + tensors["d2t"] if "d2t" in tensors else ids)
        self.register_buffer("rotary", _rotary(config, max_model_len).to(embedding.dtype))
        self.draft_ids: Tensor
        self.rotary: Tensor

    @property
    def max_model_len(self) -> int:
        """Positions that the rotary table covers."""
        return int(self.rotary.shape[0])

    def project(self, features: Tensor, tokens: Tensor, positions: Tensor) -> Projected:
        """Into the first layer: features [R, H], tokens and positions [R]."""
        inputs, residual = self._first_inputs(F.embedding(tokens, self.embedding), features)
        return self._layer(0).project(inputs, residual, self.rotary[positions])

    def project_next(self, layer: int, states: Tensor, positions: Tensor) -> Projected:
        """Into a later layer: states [R, H] of the one before it, positions [R]."""
        below = self._layer(layer)
        assert below.input_norm is not None
        return below.project(self._rms(states, below.input_norm), states, self.rotary[positions])

    def finish(self, attended: Tensor, residual: Tensor, layer: int = -1) -> Tensor:
        """Out of a layer, the last by default: attention output [R, heads, d] and residual [R, H] to states [R, H]."""
        state = self._layer(layer).finish(attended, residual)
        feeds_norm = self.config.wiring.output == "normed" and layer in (-1, len(self.layers) - 1)
        return self._final_norm(state) if feeds_norm else state

    def run(self, features: Tensor, tokens: Tensor, positions: Tensor, attention: Attention) -> Tensor:
        """Through all layers: features [R, H], tokens and positions [R] to states [R, H]."""
        rows = self.project(features, tokens, positions)
        states = self.finish(attention(0, rows), rows.residual, 0)
        for layer in range(1, len(self.layers)):
            rows = self.project_next(layer, states, positions)
            states = self.finish(attention(layer, rows), rows.residual, layer)
        return states

    def logits(self, states: Tensor) -> Tensor:
        """Draft logits float32 [..., D] of states [..., H]."""
        normed = self._final_norm(states) if self.config.wiring.output == "state" else states
        return self.lm_head(normed).float()  # type: ignore[no-any-return]

    @abstractmethod
    def _first_inputs(self, embedded: Tensor, features: Tensor) -> tuple[Tensor, Tensor]:
        """What the first layer's attention sees of embeddings and features [R, H], and its residual [R, H]."""

    def _layer(self, layer: int) -> DraftLayer:
        found = self.layers[layer]
        assert isinstance(found, DraftLayer)
        return found

    def _final_norm(self, states: Tensor) -> Tensor:
        assert self.norm is not None
        return self._rms(states, self.norm)

    def _rms(self, x: Tensor, weight: Tensor) -> Tensor:
        return rms_norm(x, weight, self.config.rms_norm_eps)


class Eagle1Head(EagleHead):
    """EAGLE-1 and -2: fc joins embedding and feature, the first layer has no norm before attention, the target's lm_head
    reads the states."""

    def __init__(
        self, config: EagleHeadConfig, tensors: Mapping[str, Tensor], embedding: Tensor, lm_head: Tensor, max_model_len: int
    ) -> None:
        super().__init__(config, tensors, embedding, lm_head, max_model_len)
        self.fc = linear(tensors["fc.weight"], tensors["fc.bias"] if config.fc_bias else None)

    def _first_inputs(self, embedded: Tensor, features: Tensor) -> tuple[Tensor, Tensor]:
        joined = self.fc(torch.cat([embedded, features], -1))
        return joined, joined


class Eagle3Head(EagleHead):
    """EAGLE-3: embedding and feature are normed and stand side by side, embedding first; fc runs beside the target."""

    def _first_inputs(self, embedded: Tensor, features: Tensor) -> tuple[Tensor, Tensor]:
        first = self._layer(0)
        assert first.input_norm is not None
        assert first.hidden_norm is not None
        normed = self._rms(features, first.hidden_norm)
        inputs = torch.cat([self._rms(embedded, first.input_norm), normed], -1)
        return inputs, normed if self.config.wiring.norm_before_residual else features


def _rotary(config: EagleHeadConfig, length: int) -> Tensor:
    """The head's rotary table, [length, 2, d]. Raises CheckpointError for a scaling that transformers does not know."""
    from transformers import LlamaConfig

    try:
        llama = LlamaConfig(
            hidden_size=config.num_heads * config.head_dim,
            num_attention_heads=config.num_heads,
            head_dim=config.head_dim,
            max_position_embeddings=config.max_positions,
            rope_parameters=dict(config.rotary),
        )
        return rotary_table(llama, length)
    except KeyError as error:
        raise CheckpointError(f"the head's RoPE is {dict(config.rotary)}, which transformers cannot use: {error}") from error
