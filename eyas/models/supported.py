"""Finds out whether Eyas can serve an architecture, by running a tiny model of it."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from eyas.cache.kv_cache import KVShape
from eyas.cache.state_pools import StateShape
from eyas.config.target_limits import INDEXED
from eyas.errors import CheckpointError
from eyas.models.checkpoint import explained
from eyas.models.layers.latent import latent_projection
from eyas.models.layers.mixers import use_pools
from eyas.models.layers.numerics import pin_rotary
from eyas.models.layers.recurrent import StateCall, is_recurrent
from eyas.models.layers.relay import relay_arguments
from eyas.models.text_part import architecture_class, auto_class, drop_padding, text_part

RECORDING_ATTENTION = "eyas_recording"
SUPPORTED_LAYERS = {"full_attention", "sliding_attention", INDEXED}
RECURRENT_LAYERS = {"linear_attention", "conv", "hybrid", "hybrid_sliding"}
# Layers without attention or a state.
PLAIN_LAYERS = {"mlp", "moe"}
SUPPORTED_ARGUMENTS = {"scaling", "sliding_window", "softcap", "s_aux"}
# What attention may be given and need not know. Models that do not slice their logits pass logits_to_keep on.
IGNORED_ARGUMENTS = {"dropout", "position_ids", "cache_position", "logits_to_keep"}
MAX_LAYERS_NAMED = 8
NO_KEYS = KVShape(0, 0, 0)
OWN_CODE = "attention code of its own for them"


@dataclass(frozen=True)
class AttentionCall:
    """Arguments with which an architecture calls attention in one layer.

    Attributes:
        arguments: names of those that are set and not booleans.
        window: of sliding-window attention, in tokens, as an argument says it.
        mask: what the mask of the layer says; None if the architecture makes none.
    """

    layer: int
    shape: KVShape
    arguments: frozenset[str]
    causal: bool
    window: int | None
    mask: RecordedMask | None


@dataclass(frozen=True)
class RecordedMask:
    """Mask that transformers would make.

    Attributes:
        is_plain: it goes by the order of tokens and a window alone.
        is_causal: no row sees a later one.
    """

    window: int | None
    is_plain: bool
    is_causal: bool


@dataclass(frozen=True)
class Architecture:
    """Architecture that a config builds.

    Attributes:
        kv_shapes: keys and values of every layer, of no heads in layers without attention.
        states: of recurrent layers.
        tensors: the shape of every parameter.
        needs_relay: whether its layers keep keyword arguments from attention, see `relay_arguments`.
        windows: of layers whose mask says another window than the argument of attention, in tokens; None for none.
    """

    kv_shapes: list[KVShape]
    states: Mapping[int, StateShape]
    tensors: Mapping[str, tuple[int, ...]]
    needs_relay: bool
    windows: Mapping[int, int | None]


@dataclass(frozen=True)
class Trace:
    """Calls of attention and of recurrent functions in a pass of two rows, and the model that ran it on the meta device."""

    calls: list[AttentionCall]
    states: list[StateCall]
    model: Any
    needs_relay: bool


def inspect_architecture(config: Any) -> Architecture:
    """Return what an architecture needs, measured by a forward pass without weights.

    Raises CheckpointError for an architecture that is not supported: with the layers, the reason, and what Eyas would need.
    """
    config = text_part(config)
    name = config.model_type
    num_layers = config.get_text_config().num_hidden_layers
    _check_architecture(config)
    with explained(f"{name} does not work with packed rows over token slots"):
        try:
            trace = trace_attention(config)
        except Exception:
            if architecture_class(config)._supports_attention_backend:
                raise
            what = f"{_layers(range(num_layers))} do not attend to the text through transformers' interface"
            raise _refusal(name, what, OWN_CODE) from None
    calls = sorted(trace.calls, key=lambda call: call.layer)
    states = _joined_states(trace.states)
    _check_states(config, states)
    if states and not calls:
        what = f"{_layers(range(num_layers))} are recurrent, and no layer attends"
        raise _refusal(name, what, "contexts and memory that do not go by slots of keys")
    has_nothing = [layer for layer, kind in enumerate(_layer_types(config)) if kind in PLAIN_LAYERS]
    if missing := sorted(set(range(num_layers)) - {call.layer for call in calls} - states.keys() - set(has_nothing)):
        what = f"{_layers(missing)} do not attend to the text through transformers' interface"
        raise _refusal(name, what, OWN_CODE)
    if len({call.layer for call in calls}) < len(calls) or len(calls) > num_layers:
        raise _refusal(name, "a layer attends more than once", "several sets of keys for a layer")
    _check_calls(name, calls)
    tensors = {own: tuple(weight.shape) for own, weight in trace.model.named_parameters()}
    windows = {call.layer: call.mask.window for call in calls if call.mask and call.mask.window != call.window}
    shapes = {call.layer: call.shape for call in calls}
    kv_shapes = [shapes.get(layer, NO_KEYS) for layer in range(num_layers)]
    return Architecture(kv_shapes, states, tensors, trace.needs_relay, windows)


def _joined_states(calls: Sequence[StateCall]) -> dict[int, StateShape]:
    """Return the state of each layer, whose convolution and recurrence are recorded one by one."""
    found: dict[int, StateShape] = {}
    for call in calls:
        # the convolution comes first, and a recurrence has none
        known = found.get(call.layer, call.shape)
        found[call.layer] = call.shape._replace(channels=known.channels, width=known.width)
    return found


def _check_states(config: Any, states: Mapping[int, StateShape]) -> None:
    """Raises CheckpointError for recurrent layers whose functions are not known, with their numbers."""
    types = _layer_types(config)
    is_stateful = architecture_class(config)._is_stateful
    missed = [layer for layer, kind in enumerate(types) if kind in RECURRENT_LAYERS and layer not in states]
    if missed or (is_stateful and not types and not states):
        kinds = sorted({types[layer] for layer in missed})
        where = f", {_layers(missed)}" if missed else ""
        what = f"it has recurrent layers{_listed(kinds)}{where} of a kind that Eyas does not know"
        raise _refusal(config.model_type, what, "their functions over a draft tree")


def _layer_types(config: Any) -> list[str]:
    return list(getattr(config.get_text_config(), "layer_types", None) or ())


def _refusal(name: str, what: str, needed: str) -> CheckpointError:
    return CheckpointError(f"{name}: {what}. To serve it, Eyas would need {needed}; take another model")


def _layers(layers: Sequence[int]) -> str:
    """Return the numbers of layers for a message, the first of many only."""
    shown = ", ".join(map(str, layers[:MAX_LAYERS_NAMED])) + (", ..." if len(layers) > MAX_LAYERS_NAMED else "")
    return f"layers [{shown}]"


def _check_architecture(config: Any) -> None:
    name = config.model_type
    text = config.get_text_config()
    if config.is_encoder_decoder or getattr(text, "add_cross_attention", False):
        raise CheckpointError(f"{name} is an encoder-decoder or cross-attends; Eyas serves decoder-only models")
    types = _layer_types(config)
    other = set() if hasattr(text, "index_topk") else {INDEXED}  # Qwen 4's indexer chooses blocks
    if unknown := sorted(set(types) - (SUPPORTED_LAYERS - other) - RECURRENT_LAYERS - PLAIN_LAYERS):
        where = _layers([layer for layer, kind in enumerate(types) if kind in unknown])
        what = f"it has layers of types that Eyas does not support:{_listed(unknown)}, {where}"
        raise _refusal(name, what, "a mask and keys of their kind")

    if not getattr(text, "index_kpool_always_select_tail", True):
        raise _refusal(name, "its indexers leave out the last tokens (index_kpool_always_select_tail)", "its indexers")


def trace_attention(config: Any) -> Trace:
    """Return every attention call of a forward pass of two rows on the meta device."""
    from transformers import AttentionInterface, AttentionMaskInterface

    AttentionInterface.register(RECORDING_ATTENTION, _recording_attention)
    AttentionMaskInterface.register(RECORDING_ATTENTION, _recording_mask)
    bare = copy.deepcopy(text_part(config))
    bare.__dict__.pop("quantization_config", None)
    drop_padding(bare)
    rows = torch.tensor([[0, 1]], device="meta")

    def run(model: Any, needs_relay: bool) -> Trace:
        calls: list[AttentionCall | StateCall] = []
        # Without an attention_mask transformers would look for sequences in the values of the positions.
        model(input_ids=rows, attention_mask=rows, position_ids=rows, use_cache=False, logits_to_keep=rows[0, :1],
              calls=calls)  # fmt: skip
        states = [call for call in calls if isinstance(call, StateCall)]
        mixers = {module.layer_idx for module in model.modules() if is_recurrent(module)}
        if not needs_relay and mixers - {call.layer for call in states}:
            raise _UndeliveredError("its layers do not pass keyword arguments on to recurrent mixers")
        return Trace([call for call in calls if isinstance(call, AttentionCall)], states, model, needs_relay)

    with torch.device("meta"), torch.inference_mode(), _WithoutValues():
        model = auto_class(bare).from_config(bare, attn_implementation=RECORDING_ATTENTION, dtype=torch.bfloat16).eval()
        pin_rotary(use_pools(model), 0)
        try:
            return run(model, needs_relay=False)
        except _UndeliveredError:
            relay_arguments(model, ("calls",))
            return run(model, needs_relay=True)


class _UndeliveredError(TypeError):
    """Raised where attention or a recurrent mixer did not get the arguments of the pass."""


class _WithoutValues(TorchFunctionMode):
    """Answers what models ask of values, which the meta device does not have: nothing is nonzero, and all checks hold.

    So experts find no rows, and distributions find their parameters valid.
    """

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        named = kwargs or {}
        if func is Tensor.__bool__ and args[0].is_meta:
            return True
        if func not in (torch.nonzero, Tensor.nonzero):
            return func(*args, **named)
        found = torch.empty(0, args[0].ndim, dtype=torch.int64, device=args[0].device)
        return tuple(found.unbind(1)) if named.get("as_tuple") else found


class _Mask(Tensor):
    """A mask without values that says how it was asked for."""

    recorded: RecordedMask


def _recording_mask(
    *_: Any,
    mask_function: Callable[..., Any],
    local_size: int | None = None,
    use_vmap: bool = False,
    **arguments: Any,
) -> Tensor:
    """Takes the place of a maker of masks. transformers sets use_vmap for masks of a model's own."""
    mask = torch.empty(1, 1, 1, 1, device="meta").as_subclass(_Mask)
    mask.recorded = _judge_mask(mask_function, local_size, use_vmap)
    return mask


