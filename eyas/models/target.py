"""What an architecture needs of us: a config in, the shape of every layer's keys out, or why Eyas cannot serve it.

Looks at the config, at the class, and at a forward pass without weights; never at a list of model names.

The target model: transformers' own architecture behind our attention. Packed rows in, logits and taps out.

Knows no sequences. Legend: R packed rows, N wanted rows, V vocabulary, H hidden width, T tapped layers.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from eyas.errors import CheckpointError
from eyas.models.attention import ATTENTION_NAME, KVTensors, register_attention
from eyas.models.checkpoint import check_device, read_config, resolve
from eyas.models.cpu import lay_out
from eyas.models.heads.features import FINAL_NORM_OUTPUT
from eyas.models.inputs import PackedInputs, Segment, pack
from eyas.models.numerics import pin_rotary, widen_head
from eyas.models.tensor_parallel import Shard, evenly, shard, splits_heads

PROBE_NAME = "eyas_probe"
SERVED_LAYERS = {"full_attention", "sliding_attention"}
RECURRENT_LAYERS = {"linear_attention", "conv", "hybrid", "hybrid_sliding"}
SERVED_ARGUMENTS = {"scaling", "sliding_window", "softcap"}
HARMLESS_ARGUMENTS = {"dropout", "position_ids", "cache_position"}


@dataclass(frozen=True)
class LayerCall:
    """How an architecture calls attention in one layer. arguments: names of those that are set and more than a switch."""

    layer: int
    num_kv_heads: int
    key_width: int
    value_width: int
    arguments: frozenset[str]
    causal: bool


def read_model_config(folder: Path) -> Any:
    """transformers' config of a checkpoint. Raises CheckpointError."""
    from transformers import AutoConfig

    try:
        return AutoConfig.from_pretrained(folder)
    except (OSError, ValueError, KeyError, TypeError, ImportError) as error:
        raise CheckpointError(f"transformers cannot read the config of {str(folder)!r}: {error}") from error


def kv_shapes(config: Any) -> list[tuple[int, int]]:
    """(key-value heads, head width) of every layer, measured by a forward pass of the architecture without weights.

    Raises CheckpointError with the reason for architectures that cannot be served; loads nothing.
    """
    name = config.model_type
    _check_config(config)
    calls = sorted(_probe(config), key=lambda call: call.layer)
    missing = set(range(config.get_text_config().num_hidden_layers)) - {call.layer for call in calls}
    if missing:
        raise CheckpointError(f"{name}: layers {sorted(missing)} do not attend to the text through transformers' interface")
    if len({call.layer for call in calls}) < len(calls):
        raise CheckpointError(f"{name}: a layer attends more than once, but Eyas keeps one set of keys per layer")
    for call in calls:
        _check_call(name, call)
    return [(call.num_kv_heads, call.key_width) for call in calls]


def _check_config(config: Any) -> None:
    name, text = config.model_type, config.get_text_config()
    if config.is_encoder_decoder or getattr(text, "add_cross_attention", False):
        raise CheckpointError(f"{name} is an encoder-decoder or cross-attends; Eyas serves decoder-only models")
    strange = sorted(set(getattr(text, "layer_types", None) or ()) - SERVED_LAYERS)
    recurrent = [kind for kind in strange if kind in RECURRENT_LAYERS]
    architecture = _model_class(config)
    if recurrent or architecture._is_stateful:
        raise CheckpointError(
            f"{name} has recurrent layers{_listed(recurrent)}: their state cannot branch over a draft tree or be kept by "
            "token slots; Eyas serves models whose layers all attend"
        )
    if strange:
        raise CheckpointError(f"{name} has layers of types that Eyas does not have:{_listed(strange)}")
    if not architecture._supports_attention_backend:
        raise CheckpointError(f"{name}: {architecture.__name__} does not go through transformers' attention interface")


