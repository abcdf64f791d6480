"""The target model: transformers' own architecture behind our attention. Packed rows in, logits and taps out.

Knows no sequences. Legend: R packed rows, N wanted rows, V vocabulary, H hidden width, T tapped layers.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from eyas.errors import CheckpointError
from eyas.models.attention import ATTENTION_NAME, KVPools, register_attention
from eyas.models.checkpoint import resolve
from eyas.models.inputs import PackedInputs


@dataclass(frozen=True)
class TargetOutput:
    """logits: float32 [N, V]. taps: tapped hidden states side by side [R, T * H], or None."""

    logits: Tensor
    taps: Tensor | None


class TargetModel:
    """Any causal LM of transformers, run over packed rows.

    taps: layer ids whose *input* is collected (the reference convention of EAGLE-3); the id behind the last layer means
    the state before the final norm.
    """

    def __init__(self, model: nn.Module, taps: Sequence[int] = ()) -> None:
        self.model = model.eval()
        self.config: Any = model.config
        self._tapped: dict[int, Tensor] = {}
        self._taps = tuple(taps)
        decoder: Any = model.get_decoder()  # type: ignore[operator]
        for tap in self._taps:
            if not 0 <= tap <= len(decoder.layers):
                raise CheckpointError(f"the head taps layer {tap}, but the target has {len(decoder.layers)} layers")
            layer = decoder.layers[tap] if tap < len(decoder.layers) else decoder.norm
            layer.register_forward_pre_hook(self._tap(tap))

    def _tap(self, layer: int) -> Any:
        def keep(module: nn.Module, args: tuple[Tensor, ...]) -> None:
            self._tapped[layer] = args[0][0]

        return keep

    @torch.inference_mode()
    def forward(self, packed: PackedInputs, pools: KVPools) -> TargetOutput:
        """One forward pass over all rows; new keys and values go to the rows' slots in `pools`."""
        out = self.model(
            input_ids=packed.tokens[None],
            position_ids=packed.positions[None],
            use_cache=False,
            logits_to_keep=packed.wanted,
            packed=packed,
            pools=pools,
        )
        taps = torch.cat([self._tapped[tap] for tap in self._taps], dim=-1) if self._taps else None
        self._tapped.clear()
        return TargetOutput(out.logits[0].float(), taps)

    @property
    def device(self) -> torch.device:
        return next(self.model.parameters()).device

    @property
    def dtype(self) -> torch.dtype:
        return next(self.model.parameters()).dtype

    @property
    def vocab_size(self) -> int:
        return int(self.config.vocab_size)

    @property
    def context_length(self) -> int:
        return int(self.config.max_position_embeddings)

    @property
    def kv_shapes(self) -> list[tuple[int, int]]:
        """(key-value heads, head width) of every layer."""
        heads = int(self.config.num_attention_heads)
        width = int(getattr(self.config, "head_dim", None) or self.config.hidden_size // heads)
        return [(int(getattr(self.config, "num_key_value_heads", None) or heads), width)] * int(
            self.config.num_hidden_layers
        )

    @property
    def eos_ids(self) -> frozenset[int]:
        """Every end-of-sequence token that the model's generation config or config names."""
        found: Any = getattr(getattr(self.model, "generation_config", None), "eos_token_id", None)
        found = found if found is not None else self.config.eos_token_id
        return frozenset(found if isinstance(found, list) else [found] if found is not None else [])


def load_target(path_or_id: str, dtype: str = "float32", device: str = "cpu", taps: Sequence[int] = ()) -> TargetModel:
    """Load a causal LM from a folder or hub id. Raises CheckpointError when transformers cannot load it whole."""
    from transformers import AutoModelForCausalLM

    register_attention()
    folder = resolve(path_or_id)
    try:
        loaded: Any = AutoModelForCausalLM.from_pretrained(
            folder, dtype=getattr(torch, dtype), attn_implementation=ATTENTION_NAME, output_loading_info=True
        )
    except (OSError, ValueError, KeyError, RuntimeError, ImportError) as error:
        raise CheckpointError(f"transformers cannot load a causal LM from {path_or_id!r}: {error}") from error
    model, report = loaded
    if report["missing_keys"] or report["mismatched_keys"]:
        raise CheckpointError(
            f"{path_or_id!r} lacks tensors that its config asks for: {sorted(report['missing_keys'])} "
            f"{sorted(report['mismatched_keys'])}"
        )
    return TargetModel(model.to(torch.device(device)), taps)
