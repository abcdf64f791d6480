"""What an EAGLE head is, read from a checkpoint of any project: sizes, wiring, and the tensors that these imply.

To support another project's format, add a CheckpointFormat to CHECKPOINT_FORMATS and its tensor names to TENSOR_SPELLINGS.
Facts about the formats and their sources stand in docs/heads.md. Reads names of tensors, never their values.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from eyas.errors import CheckpointError
from eyas.models.checkpoint import WIRING_KEY, get_bool, get_float, get_int, read_config, tensor_names
from eyas.models.heads.layers import FINAL_NORM_OUTPUT

Settings = Mapping[str, Any]
Shapes = dict[str, tuple[int, ...]]
Kind = Literal["eagle", "eagle3"]
InputNorms = Literal["none", "joint", "each"]
Output = Literal["state", "normed", "bare"]

SUPPORTED_ACTIVATIONS = (None, "silu", "swish")
LAYER_ID_KEYS = ("eagle_aux_hidden_state_layer_ids", "aux_hidden_state_layer_ids")


@dataclass(frozen=True)
class HeadWiring:
    """The settings of a head that fit its tensors either way, and give good drafts only one way.

    aux_hidden_state_layers: layers of the target whose *inputs* are its features; the number of layers means the state
    before the final norm. norm_before_residual: whether the residual is taken after hidden_norm instead of before it.
    output: "state": logits from norm(state), and the next step reads the state. "normed": logits from norm(state), and the
    next step reads norm(state) (EAGLE-3.1). "bare": logits from the state without a norm, and the next step reads it.
    """

    aux_hidden_state_layers: tuple[int, ...]
    norm_before_residual: bool = False
    output: Output = "state"


@dataclass(frozen=True)
class EagleHeadConfig:
    """Sizes of an EAGLE head. kind: "eagle" for EAGLE-1 and -2.

    input_norms: what is normed before fc: nothing, the hidden states side by side ("joint"), or each of them.
    *_bias: which projections have one. rotary: RoPE parameters as transformers takes them.
    """

    kind: Kind
    target_hidden: int
    hidden: int
    intermediate: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    num_layers: int
    vocab_size: int
    draft_vocab_size: int
    rms_norm_eps: float
    rotary: Mapping[str, Any]
    max_positions: int
    wiring: HeadWiring
    input_norms: InputNorms = "none"
    fc_bias: bool = False
    qkv_bias: bool = False
    out_bias: bool = False

    @property
    def aux_hidden_state_layers(self) -> tuple[int, ...]:
        return self.wiring.aux_hidden_state_layers


@dataclass(frozen=True)
class CheckpointFormat:
    """A project's way to write config.json.

    matches: whether a config.json is of this format. flatten: its settings on one level, under the names of the first
    publication, with the layer ids as `aux_hidden_state_layers`, counted by inputs. norm_output: what that setting means
    for a head without a norm per hidden state; with such norms it has EAGLE-3.1's meaning in every format.
    """

    name: str
    matches: Callable[[Settings], bool]
    flatten: Callable[[Settings], dict[str, Any]]
    norm_output: Callable[[bool], Output]


def _next_step_reads_norm(norm_output: bool) -> Output:
    """EAGLE-3.1's meaning of norm_output: whether the next step reads the normed state."""
    return "normed" if norm_output else "state"


def _lm_head_reads_norm(norm_output: bool) -> Output:
    """SpecForge's meaning of norm_output: whether lm_head reads the normed state."""
    return "state" if norm_output else "bare"


def _is_architecture(*names: str) -> Callable[[Settings], bool]:
    return lambda config: bool(set(config.get("architectures") or ()) & set(names))


def _flat(config: Settings) -> dict[str, Any]:
    """Layer ids on the first level count inputs of layers."""
    return {**config, "aux_hidden_state_layers": next((config[key] for key in LAYER_ID_KEYS if config.get(key)), None)}


def _with_eagle_config(config: Settings) -> dict[str, Any]:
    """Layer ids in eagle_config count outputs if they begin with 1, the lowest id of an output; else inputs."""
    nested = _nested(config, "eagle_config")
    layers = next((nested[key] for key in LAYER_ID_KEYS if nested.get(key)), None)
    if isinstance(layers, list) and layers[0] == 1 and all(isinstance(layer, int) for layer in layers):
        layers = [layer + 1 for layer in layers]
    flat = _flat(config)
    return {**flat, "aux_hidden_state_layers": layers or flat["aux_hidden_state_layers"]}


