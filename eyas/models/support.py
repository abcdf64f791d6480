"""What an architecture needs of us: a config in, the shape of every layer's keys out, or why Eyas cannot serve it.

Looks at the config, at the class, and at a forward pass without weights; never at a list of model names.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from eyas.errors import CheckpointError
from eyas.models.numerics.rotary import pin_rotary

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