def _model_class(config: Any) -> Any:
    from transformers import AutoModelForCausalLM

    mapping: Any = AutoModelForCausalLM._model_mapping
    if type(config) not in mapping:
        raise CheckpointError(f"{config.model_type} has no causal language model in transformers")
    found = mapping[type(config)]
    return found[0] if isinstance(found, tuple) else found


def _probe(config: Any) -> list[LayerCall]:
    """Every attention call of a forward pass of two rows on the meta device."""
    from transformers import AttentionInterface, AutoModelForCausalLM

    AttentionInterface.register(PROBE_NAME, _record)
    bare = copy.deepcopy(config)
    bare.__dict__.pop("quantization_config", None)
    bare.get_text_config().pad_token_id = None  # some look for padding among the tokens, which are not there
    calls: list[LayerCall] = []
    rows = torch.tensor([[0, 1]], device="meta")
    try:
        with torch.device("meta"), torch.inference_mode():
            architecture: Any = AutoModelForCausalLM
            model = architecture.from_config(bare, attn_implementation=PROBE_NAME, dtype=torch.bfloat16)
            pin_rotary(model, 0)
            model.eval()(input_ids=rows, position_ids=rows, use_cache=False, logits_to_keep=rows[0, :1], calls=calls)
    except (TypeError, RuntimeError, KeyError, AttributeError, IndexError, ValueError, ImportError) as error:
        raise CheckpointError(f"{config.model_type} does not work with packed rows over token slots: {error}") from error
    return calls


def _record(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *_: Any,
    calls: list[LayerCall] | None = None,
    **arguments: Any,
) -> tuple[Tensor, None]:
    """Stands for attention; keeps what it was asked for."""
    if calls is None:
        raise TypeError("its layers do not hand keyword arguments on to attention")
    arguments["attention_mask"] = attention_mask
    given = frozenset(name for name, value in arguments.items() if value is not None and not isinstance(value, bool))
    layer: Any = module.layer_idx
    causal = bool(getattr(module, "is_causal", True))
    calls.append(LayerCall(int(layer), key.shape[1], key.shape[-1], value.shape[-1], given, causal))
    return query.new_zeros(*query.shape[:3], value.shape[-1]).transpose(1, 2), None


def _check_call(name: str, call: LayerCall) -> None:
    unknown = sorted(call.arguments - SERVED_ARGUMENTS - HARMLESS_ARGUMENTS)
    if "s_aux" in unknown:
        raise CheckpointError(f"{name} uses attention sinks, which Eyas does not have")
    if unknown:
        raise CheckpointError(f"{name} gives attention arguments that Eyas does not have:{_listed(unknown)}")
    if call.key_width != call.value_width:
        raise CheckpointError(
            f"{name} uses latent attention: keys of width {call.key_width}, values of width {call.value_width}; "
            "Eyas keeps keys and values of one width"
        )
    if not call.causal:
        raise CheckpointError(f"{name} attends in both directions; Eyas serves causal models")


def _listed(names: Iterable[str]) -> str:
    return "".join(f" {name}" for name in names)


EXPERT_COUNTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")


@dataclass(frozen=True)
class TargetOutput:
    """logits: float32 [N, V]. taps: tapped hidden states side by side [R, T * H], or None."""

    logits: Tensor
    aux_hidden_states: Tensor | None