def _with_transformer_config(config: Settings) -> dict[str, Any]:
    """Sizes stand in a nested config; settings beside it take precedence."""
    stated = {key: value for key, value in config.items() if value is not None}
    return _flat({**_nested(config, "transformer_layer_config"), **stated})


def _nested(config: Settings, key: str) -> Settings:
    found = config.get(key) or {}
    if not isinstance(found, Mapping):
        raise CheckpointError(f"{key} in the head's config.json is {found!r}; it must be a mapping")
    return found


# The first format that matches is taken.
CHECKPOINT_FORMATS = (
    CheckpointFormat(
        "vLLM speculators",
        lambda config: "speculators_model_type" in config,
        _with_transformer_config,
        _next_step_reads_norm,
    ),
    CheckpointFormat(
        "SpecForge / SGLang",
        _is_architecture("LlamaForCausalLMEagle3", "LlamaForCausalLMEagle"),
        _with_eagle_config,
        _lm_head_reads_norm,
    ),
    CheckpointFormat(
        "vLLM",
        _is_architecture("Eagle3LlamaForCausalLM", "EagleLlamaForCausalLM"),
        _with_eagle_config,
        _next_step_reads_norm,
    ),
    CheckpointFormat("SafeAILab", lambda config: True, _with_eagle_config, _next_step_reads_norm),
)

# Tensor names of other formats, as patterns, and the spelling of the first publication.
TENSOR_SPELLINGS = (
    (r"^model\.", ""),
    (r"^fusion_fc\.", "fc."),
    (r"^draft_id_to_target_id$", "d2t"),
    (r"^midlayer\.(?!\d)", "layers.0."),
    (r"^midlayers?\.(?=\d)", "layers."),
    (r"^layers\.([1-9]\d*)\.hidden_norm\.", r"layers.\1.input_layernorm."),
)


@dataclass(frozen=True)
class UnsupportedHead:
    """Heads that look like EAGLE's and are not. description: what they are, for the error message.

    settings: keys of config.json that only they set. words: parts of their architecture or model type, in lower case.
    tensors: ends of names that only they have.
    """

    description: str
    settings: tuple[str, ...] = ()
    words: tuple[str, ...] = ()
    tensors: tuple[str, ...] = ()

    def matches(self, config: Settings, names: Iterable[str]) -> bool:
        """Whether a head is of this kind. names: of its tensors."""
        called = (*(config.get("architectures") or ()), config.get("model_type"), config.get("speculators_model_type"))
        return (
            any(config.get(key) for key in self.settings)
            or any(word in str(name).lower() for name in called for word in self.words)
            or any(name.endswith(self.tensors) for name in names if self.tensors)
        )


UNSUPPORTED_HEADS = (
    UnsupportedHead(
        "a block diffusion head (DFlash or one of its kin), which drafts a block of tokens at once",
        settings=("dflash_config",),
        words=("dflash", "dspark", "domino"),
    ),
    UnsupportedHead(
        "a P-EAGLE head, which drafts all levels in one pass",
        settings=("parallel_drafting", "ptd_token_id"),
        words=("peagle",),
        tensors=("mask_hidden",),
    ),
    UnsupportedHead(
        "a HASS head with norms of its own over embeddings and features; those without load as eagle2",
        settings=("add_para_norm", "layernorms"),
        tensors=("embedding_layernorm.weight", "hidden_states_layernorm.weight", "enorm.weight", "hnorm.weight"),
    ),
    UnsupportedHead("a head with a norm of its own before lm_head", tensors=("pre_lm_head_layernorm.weight",)),
    UnsupportedHead("a head with norms of queries and keys", tensors=("self_attn.q_norm.weight", "self_attn.k_norm.weight")),
)


def canonical_name(name: str, kind: Kind) -> str:
    """A tensor's name as the first publication of its kind spells it."""
    for pattern, spelling in TENSOR_SPELLINGS:
        name = re.sub(pattern, spelling, name)
    return re.sub(r"^layers\.0\.", "midlayer.", name) if kind == "eagle3" else name


