"""Config of an EAGLE head, read from a checkpoint of any project: sizes, wiring, and the tensors that these imply.

To support another project's format, read its settings in `_flatten` and add its tensor names to TENSOR_SPELLINGS.
docs/models.md shows the formats. Reads names of tensors, never their values.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from eyas.config.file_values import get_setting, shown
from eyas.errors import CheckpointError
from eyas.models.checkpoint import WIRING_KEY, Checkpoint
from eyas.models.heads.layers import BackboneSizes, Shapes, check_target, layer_shapes, read_layer_sizes
from eyas.models.hidden_states import FINAL_NORM_OUTPUT

Settings = Mapping[str, Any]
Kind = Literal["eagle", "eagle3", "peagle"]
InputNorms = Literal["none", "joint", "each"]
Output = Literal["state", "normed", "bare"]

SUPPORTED_ACTIVATIONS = (None, "silu", "swish")
SPECFORGE_ARCHITECTURES = {"LlamaForCausalLMEagle3", "LlamaForCausalLMEagle"}
# Levels of P-EAGLE's published heads (2602.01469).
PEAGLE_DEPTH = 7
# Key of config.json under which P-EAGLE heads of ours state the depths that they were trained for.
DEPTH_KEY = "eyas_num_depths"
LAYER_ID_KEYS = ("eagle_aux_hidden_state_layer_ids", "aux_hidden_state_layer_ids")


@dataclass(frozen=True)
class HeadWiring:
    """The settings of a head that fit its tensors either way, and give good drafts only one way.

    Attributes:
        aux_hidden_state_layers: layers of the target whose *inputs* are its features; the number of layers means the state
            before the final norm.
        norm_before_residual: whether the residual is taken after hidden_norm instead of before it.
        output: "state": logits from norm(state), and the next step reads the state. "normed": logits from norm(state), and
            the next step reads norm(state) (EAGLE-3.1). "bare": logits from the state without a norm, and the next step
            reads it.
        sample_from_anchor: of block heads (DFlash, DSpark): whether the row at a position predicts the token after it
            instead of the token at it.
    """

    aux_hidden_state_layers: tuple[int, ...]
    norm_before_residual: bool = False
    output: Output = "state"
    sample_from_anchor: bool = False


@dataclass(frozen=True)
class LayeredHeadConfig(BackboneSizes):
    """Sizes of a head with decoder layers, of any kind, and how it is wired."""

    target_hidden: int
    draft_vocab_size: int
    wiring: HeadWiring

    @property
    def aux_hidden_state_layers(self) -> tuple[int, ...]:
        return self.wiring.aux_hidden_state_layers

    @property
    def optional_tensors(self) -> set[str]:
        """The tensors that may be absent: the target's embedding and lm_head are used, or the vocabulary is whole."""
        is_whole, is_as_wide = self.draft_vocab_size == self.vocab_size, self.hidden == self.target_hidden
        absent = {"t2d": True, "d2t": is_whole, "embed_tokens.weight": is_as_wide, "lm_head.weight": is_whole and is_as_wide}
        return {name for name, may_be in absent.items() if may_be}


@dataclass(frozen=True)
class EagleHeadConfig(LayeredHeadConfig):
    """Sizes of an EAGLE head and its layers.

    Attributes:
        kind: "eagle" for EAGLE-1 and -2, "peagle" for P-EAGLE, which is EAGLE-3 with parallel rows.
        mask_token_id: whose embedding these rows have.
        depth: levels that they draft; 0 for other kinds.
        input_norms: what is normed before fc: nothing, the hidden states side by side ("joint"), or each of them. *_bias:
            which projections have one.
    """

    kind: Kind
    input_norms: InputNorms = "none"
    fc_bias: bool = False
    qkv_bias: bool = False
    out_bias: bool = False
    mask_token_id: int | None = None
    depth: int = 0

    @property
    def optional_tensors(self) -> set[str]:
        """The tensors that may be absent; of a head whose output is bare a norm, too."""
        return super().optional_tensors | ({"norm.weight"} if self.wiring.output == "bare" else set())


def _flatten(config: Settings) -> dict[str, Any]:
    """Return the settings of any format on one level, under the names of the first publication.

    Sizes may stand in transformer_layer_config (vLLM speculators); settings beside it take precedence. Layer ids may stand
    in eagle_config, where they count outputs if they begin with 1, the lowest id of an output. Everywhere else, and in
    `aux_hidden_state_layers` of the result, they count inputs.
    """
    stated = {key: value for key, value in config.items() if value is not None}
    flat = {**(config.get("transformer_layer_config") or {}), **stated}
    nested = config.get("eagle_config") or {}
    layers = next((nested[key] for key in LAYER_ID_KEYS if nested.get(key) is not None), None)
    if isinstance(layers, list) and layers[:1] == [1] and all(isinstance(layer, int) for layer in layers):
        layers = [layer + 1 for layer in layers]
    layers = next((flat[key] for key in LAYER_ID_KEYS if flat.get(key) is not None), None) if layers is None else layers
    return {**flat, "aux_hidden_state_layers": layers}