def _judge_mask(mask_function: Callable[..., Any], window: int | None, is_own: bool) -> RecordedMask:
    """Compare a mask with causal attention in a window, for rows about the ends of the first window.

    A chunk's size arrives as a window's does; a chunk ends for all of its rows at once.
    """
    span = window or 4
    rows = torch.tensor([0, 1, span - 1, span, span + 1], device="cpu")[:, None]
    keys = torch.arange(span + 3, device="cpu")
    first = torch.zeros((), dtype=torch.int64, device="cpu")
    try:
        seen = mask_function(first, first, rows, keys)
        if seen.is_meta:
            return RecordedMask(window, is_plain=False, is_causal=True)
    except Exception:  # it reads values of the pass, which the meta device does not have
        return RecordedMask(window, is_plain=False, is_causal=True)
    causal = keys <= rows
    plain = causal & (keys > rows - window) if window else causal
    same = torch.equal(seen.expand_as(plain), plain)
    return RecordedMask(window, is_plain=same and not is_own, is_causal=not torch.any(seen & ~causal).item())


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
        raise _UndeliveredError("its layers do not pass keyword arguments on to attention")
    mask = getattr(attention_mask, "recorded", None)
    arguments["attention_mask"] = None if mask is not None and mask.is_plain else attention_mask
    given = frozenset(name for name, value in arguments.items() if value is not None and not isinstance(value, bool))
    layer: Any = module.layer_idx
    asked = arguments.get("is_causal")
    causal = bool(getattr(module, "is_causal", True) if asked is None else asked) and (mask is None or mask.is_causal)
    window = arguments.get("sliding_window")
    latent = latent_projection(module)
    width = value.shape[-1] if latent is None else latent.widths[1]
    shape = KVShape(key.shape[1], key.shape[-1], value.shape[-1], latent is not None)
    calls.append(AttentionCall(int(layer), shape, given, causal, window, mask))
    return query.new_zeros(query.shape[0], query.shape[2], query.shape[1], width), None


def _check_calls(name: str, calls: Sequence[AttentionCall]) -> None:
    """Raises CheckpointError for calls of attention that Eyas does not answer, with the layers that make them."""
    if both := [call.layer for call in calls if not call.causal]:
        raise _refusal(name, f"{_layers(both)} attend in both directions", "tokens that are all known before the pass")
    arguments = {call.layer: call.arguments - SUPPORTED_ARGUMENTS - IGNORED_ARGUMENTS for call in calls}
    unknown = sorted(set().union(*arguments.values()))
    if unknown:
        where = _layers([layer for layer, given in arguments.items() if given])
        what = f"{where} give attention arguments that Eyas does not support:{_listed(unknown)}"
        raise _refusal(name, what, "the meaning of these arguments in its attention")


def _listed(names: Iterable[str]) -> str:
    return "".join(f" {name}" for name in names)