class TargetModel:
    """Any causal LM of transformers, run over packed rows.

    taps: layer ids whose *input* is collected (the reference convention of EAGLE-3); the id behind the last layer means
    the state before the final norm, FINAL_NORM_OUTPUT the one behind it. num_ranks: processes that hold a share of the model each.
    """

    def __init__(self, model: Any, aux_hidden_state_layers: Sequence[int] = (), num_ranks: int = 1) -> None:
        self.model: Any = model.eval()
        self.config: Any = model.config.get_text_config()
        self._num_head_ranks = num_ranks if splits_heads(model) else 1
        self._tapped: dict[int, Tensor] = {}
        self._hooks: list[RemovableHandle] = []
        self.aux_hidden_state_layers: tuple[int, ...] = ()
        self.set_aux_hidden_state_layers(aux_hidden_state_layers)

    def set_aux_hidden_state_layers(self, taps: Sequence[int]) -> None:
        """Collect these states from now on, in place of others. Raises CheckpointError for a layer that is not there."""
        decoder: Any = self.model.get_decoder()
        wrong = [tap for tap in taps if tap != FINAL_NORM_OUTPUT and not 0 <= tap <= len(decoder.layers)]
        if wrong:
            raise CheckpointError(f"the head taps layer {wrong[0]}, but the target has {len(decoder.layers)} layers")
        for hook in self._hooks:
            hook.remove()
        self.aux_hidden_state_layers = tuple(taps)
        self._hooks = [self._hook(decoder, tap) for tap in dict.fromkeys(self.aux_hidden_state_layers)]

    def _hook(self, decoder: Any, tap: int) -> RemovableHandle:
        if tap == FINAL_NORM_OUTPUT:
            return decoder.norm.register_forward_hook(self._tap_output)  # type: ignore[no-any-return]
        layer = decoder.layers[tap] if tap < len(decoder.layers) else decoder.norm
        return layer.register_forward_pre_hook(self._tap(tap))  # type: ignore[no-any-return]

    def _tap(self, layer: int) -> Any:
        def keep(module: nn.Module, args: tuple[Tensor, ...]) -> None:
            self._tapped[layer] = args[0][0]

        return keep

    def _tap_output(self, module: nn.Module, args: tuple[Tensor, ...], output: Tensor) -> None:
        self._tapped[FINAL_NORM_OUTPUT] = output[0]

    def pack(self, segments: Sequence[Segment]) -> PackedInputs:
        """Segments as `forward` takes them, for the plain attention."""
        return pack(segments, self.device)

    @torch.inference_mode()
    def forward(self, packed: PackedInputs, pools: KVTensors) -> TargetOutput:
        """One forward pass over all rows; new keys and values go to the rows' slots in `pools`."""
        out = self.model(
            input_ids=packed.tokens[None],
            position_ids=packed.positions[None],
            use_cache=False,
            logits_to_keep=packed.logits_indices,
            packed=packed,
            pools=pools,
        )
        taps = (
            torch.cat([self._tapped[tap] for tap in self.aux_hidden_state_layers], dim=-1)
            if self.aux_hidden_state_layers
            else None
        )
        self._tapped.clear()
        return TargetOutput(out.logits[0].float()[: packed.num_logits], taps)

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
    def max_model_len(self) -> int:
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
    aux_hidden_state_layers: Sequence[int] = (),
    max_model_len: int = 0,
    share: Shard | None = None,
) -> TargetModel:
    """Load a causal LM from a folder or hub id. max_model_len: tokens that rotary tables must serve; 0 takes the model's.
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
    target = TargetModel(model.to(torch.device(device)), aux_hidden_state_layers, share.size if share else 1)
    target.config.pad_token_id = None  # some architectures look for padding in every pass, which waits for the device
    pin_rotary(target.model, min(max_model_len or target.max_model_len, target.max_model_len))
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


def check_tensor_parallel(path_or_id: str, num_ranks: int) -> None:
    """Raises CheckpointError unless the ranks can share the heads of a target evenly."""
    config = read_config(resolve(path_or_id))
    config = config.get("text_config", config)
    heads = int(config.get("num_attention_heads", num_ranks))
    kv_heads = int(config.get("num_key_value_heads", heads))
    if heads % num_ranks or not evenly(kv_heads, num_ranks):
        raise CheckpointError(
            f"{num_ranks} ranks cannot share {heads} attention heads over {kv_heads} key-value heads evenly; "
            "engine.tensor_parallel_size must divide the attention heads, and divide the key-value heads or be a multiple of them"
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