def _output(head: Settings, names: set[str], source: Path) -> Output:
    """Return what norm_output means.

    SpecForge: whether lm_head reads the normed state. Other formats, and a head with a norm per hidden state: whether the
    next step does (EAGLE-3.1).
    """
    if head.get("norm_output") is None:
        return "state"
    is_normed = get_setting(bool, head, "norm_output", source, False)
    is_specforge = SPECFORGE_ARCHITECTURES & set(head.get("architectures") or ()) and "speculators_model_type" not in head
    if is_specforge and "fc_norm.0.weight" not in names:
        return "state" if is_normed else "bare"
    return "normed" if is_normed else "state"


# Tensor names of other formats, as patterns, and the spelling of the first publication.
TENSOR_SPELLINGS = (
    (r"^model\.", ""),
    (r"^fusion_fc\.", "fc."),
    (r"^draft_id_to_target_id$", "d2t"),
    (r"^midlayer\.(?!\d)", "layers.0."),
    (r"^midlayers?\.(?=\d)", "layers."),
    (r"^layers\.([1-9]\d*)\.hidden_norm\.", r"layers.\1.input_layernorm."),
)


PEAGLE = "a P-EAGLE head, which drafts all levels in one pass and is for the method peagle"
MASK_TOKEN_KEYS = ("mask_token_id", "pard_token", "ptd_token_id")
# Heads that look like EAGLE's and are not, in words, and marks that only they have: a setting that is not empty, a part of
# their architecture or model type, or the end of a tensor's name.
UNSUPPORTED_HEADS = {
    "a block diffusion head, which drafts a block of tokens at once and is for the methods dflash, dflash2 or dspark": (
        "dflash_config", "dflash", "dspark", "domino",
    ),
    PEAGLE: ("parallel_drafting", "ptd_token_id", "peagle", "mask_hidden"),
    "a HASS head with norms of its own over embeddings and features; those without load as eagle2": (
        "add_para_norm", "layernorms",
        "embedding_layernorm.weight", "hidden_states_layernorm.weight", "enorm.weight", "hnorm.weight",
    ),
    "a head with a norm of its own before lm_head": ("pre_lm_head_layernorm.weight",),
    "a head with norms of queries and keys": ("self_attn.q_norm.weight", "self_attn.k_norm.weight"),
}  # fmt: skip


def canonical_name(name: str, kind: Kind) -> str:
    """Return a tensor's name as the first publication of its kind spells it."""
    name = respelled(name, TENSOR_SPELLINGS)
    return re.sub(r"^layers\.0\.", "midlayer.", name) if kind != "eagle" else name


def respelled(name: str, spellings: Sequence[tuple[str, str]]) -> str:
    """Return a tensor's name with each pattern of the spellings replaced."""
    for pattern, spelling in spellings:
        name = re.sub(pattern, spelling, name)
    return name


def find_eagle_kind(tensors: Iterable[str]) -> Kind | None:
    """Return the kind of an EAGLE head, by the names of tensors that only this kind has; None for another checkpoint."""
    names = {canonical_name(name, "eagle3") for name in tensors}
    if "mask_hidden" in names:
        return "peagle"
    if "midlayer.hidden_norm.weight" in names:
        return "eagle3"
    return "eagle" if {"fc.weight", "midlayer.self_attn.q_proj.weight"} <= names else None


def trained_depth(raw: Settings) -> int:
    """Return the levels that a P-EAGLE head was made for: those that its config states (ours, vLLM speculators), else the
    paper's.
    """
    if (depth := raw.get(DEPTH_KEY)) is not None:
        return int(depth)
    match raw.get("speculators_config"):
        case {"proposal_methods": [{"speculative_tokens": int(depth)}, *_]} if depth > 0:
            return depth
    return PEAGLE_DEPTH


