"""The target model: any causal LM of transformers whose layers all attend, run over packed rows with our attention.

No list of model names decides what is supported: a forward pass without weights shows what an architecture needs
(`supported`), and `loading` adapts families. Legend: R packed rows, N rows whose logits are computed, V vocabulary, C hidden
width, T layers whose hidden states are collected.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from eyas.cache.kv_cache import KV_CACHE_DTYPES, KVCache, KVShape
from eyas.cache.state_pools import StatePools, StateShape
from eyas.cache.states import StateSizes
from eyas.config.target_limits import EXPERT_COUNTS, context_limit
from eyas.device.placement import check_e4m3
from eyas.errors import CheckpointError
from eyas.kernels.arguments import KVScales
from eyas.models.backends.packed_weights import PackedEmbedding
from eyas.models.checkpoint import Checkpoint, read_kv_scales
from eyas.models.hidden_states import FINAL_NORM_OUTPUT, StateHooks, final_norm
from eyas.models.inputs import PackedInputs, Segment, pack
from eyas.models.layers.attention import kv_sources
from eyas.models.parallel.shards import Shard, SharedVocabulary, shares_vocabulary, splits_heads
from eyas.models.supported import Architecture, inspect_architecture

# States for checks.
FEW_STATES = StateSizes(4, 4)
# What `forward` gives to attention through the model's layers.
PASS_ARGUMENTS = ("packed", "kv_cache")


@dataclass(frozen=True)
class TargetOutput:
    """Output of a forward pass of the target.

    Attributes:
        logits: float32 [N, V]; of a rank that shares the vocabulary, those of its part.
        aux_hidden_states: collected hidden states side by side [R, T * C], or None: also if the KV cache has got them.
    """

    logits: Tensor
    aux_hidden_states: Tensor | None


class TargetModel:
    """A loaded causal LM. It is the plain ForwardBackend.

    aux_hidden_state_layers: layers whose *input* is collected (the convention of EAGLE-3). The number of layers means the
    state before the final norm, FINAL_NORM_OUTPUT the state behind it.

    Args:
        shard: the part of the model that this process holds.
        architecture: of the whole model; None measures it.
        hooks: of another target on the same model.
        weight_dtype: of the weights, or INT8; empty takes that of hidden states.
    """

    def __init__(
        self,
        model: Any,
        aux_hidden_state_layers: Sequence[int] = (),
        shard: Shard | None = None,
        architecture: Architecture | None = None,
        hooks: StateHooks | None = None,
        weight_dtype: str = "",
    ) -> None:
        self.model: Any = model.eval()
        self.name_or_path: str = model.name_or_path
        self.config: Any = model.config.get_text_config()
        self.device: torch.device = next(model.parameters()).device
        # Of hidden states, keys and values; quantised and packed weights have another.
        embedding = model.get_input_embeddings()
        self.dtype: torch.dtype = embedding.dtype if isinstance(embedding, PackedEmbedding) else embedding.weight.dtype
        self.weight_dtype = weight_dtype or str(self.dtype).removeprefix("torch.")
        self.vocab_size = int(self.config.vocab_size)
        self.max_model_len = context_limit(self.config)
        self.eos_ids = _eos_ids(model)
        self._whole = architecture
        self.kv_scales: Sequence[KVScales] = ()  # of keys and values with 8 bits, by layer; empty for 1
        self.kv_dtype: torch.dtype | None = None  # of keys and values, if not `dtype`
        self._num_ranks = shard.size if shard else 1
        self._num_head_ranks = shard.size if shard and splits_heads(model) else 1
        self.shared_vocabulary: SharedVocabulary | None = None
        if shard and shares_vocabulary(model, shard):
            self.shared_vocabulary = SharedVocabulary(shard, self.vocab_size)
        self._hooks = hooks or StateHooks(self.model)
        self.aux_hidden_state_layers: tuple[int, ...] = ()
        self.set_aux_hidden_state_layers(aux_hidden_state_layers)

    def with_features(self, aux_hidden_state_layers: Sequence[int] = ()) -> TargetModel:
        """Return another target on the same weights and scales, which collects these layers. Only for a whole model on one
        rank.
        """
        assert self._num_ranks == 1, "ranks share one target"
        other = TargetModel(
            self.model, aux_hidden_state_layers, None, self._architecture, self._hooks, weight_dtype=self.weight_dtype
        )
        other.kv_scales = self.kv_scales
        return other

    def set_aux_hidden_state_layers(self, layers: Sequence[int]) -> None:
        """Collect the hidden states of these layers from now on. Raises CheckpointError for a layer that does not exist, and
        for a model whose layers cannot be hooked.
        """
        decoder = self.model.get_decoder()
        if layers and not (hasattr(decoder, "layers") and final_norm(decoder) is not None):
            raise CheckpointError(
                f"the draft head reads hidden states of the target, but {type(decoder).__name__} does not show its layers "
                "as `layers` and its final norm by a known name; take a draft model or lookups, or another target"
            )
        num_layers = len(decoder.layers) if layers else 0
        for layer in layers:
            if layer != FINAL_NORM_OUTPUT and not 0 <= layer <= num_layers:
                raise CheckpointError(
                    f"the draft head reads the hidden state of layer {layer}, but the target has {num_layers} layers; "
                    "take a head that was trained for this target"
                )
        self.aux_hidden_state_layers = tuple(layers)
        self._hooks.use(self.aux_hidden_state_layers)

    def pack(self, segments: Sequence[Segment]) -> PackedInputs:
        """Return segments in the form that `forward` takes, for the plain attention."""
        return pack(segments, self.device)

    @torch.inference_mode()
    def forward(self, packed: PackedInputs, kv_cache: KVCache) -> TargetOutput:
        """Run all rows once; new keys and values go to the rows' slots in `kv_cache`."""
        self._hooks.states = {}  # a pass that failed may have left some
        if self._hooks.layers != self.aux_hidden_state_layers:
            self._hooks.use(self.aux_hidden_state_layers)
        out = self.model(
            input_ids=packed.tokens[None],
            position_ids=packed.positions[None],
            use_cache=False,
            logits_to_keep=packed.logits_indices,
            packed=packed,
            kv_cache=kv_cache,
        )
        found, self._hooks.states = self._hooks.states, {}
        states = [found[layer][0] for layer in self.aux_hidden_state_layers] if found else []
        return TargetOutput(out.logits[0].float()[: packed.num_logits], torch.cat(states, dim=-1) if states else None)

    def on_any_rank(self, found: bool) -> bool:
        """Return whether something was found on this rank or another that shares the target; all must ask
        at the same time.
        """
        if self._num_ranks == 1:
            return found
        verdict = torch.tensor([float(found)], device=self.device)
        dist.all_reduce(verdict, dist.ReduceOp.MAX)
        return bool(verdict)

    def new_kv_cache(self, num_slots: int, feature_width: int = 0, states: StateSizes = FEW_STATES) -> KVCache:
        """Return an empty KV cache of this rank's heads, with `states` for recurrent layers."""
        shapes, scales = self.kv_shapes, self.kv_scales
        sources = kv_sources(self.config)
        kv_cache = KVCache(num_slots, shapes, feature_width, self.dtype, self.device, self.kv_dtype, scales, sources)
        if self.state_shapes:
            kv_cache.recurrent = StatePools(self.state_shapes, states, self.dtype, self.device)
        return kv_cache

    def set_kv_cache_dtype(self, name: str) -> None:
        """Keep keys and values as `engine.kv_cache_dtype` says in KV caches that are made from now on.

        With 8 bits the checkpoint's scales are read, unless there are some. Raises ConfigError for a type that the device
        does not have, and CheckpointError as `read_kv_scales`.
        """
        self.kv_dtype = KV_CACHE_DTYPES.get(name)
        if self.kv_dtype == torch.float8_e4m3fn:
            check_e4m3(f"engine.kv_cache_dtype is {name}", self.device, "Set it to fp8_e5m2 or auto")
        if self.kv_dtype is not None and not self.kv_scales:
            self.kv_scales = read_kv_scales(Checkpoint(self.name_or_path), len(self.kv_shapes))

    @cached_property
    def kv_shapes(self) -> list[KVShape]:
        """Return the keys and values of every layer; the heads of this rank."""
        shapes, ranks = self._architecture.kv_shapes, self._num_head_ranks
        return [shape._replace(num_heads=max(min(1, shape.num_heads), shape.num_heads // ranks)) for shape in shapes]

    @property
    def state_shapes(self) -> Mapping[int, StateShape]:
        """Return the states of recurrent layers. Every rank has all of their heads."""
        return self._architecture.states

    @cached_property
    def _architecture(self) -> Architecture:
        return self._whole or inspect_architecture(self.model.config)

    @property
    def heads_per_kv(self) -> int:
        """Query heads of this rank that share a key-value head."""
        return int(self.config.num_attention_heads) // self._num_head_ranks // self.num_kv_heads

    @property
    def num_kv_heads(self) -> int:
        """Key-value heads of this rank in the first layer that attends."""
        return next((shape.num_heads for shape in self.kv_shapes if shape.num_heads), 1)

    @property
    def is_mixture_of_experts(self) -> bool:
        """Return whether rows of one pass go to different experts."""
        return any(getattr(self.config, name, None) for name in EXPERT_COUNTS)


def _eos_ids(model: Any) -> frozenset[int]:
    """Return every end-of-sequence token of the vocabulary that the model's generation config or config names."""
    found: Any = getattr(getattr(model, "generation_config", None), "eos_token_id", None)
    text = model.config.get_text_config()
    found = found if found is not None else text.eos_token_id
    ids = found if isinstance(found, list) else [found] if found is not None else []
    return frozenset(token for token in ids if 0 <= token < text.vocab_size)
