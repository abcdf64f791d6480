"""The target model: transformers' own architecture behind our attention. Packed rows in, logits and taps out.

Knows no sequences. Legend: R packed rows, N wanted rows, V vocabulary, H hidden width, T tapped layers.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from eyas.errors import CheckpointError
from eyas.models.attention import ATTENTION_NAME, KVPools, register_attention
from eyas.models.checkpoint import check_device, read_config, resolve
from eyas.models.cpu.layout import lay_out
from eyas.models.heads.features import AFTER_NORM
from eyas.models.inputs import PackedInputs, Segment, pack
from eyas.models.numerics.output import widen_head
from eyas.models.numerics.rotary import pin_rotary
from eyas.models.parallel.shard import Share, evenly, shard, splits_heads
from eyas.models.support import kv_shapes, read_model_config

EXPERT_COUNTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")


@dataclass(frozen=True)
class TargetOutput:
    """logits: float32 [N, V]. taps: tapped hidden states side by side [R, T * H], or None."""

    logits: Tensor
    taps: Tensor | None


class TargetModel:
    """Any causal LM of transformers, run over packed rows.

    taps: layer ids whose *input* is collected (the reference convention of EAGLE-3); the id behind the last layer means
    the state before the final norm, AFTER_NORM the one behind it. num_ranks: processes that hold a share of the model each.
    """

    def __init__(self, model: Any, taps: Sequence[int] = (), num_ranks: int = 1) -> None:
        self.model: Any = model.eval()
        self.config: Any = model.config.get_text_config()
        self._num_head_ranks = num_ranks if splits_heads(model) else 1
        self._tapped: dict[int, Tensor] = {}
        self._hooks: list[RemovableHandle] = []
        self.taps: tuple[int, ...] = ()
        self.tap(taps)

    def tap(self, taps: Sequence[int]) -> None:
        """Collect these states from now on, in place of others. Raises CheckpointError for a layer that is not there."""
        decoder: Any = self.model.get_decoder()
        wrong = [tap for tap in taps if tap != AFTER_NORM and not 0 <= tap <= len(decoder.layers)]
        if wrong:
            raise CheckpointError(f"the head taps layer {wrong[0]}, but the target has {len(decoder.layers)} layers")
        for hook in self._hooks:
            hook.remove()
        self.taps = tuple(taps)
        self._hooks = [self._hook(decoder, tap) for tap in dict.fromkeys(self.taps)]

    def _hook(self, decoder: Any, tap: int) -> RemovableHandle:
        if tap == AFTER_NORM:
            return decoder.norm.register_forward_hook(self._tap_output)  # type: ignore[no-any-return]
        layer = decoder.layers[tap] if tap < len(decoder.layers) else decoder.norm
        return layer.register_forward_pre_hook(self._tap(tap))  # type: ignore[no-any-return]

    def _tap(self, layer: int) -> Any:
        def keep(module: nn.Module, args: tuple[Tensor, ...]) -> None:
            self._tapped[layer] = args[0][0]

        return keep

    def _tap_output(self, module: nn.Module, args: tuple[Tensor, ...], output: Tensor) -> None:
        self._tapped[AFTER_NORM] = output[0]

    def pack(self, segments: Sequence[Segment]) -> PackedInputs:
        """Segments as `forward` takes them, for the plain attention."""
        return pack(segments, self.device)

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
        taps = torch.cat([self._tapped[tap] for tap in self.taps], dim=-1) if self.taps else None
        self._tapped.clear()
        return TargetOutput(out.logits[0].float()[: packed.num_wanted], taps)

    @property
    def device(self) -> torch.device:
        return next(self.model.parameters()).device  # type: ignore[no-any-return]

    @property
    def dtype(self) -> torch.dtype:
        """Of hidden states, keys and values; quantised weights are kept in another."""
        return self.model.get_input_embeddings().weight.dtype  # type: ignore[no-any-return]

    @property
    def vocab_size(self) -> int:
        return int(self.config.vocab_size)

    @property
    def context_length(self) -> int:
        return int(self.config.max_position_embeddings)

    @property
    def routes_rows(self) -> bool:
        """Whether rows of one pass take different ways, as with a mixture of experts."""
        return any(getattr(self.config, name, None) for name in EXPERT_COUNTS)

    @cached_property
    def kv_shapes(self) -> list[tuple[int, int]]:
        """(key-value heads, head width) of every layer; the heads of this rank."""
        return [(max(1, heads // self._num_head_ranks), width) for heads, width in kv_shapes(self.model.config)]

    @property
    def heads_per_kv(self) -> int:
        """Query heads of this rank that share a key-value head."""
        return int(self.config.num_attention_heads) // self._num_head_ranks // self.kv_shapes[0][0]

    @property
    def eos_ids(self) -> frozenset[int]:
        """Every end-of-sequence token that the model's generation config or config names."""
        found: Any = getattr(getattr(self.model, "generation_config", None), "eos_token_id", None)
        found = found if found is not None else self.config.eos_token_id
        return frozenset(found if isinstance(found, list) else [found] if found is not None else [])