def read_head_config(
    checkpoint: Checkpoint, target: Settings, kind: Kind = "eagle3", wiring: HeadWiring | None = None
) -> EagleHeadConfig:
    """Return the config of a head, checked against the target's config.json. wiring: replaces what its config says.

    Raises CheckpointError.
    """
    raw, source = checkpoint.head_config, checkpoint.config_file
    names = {canonical_name(name, kind) for name in checkpoint.files}
    _check_kind(raw, names, kind, checkpoint.folder)
    head = _flatten(raw)
    sizes = read_sizes(head, get_setting(int, head, "num_hidden_layers", source, 1), source)
    config = EagleHeadConfig(
        **sizes,
        kind=kind,
        wiring=wiring or recorded_wiring(raw, source) or _stated_wiring(head, kind, names, target, source),
        input_norms=_input_norms(head, names, source),
        fc_bias="fc.bias" in names or (kind == "eagle" and get_setting(bool, head, "bias", source, False)),
        qkv_bias=any(name.endswith("q_proj.bias") for name in names)
        or any(get_setting(bool, head, key, source, False) for key in ("attention_bias", "qkv_bias")),
        out_bias=any(name.endswith("o_proj.bias") for name in names),
        mask_token_id=_mask_token_id(head, sizes["vocab_size"], source) if kind == "peagle" else None,
        depth=trained_depth(raw) if kind == "peagle" else 0,
    )
    _check(config, head, target, checkpoint.folder)
    return config


def read_sizes(head: Settings, num_layers: int, source: Path) -> dict[str, Any]:
    """Return the sizes that a head's settings state, as fields of its config. Raises CheckpointError if one is missing."""
    sizes, vocab_size = read_layer_sizes(head, source), get_setting(int, head, "vocab_size", source)
    return {
        **vars(sizes),
        "target_hidden": get_setting(int, head, "target_hidden_size", source, sizes.hidden),
        "num_layers": num_layers,
        "vocab_size": vocab_size,
        "draft_vocab_size": get_setting(int, head, "draft_vocab_size", source, vocab_size),
        "rotary": read_rotary(head, source),
        "max_positions": get_setting(int, head, "max_position_embeddings", source, 2048),
    }


def _mask_token_id(head: Settings, vocab_size: int, source: Path) -> int:
    key = next((key for key in MASK_TOKEN_KEYS if head.get(key) is not None), MASK_TOKEN_KEYS[0])
    value = head.get(key)
    if type(value) is not int or not 0 <= value < vocab_size:
        raise CheckpointError(f"{source}: {key} is {value!r}; it must be a token id below {vocab_size}")
    return value


def _check_kind(raw: Settings, names: set[str], asked: Kind, folder: Path) -> None:
    """Raises CheckpointError for a head of another kind than the one asked for."""
    called = (*(raw.get("architectures") or ()), raw.get("model_type"), raw.get("speculators_model_type"))
    words = " ".join(map(str, called)).lower()
    if asked == "peagle" and "mask_hidden" not in names:
        raise CheckpointError(f"{folder} is no P-EAGLE head: it lacks the tensor mask_hidden. Take the method eagle3 for it")
    for kind, marks in UNSUPPORTED_HEADS.items():
        is_marked = any(raw.get(mark) or mark in words for mark in marks) or any(name.endswith(marks) for name in names)
        if is_marked and not (asked == "peagle" and kind == PEAGLE):
            raise CheckpointError(f"{folder} holds {kind}; Eyas knows the heads of EAGLE-1, EAGLE-2 and EAGLE-3; take one")


def recorded_wiring(raw: Settings, source: Path) -> HeadWiring | None:
    """Return the wiring that `eyas check head --write` recorded in a config.json, if it did."""
    record = raw.get(WIRING_KEY)
    if record is None:
        return None
    match record:
        case {
            "aux_hidden_state_layers": [*layers],
            "norm_before_residual": bool(normed),
            "output": "state" | "normed" | "bare" as output,
        } if all(type(layer) is int for layer in layers) and isinstance(record.get("sample_from_anchor", False), bool):
            return HeadWiring(tuple(layers), normed, output, record.get("sample_from_anchor", False))
    raise CheckpointError(
        f"{source}: {WIRING_KEY} is {record!r}, which is no record of Eyas; remove it, and run `eyas check head --write`"
    )


