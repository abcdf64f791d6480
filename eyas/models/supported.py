"""Finds out whether Eyas can serve an architecture, by running a tiny model of it."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from eyas.errors import CheckpointError
from eyas.models.checkpoint import explained
from eyas.models.layers.numerics import pin_rotary

RECORDING_ATTENTION = "eyas_recording"
SUPPORTED_LAYERS = {"full_attention", "sliding_attention"}
RECURRENT_LAYERS = {"linear_attention", "conv", "hybrid", "hybrid_sliding"}
SUPPORTED_ARGUMENTS = {"scaling", "sliding_window", "softcap"}
IGNORED_ARGUMENTS = {"dropout", "position_ids", "cache_position"}
EXPERT_COUNTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")


@dataclass(frozen=True)
class AttentionCall:
    """Arguments with which an architecture calls attention in one layer. arguments: names of those that are set and not
    booleans.
    """

    layer: int
    num_kv_heads: int
    key_width: int
    value_width: int
    arguments: frozenset[str]
    causal: bool


@dataclass(frozen=True)
class Architecture:
    """Architecture that a config builds: (key-value heads, head width) of every layer, and the shape of every parameter."""

    kv_shapes: list[tuple[int, int]]
    tensors: Mapping[str, tuple[int, ...]]


def measure_kv_shapes(config: Any) -> list[tuple[int, int]]:
    """Return (key-value heads, head width) of every layer, see `inspect_architecture`."""
    return inspect_architecture(config).kv_shapes


def inspect_architecture(config: Any) -> Architecture:
    """Return what an architecture needs, measured by a forward pass without weights.

    Raises CheckpointError with the reason for an architecture that is not supported.
    """
    name = config.model_type
    _check_architecture(config)
    with explained(f"{name} does not work with packed rows over token slots"):
        found, model = trace_attention(config)
    calls = sorted(found, key=lambda call: call.layer)
    missing = set(range(config.get_text_config().num_hidden_layers)) - {call.layer for call in calls}
    if missing:
        raise CheckpointError(f"{name}: layers {sorted(missing)} do not attend to the text through transformers' interface")
    if len({call.layer for call in calls}) < len(calls):
        raise CheckpointError(f"{name}: a layer attends more than once, but Eyas keeps one set of keys per layer")
    for call in calls:
        _check_call(name, call)
    shapes = [(call.num_kv_heads, call.key_width) for call in calls]
    return Architecture(shapes, {own: tuple(weight.shape) for own, weight in model.named_parameters()})


def _check_architecture(config: Any) -> None:
    from transformers import AutoModelForCausalLM

    name, text = config.model_type, config.get_text_config()
    if config.is_encoder_decoder or getattr(text, "add_cross_attention", False):
        raise CheckpointError(f"{name} is an encoder-decoder or cross-attends; Eyas serves decoder-only models")
    mapping: Any = AutoModelForCausalLM._model_mapping
    if type(config) not in mapping:
        raise CheckpointError(f"{name} has no causal language model in transformers")
    architecture = mapping[type(config)]
    architecture = architecture[0] if isinstance(architecture, tuple) else architecture
    unknown = sorted(set(getattr(text, "layer_types", None) or ()) - SUPPORTED_LAYERS)
    recurrent = [kind for kind in unknown if kind in RECURRENT_LAYERS]
    if recurrent or architecture._is_stateful:
        raise CheckpointError(
            f"{name} has recurrent layers{_listed(recurrent)}: their state cannot branch over a draft tree or be kept by "
            "token slots; Eyas serves models whose layers all attend"
        )
    if unknown:
        raise CheckpointError(f"{name} has layers of types that Eyas does not support:{_listed(unknown)}")
    if not architecture._supports_attention_backend:
        raise CheckpointError(f"{name}: {architecture.__name__} does not go through transformers' attention interface")


def trace_attention(config: Any) -> tuple[list[AttentionCall], Any]:
    """Return every attention call of a forward pass of two rows on the meta device, and the model."""
    from transformers import AttentionInterface, AutoModelForCausalLM

    AttentionInterface.register(RECORDING_ATTENTION, _recording_attention)
    bare = copy.deepcopy(config)
    bare.__dict__.pop("quantization_config", None)
    bare.get_text_config().pad_token_id = None  # some look for padding among the tokens, which have no values here
    calls: list[AttentionCall] = []
    rows = torch.tensor([[0, 1]], device="meta")
    with torch.device("meta"), torch.inference_mode():
        architecture: Any = AutoModelForCausalLM
        model = architecture.from_config(bare, attn_implementation=RECORDING_ATTENTION, dtype=torch.bfloat16)
        pin_rotary(model, 0)
        model.eval()(input_ids=rows, position_ids=rows, use_cache=False, logits_to_keep=rows[0, :1], calls=calls)
    return calls, model


def _recording_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *_: Any,
    calls: list[AttentionCall] | None = None,
    **arguments: Any,
) -> tuple[Tensor, None]:
    """Takes the place of attention and records how it is called."""
    if calls is None:
        raise TypeError("its layers do not pass keyword arguments on to attention")
    arguments["attention_mask"] = attention_mask
    given = frozenset(name for name, value in arguments.items() if value is not None and not isinstance(value, bool))
    layer: Any = module.layer_idx
    causal = bool(getattr(module, "is_causal", True))
    calls.append(AttentionCall(int(layer), key.shape[1], key.shape[-1], value.shape[-1], given, causal))
    return query.new_zeros(*query.shape[:3], value.shape[-1]).transpose(1, 2), None


def _check_call(name: str, call: AttentionCall) -> None:
    unknown = sorted(call.arguments - SUPPORTED_ARGUMENTS - IGNORED_ARGUMENTS)
    if "s_aux" in unknown:
        raise CheckpointError(f"{name} uses attention sinks, which Eyas does not support")
    if unknown:
        raise CheckpointError(f"{name} gives attention arguments that Eyas does not support:{_listed(unknown)}")
    if call.key_width != call.value_width:
        raise CheckpointError(
            f"{name} uses latent attention: keys of width {call.key_width}, values of width {call.value_width}; "
            "Eyas keeps keys and values of one width"
        )
    if not call.causal:
        raise CheckpointError(f"{name} attends in both directions; Eyas serves causal models")


def _listed(names: Iterable[str]) -> str:
    return "".join(f" {name}" for name in names)