def load_target(
    path_or_id: str,
    dtype: str = "float32",
    device: str = "cpu",
    taps: Sequence[int] = (),
    context_length: int = 0,
    share: Share | None = None,
) -> TargetModel:
    """Load a causal LM from a folder or hub id. context_length: tokens that rotary tables must serve; 0 takes the model's.
    share: this process's part of it, if other ranks hold the rest; all ranks must load at the same time.

    Raises CheckpointError for an architecture that cannot be served, before any weight is read, and when transformers
    cannot load it whole.
    """
    register_attention()
    check_device(dtype, device)
    folder = resolve(path_or_id)
    shapes = kv_shapes(read_model_config(folder))
    model = _load(folder, path_or_id, dtype)
    if share is not None:
        shard(model, share, [heads for heads, _ in shapes])
    target = TargetModel(model.to(torch.device(device)), taps, share.size if share else 1)
    target.config.pad_token_id = None  # some architectures look for padding in every pass, which waits for the device
    pin_rotary(target.model, min(context_length or target.context_length, target.context_length))
    widen_head(target.model)
    lay_out(target.model)
    _check_attention(target)
    return target


def _load(folder: Path, path_or_id: str, dtype: str) -> Any:
    """transformers' model with all of its weights."""
    from transformers import AutoModelForCausalLM

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
    return model


def check_heads(path_or_id: str, num_ranks: int) -> None:
    """Raises CheckpointError unless the ranks can share the heads of a target evenly."""
    config = read_config(resolve(path_or_id))
    config = config.get("text_config", config)
    heads = int(config.get("num_attention_heads", num_ranks))
    kv_heads = int(config.get("num_key_value_heads", heads))
    if heads % num_ranks or not evenly(kv_heads, num_ranks):
        raise CheckpointError(
            f"{num_ranks} ranks cannot share {heads} attention heads over {kv_heads} key-value heads evenly; "
            "engine.tensor_parallel must divide the attention heads, and divide the key-value heads or be a multiple of them"
        )


@dataclass(frozen=True)
class _ProbePools:
    keys: list[Tensor]
    values: list[Tensor]


def _check_attention(target: TargetModel) -> None:
    """Raises CheckpointError unless every layer keeps its keys through our attention function and only wanted rows get
    logits: an architecture that swallows what it does not know would be silently wrong."""
    name = type(target.model).__name__
    pools = _ProbePools(
        *([torch.zeros(4, *shape, dtype=target.dtype, device=target.device) for shape in target.kv_shapes] for _ in "kv")
    )
    rows, none = np.arange(2), np.zeros(0, dtype=np.int64)
    segments = [Segment(rows + 1, rows, rows + start, none, None, rows[1:]) for start in (0, 2)]
    try:
        logits = target.forward(pack(segments, target.device), pools).logits
    except (TypeError, RuntimeError, KeyError, AttributeError, IndexError, ValueError) as error:
        raise CheckpointError(f"{name} does not work with packed rows over token slots: {error}") from error
    if len(logits) != 2 or not all(bool(keys.any()) for keys in pools.keys):
        raise CheckpointError(f"{name} does not use transformers' attention interface in every layer; Eyas cannot serve it")