def _stated_wiring(head: Settings, kind: Kind, names: set[str], target: Settings, source: Path) -> HeadWiring:
    """Return what the config says, with the usual values for what it leaves out."""
    if kind == "eagle":
        return HeadWiring((FINAL_NORM_OUTPUT,), output="bare")
    num_layers = get_setting(int, target, "num_hidden_layers", "the target's config")
    stated = head.get("aux_hidden_state_layers")
    layers = (2, num_layers // 2, num_layers - 3) if stated is None else stated
    ids = layers if isinstance(layers, list | tuple) else ()
    if not ids or not all(type(layer) is int and 0 <= layer <= num_layers for layer in ids):
        given = "is left out, which means" if stated is None else "is"
        raise CheckpointError(
            f"{source}: eagle_aux_hidden_state_layer_ids {given} {shown(layers)}; it must be a list of layer numbers from 0 "
            f"to {num_layers}, which is the state behind the target's last layer"
        )
    norm_before_residual = get_setting(bool, head, "norm_before_residual", source, False)
    return HeadWiring(tuple(layers), norm_before_residual, _output(head, names, source))


def _input_norms(head: Settings, names: set[str], source: Path) -> InputNorms:
    joint = "input_norm.weight" in names or get_setting(bool, head, "norm_before_fc", source, False)
    each = "fc_norm.0.weight" in names or get_setting(bool, head, "fc_norm", source, False)
    if joint and each:
        raise CheckpointError(f"{source} asks for norm_before_fc and for fc_norm; a head can have one of them only")
    return "joint" if joint else "each" if each else "none"


def read_rotary(head: Settings, source: Path) -> dict[str, Any]:
    """Return the head's own base and scaling; those of the target do not apply."""
    found = head.get("rope_parameters") or head.get("rope_scaling") or {}
    parameters = {**found, "rope_theta": get_setting(float, {**head, **found}, "rope_theta", source, 10000.0)}
    parameters["rope_type"] = parameters.pop("type", None) or parameters.get("rope_type") or "default"
    return parameters


def _check(config: EagleHeadConfig, head: Settings, target: Settings, folder: Path) -> None:
    """Raises CheckpointError unless the head was made for this target and has an activation that Eyas supports."""
    check_target(folder, target, config.target_hidden, config.vocab_size)
    if config.kind == "eagle" and config.hidden != config.target_hidden:
        raise CheckpointError(
            f"{folder} is {config.hidden} wide, its target {config.target_hidden}; an EAGLE-1 head is as wide as its target"
        )
    if head.get("hidden_act") not in SUPPORTED_ACTIVATIONS:
        raise CheckpointError(f"{folder} has the activation {head['hidden_act']!r}; Eyas supports silu only")


def layer_prefix(config: EagleHeadConfig, layer: int) -> str:
    """Return the prefix of the names of a layer's tensors."""
    return "midlayer." if config.kind != "eagle" and layer == 0 else f"layers.{layer}."


def tensor_shapes(c: EagleHeadConfig) -> Shapes:
    """Return names and shapes of all tensors that the head may have, as the first publication spells them."""
    shapes = {**fuser_shapes(c), "embed_tokens.weight": (c.vocab_size, c.hidden)}
    for layer in range(c.num_layers):
        shapes |= {layer_prefix(c, layer) + name: shape for name, shape in _layer_shapes(c, layer).items()}
    if c.kind == "eagle":
        return shapes
    if c.kind == "peagle":
        shapes["mask_hidden"] = (1, 1, len(c.aux_hidden_state_layers) * c.target_hidden)
    return shapes | {
        "norm.weight": (c.hidden,),
        "lm_head.weight": (c.draft_vocab_size, c.hidden),
        "d2t": (c.draft_vocab_size,),
        "t2d": (c.vocab_size,),
    }


def fuser_shapes(c: EagleHeadConfig) -> Shapes:
    """Return fc and the norms before it. In EAGLE-3 they run beside the target."""
    num_states = len(c.aux_hidden_state_layers)
    width = num_states * c.target_hidden if c.kind != "eagle" else 2 * c.hidden
    shapes: Shapes = {"fc.weight": (c.hidden, width)}
    if c.fc_bias:
        shapes["fc.bias"] = (c.hidden,)
    if c.input_norms == "joint":
        shapes["input_norm.weight"] = (width,)
    if c.input_norms == "each":
        shapes |= {f"fc_norm.{state}.weight": (c.target_hidden,) for state in range(num_states)}
    return shapes


def _layer_shapes(c: EagleHeadConfig, layer: int) -> Shapes:
    """Return the shapes of a layer. EAGLE-3's first layer reads embedding and feature side by side. EAGLE-1's has no norm
    before attention.
    """
    first = layer == 0
    shapes = layer_shapes(c, 2 * c.hidden if first and c.kind != "eagle" else c.hidden)
    if first and c.kind != "eagle":
        shapes["hidden_norm.weight"] = (c.hidden,)
    if not first or c.kind != "eagle":
        shapes["input_layernorm.weight"] = (c.hidden,)
    if c.qkv_bias:
        shapes |= {f"self_attn.{p}_proj.bias": shapes[f"self_attn.{p}_proj.weight"][:1] for p in "qkv"}
    if c.out_bias:
        shapes["self_attn.o_proj.bias"] = (c.hidden,)
    return shapes