def read_head_config(folder: Path, target: Settings, kind: Kind = "eagle3") -> EagleHeadConfig:
    """The head in `folder`, checked against the target's config.json. Raises CheckpointError."""
    raw, source = read_config(folder), folder / "config.json"
    names = {canonical_name(name, kind) for name in tensor_names(folder)}
    for unsupported in UNSUPPORTED_HEADS:
        if unsupported.matches(raw, names):
            raise CheckpointError(
                f"{folder} holds {unsupported.description}; Eyas knows the heads of EAGLE-1, EAGLE-2 and EAGLE-3. Take one "
                "of these"
            )
    checkpoint_format = next(each for each in CHECKPOINT_FORMATS if each.matches(raw))
    head = checkpoint_format.flatten(raw)
    hidden, heads = get_int(head, "hidden_size", source), get_int(head, "num_attention_heads", source)
    vocab_size = get_int(head, "vocab_size", source)
    config = EagleHeadConfig(
        kind=kind,
        target_hidden=get_int(head, "target_hidden_size", source, hidden),
        hidden=hidden,
        intermediate=get_int(head, "intermediate_size", source),
        num_heads=heads,
        num_kv_heads=get_int(head, "num_key_value_heads", source, heads),
        head_dim=get_int(head, "head_dim", source, hidden // heads),
        num_layers=get_int(head, "num_hidden_layers", source, 1),
        vocab_size=vocab_size,
        draft_vocab_size=get_int(head, "draft_vocab_size", source, vocab_size),
        rms_norm_eps=get_float(head, "rms_norm_eps", source, 1e-6),
        rotary=_rotary(head, source),
        max_positions=get_int(head, "max_position_embeddings", source, 2048),
        wiring=_recorded_wiring(raw, source) or _stated_wiring(head, checkpoint_format, kind, names, target, source),
        input_norms=_input_norms(head, names, source),
        fc_bias="fc.bias" in names or (kind == "eagle" and get_bool(head, "bias", source)),
        qkv_bias=any(name.endswith("q_proj.bias") for name in names)
        or any(get_bool(head, key, source) for key in ("attention_bias", "qkv_bias")),
        out_bias=any(name.endswith("o_proj.bias") for name in names),
    )
    _check(config, head, target, folder)
    return config


def _recorded_wiring(raw: Settings, source: Path) -> HeadWiring | None:
    """The wiring that `eyas check head --write` recorded in a config.json, if it did."""
    record = raw.get(WIRING_KEY)
    if record is None:
        return None
    match record:
        case {
            "aux_hidden_state_layers": [*layers],
            "norm_before_residual": bool(normed),
            "output": "state" | "normed" | "bare" as output,
        } if all(type(layer) is int for layer in layers):
            return HeadWiring(tuple(layers), normed, output)
    raise CheckpointError(
        f"{source}: {WIRING_KEY} is {record!r}, which is no record of Eyas; remove it, and run `eyas check head --write`"
    )


def _stated_wiring(
    head: Settings, checkpoint_format: CheckpointFormat, kind: Kind, names: set[str], target: Settings, source: Path
) -> HeadWiring:
    """What the config says, with the usual values for what it leaves out."""
    if kind == "eagle":
        return HeadWiring((FINAL_NORM_OUTPUT,), output="bare")
    num_layers = get_int(target, "num_hidden_layers", "the target's config")
    layers = head.get("aux_hidden_state_layers") or (2, num_layers // 2, num_layers - 3)
    if not isinstance(layers, list | tuple) or not all(type(layer) is int and 0 <= layer <= num_layers for layer in layers):
        given = "is" if head.get("aux_hidden_state_layers") else "is left out, which means"
        raise CheckpointError(
            f"{source}: eagle_aux_hidden_state_layer_ids {given} {layers!r}; it must be a list of layer numbers from 0 to "
            f"{num_layers}, which is the state behind the target's last layer"
        )
    output: Output = "state"
    if head.get("norm_output") is not None:
        meaning = _next_step_reads_norm if "fc_norm.0.weight" in names else checkpoint_format.norm_output
        output = meaning(get_bool(head, "norm_output", source))
    return HeadWiring(tuple(layers), get_bool(head, "norm_before_residual", source), output)


def _input_norms(head: Settings, names: set[str], source: Path) -> InputNorms:
    joint = "input_norm.weight" in names or get_bool(head, "norm_before_fc", source)
    each = "fc_norm.0.weight" in names or get_bool(head, "fc_norm", source)
    if joint and each:
        raise CheckpointError(f"{source} asks for norm_before_fc and for fc_norm; a head can have one of them only")
    return "joint" if joint else "each" if each else "none"


def _rotary(head: Settings, source: Path) -> dict[str, Any]:
    """The head's own base and scaling; those of the target do not apply."""
    found = head.get("rope_parameters") or head.get("rope_scaling") or {}
    if not isinstance(found, Mapping):
        raise CheckpointError(f"{source}: rope_scaling is {found!r}; it must be a mapping")
    parameters = {"rope_theta": get_float(head, "rope_theta", source, 10000.0), **found}
    parameters["rope_type"] = parameters.pop("type", None) or parameters.get("rope_type") or "default"
    return parameters


def _check(config: EagleHeadConfig, head: Settings, target: Settings, folder: Path) -> None:
    """Raises CheckpointError unless the head was made for this target and has an activation that Eyas supports."""
    for what, own, needed in (
        ("hidden size", config.target_hidden, int(target["hidden_size"])),
        ("vocabulary size", config.vocab_size, int(target["vocab_size"])),
    ):
        if own != needed:
            raise CheckpointError(f"{folder} was made for a target of {what} {own}, but this target has {needed}")
    if config.kind == "eagle" and config.hidden != config.target_hidden:
        raise CheckpointError(
            f"{folder} is {config.hidden} wide, its target {config.target_hidden}; an EAGLE-1 head is as wide as its target"
        )
    if head.get("hidden_act") not in SUPPORTED_ACTIVATIONS:
        raise CheckpointError(f"{folder} has the activation {head['hidden_act']!r}; Eyas supports silu only")


def layer_prefix(config: EagleHeadConfig, layer: int) -> str:
    """The prefix of the names of a layer's tensors."""
    return "midlayer." if config.kind == "eagle3" and layer == 0 else f"layers.{layer}."


def tensor_shapes(c: EagleHeadConfig) -> Shapes:
    """Names and shapes of all tensors that the head may have, as the first publication spells them."""
    shapes = {**fuser_shapes(c), "embed_tokens.weight": (c.vocab_size, c.hidden)}
    for layer in range(c.num_layers):
        shapes |= {layer_prefix(c, layer) + name: shape for name, shape in _layer_shapes(c, layer).items()}
    if c.kind == "eagle":
        return shapes
    return shapes | {
        "norm.weight": (c.hidden,),
        "lm_head.weight": (c.draft_vocab_size, c.hidden),
        "d2t": (c.draft_vocab_size,),
        "t2d": (c.vocab_size,),
    }


def optional_tensors(c: EagleHeadConfig) -> set[str]:
    """Tensors that may be absent: the target's embedding is used, the vocabulary is whole, or no norm is needed."""
    return (
        {"t2d"}
        | ({"embed_tokens.weight"} if c.hidden == c.target_hidden else set())
        | ({"d2t"} if c.draft_vocab_size == c.vocab_size else set())
        | ({"norm.weight"} if c.wiring.output == "bare" else set())
    )


def fuser_shapes(c: EagleHeadConfig) -> Shapes:
    """fc and the norms before it. In EAGLE-3 they run beside the target."""
    num_states = len(c.aux_hidden_state_layers)
    width = num_states * c.target_hidden if c.kind == "eagle3" else 2 * c.hidden
    shapes: Shapes = {"fc.weight": (c.hidden, width)}
    if c.fc_bias:
        shapes["fc.bias"] = (c.hidden,)
    if c.input_norms == "joint":
        shapes["input_norm.weight"] = (width,)
    if c.input_norms == "each":
        shapes |= {f"fc_norm.{state}.weight": (c.target_hidden,) for state in range(num_states)}
    return shapes


def _layer_shapes(c: EagleHeadConfig, layer: int) -> Shapes:
    """EAGLE-3's first layer reads embedding and feature side by side. EAGLE-1's has no norm before attention."""
    q, kv = c.num_heads * c.head_dim, c.num_kv_heads * c.head_dim
    first = layer == 0
    width = 2 * c.hidden if first and c.kind == "eagle3" else c.hidden
    shapes: Shapes = {
        "post_attention_layernorm.weight": (c.hidden,),
        "self_attn.q_proj.weight": (q, width),
        "self_attn.k_proj.weight": (kv, width),
        "self_attn.v_proj.weight": (kv, width),
        "self_attn.o_proj.weight": (c.hidden, q),
        "mlp.gate_proj.weight": (c.intermediate, c.hidden),
        "mlp.up_proj.weight": (c.intermediate, c.hidden),
        "mlp.down_proj.weight": (c.hidden, c.intermediate),
    }
    if first and c.kind == "eagle3":
        shapes["hidden_norm.weight"] = (c.hidden,)
    if not first or c.kind == "eagle3":
        shapes["input_layernorm.weight"] = (c.hidden,)
    if c.qkv_bias:
        shapes |= {f"self_attn.{p}_proj.bias": (size,) for p, size in (("q", q), ("k", kv), ("v", kv))}
    if c.out_bias:
        shapes["self_attn.o_proj.bias"] = (c.hidden,)
    return shapes
