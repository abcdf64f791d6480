"""How EAGLE heads are written down by different projects: their config.json and tensor names in, one spelling out.

The spelling is that of the first publication. Facts and their sources stand in docs/heads.md.

What an EAGLE head is: its folder and the target's config in, sizes and conventions out. Reads no tensor.

The tensors that a head's config implies, in the layout of the first publication: names, shapes, which may be absent.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from eyas.errors import CheckpointError
from eyas.models.checkpoint import WIRING_KEY, flag, get_int, read_config, real, tensor_names
from eyas.models.heads.features import FINAL_NORM_OUTPUT

Settings = Mapping[str, Any]
Output = Literal["state", "normed", "bare"]

TAP_KEYS = ("eagle_aux_hidden_state_layer_ids", "aux_hidden_state_layer_ids")

# Of tensor names: what is found, and the spelling that it stands for. A layer's number is spelled out afterwards.
SPELLINGS = (
    (r"^model\.", ""),
    (r"^fusion_fc\.", "fc."),
    (r"^draft_id_to_target_id$", "d2t"),
    (r"^midlayer\.(?!\d)", "layers.0."),
    (r"^midlayers?\.(?=\d)", "layers."),
    (r"^layers\.([1-9]\d*)\.hidden_norm\.", r"layers.\1.input_layernorm."),
)


def fed_on(norm_output: bool) -> Output:
    """EAGLE-3.1's meaning: whether the normed state is what is fed on."""
    return "normed" if norm_output else "state"


def before_lm_head(norm_output: bool) -> Output:
    """SpecForge's meaning: whether lm_head reads the normed state."""
    return "state" if norm_output else "bare"


@dataclass(frozen=True)
class CheckpointFormat:
    """A way to write config.json.

    writes: whether a config.json is of this dialect. flatten: its settings on one level, under the names of the first
    publication, with the tapped layers as `taps`, by their inputs. norm_output: what that setting means for a head without a
    norm for each tapped state; for one with them, it is EAGLE-3.1's everywhere.
    """

    name: str
    writes: Callable[[Settings], bool]
    flatten: Callable[[Settings], dict[str, Any]]
    norm_output: Callable[[bool], Output] = fed_on


@dataclass(frozen=True)
class UnsupportedFormat:
    """Heads that look like EAGLE's, and are others. what: in words, with what makes them so. settings: keys of config.json
    that only they have, if set. words: in the names of their architecture or model type, in lower case. tensors: ends of
    names that only they have."""

    what: str
    settings: tuple[str, ...] = ()
    words: tuple[str, ...] = ()
    tensors: tuple[str, ...] = ()

    def claims(self, config: Settings, names: Iterable[str]) -> bool:
        """Whether a head is one of these."""
        called = (*(config.get("architectures") or ()), config.get("model_type"), config.get("speculators_model_type"))
        return (
            any(config.get(key) for key in self.settings)
            or any(word in str(name).lower() for name in called for word in self.words)
            or any(name.endswith(self.tensors) for name in names if self.tensors)
        )


def foreign(config: Settings, names: Iterable[str]) -> str:
    """What a head is, if it is none of EAGLE's; else empty. names: of its tensors."""
    names = tuple(names)
    return next((other.what for other in FOREIGN if other.claims(config, names)), "")


def dialect_of(config: Settings) -> CheckpointFormat:
    """The first that claims it."""
    return next(dialect for dialect in DIALECTS if dialect.writes(config))


def canonical(name: str, kind: str) -> str:
    """A tensor's name as the first publication of its kind, "eagle" or "eagle3", spells it."""
    for pattern, spelling in SPELLINGS:
        name = re.sub(pattern, spelling, name)
    return re.sub(r"^layers\.0\.", "midlayer.", name) if kind == "eagle3" else name


def _architecture(*names: str) -> Callable[[Settings], bool]:
    return lambda config: bool(set(config.get("architectures") or ()) & set(names))


def _flat(config: Settings) -> dict[str, Any]:
    """Layer ids on the first level count inputs of layers."""
    return {**config, "taps": next((config[key] for key in TAP_KEYS if config.get(key)), None)}


def _with_eagle_config(config: Settings) -> dict[str, Any]:
    """Layer ids in eagle_config count outputs if they begin with 1, the lowest that is written so; else inputs."""
    nested = _nested(config, "eagle_config")
    taps = next((nested[key] for key in TAP_KEYS if nested.get(key)), None)
    if isinstance(taps, list) and taps[0] == 1 and all(isinstance(tap, int) for tap in taps):
        taps = [tap + 1 for tap in taps]
    flat = _flat(config)
    return {**flat, "taps": taps or flat["taps"]}


def _with_transformer_config(config: Settings) -> dict[str, Any]:
    """Sizes stand in a config of their own; what stands beside it goes first."""
    stated = {key: value for key, value in config.items() if value is not None}
    return _flat({**_nested(config, "transformer_layer_config"), **stated})


def _nested(config: Settings, key: str) -> Settings:
    """A config within a config, empty where there is none. Raises CheckpointError for what is none."""
    found = config.get(key) or {}
    if not isinstance(found, Mapping):
        raise CheckpointError(f"{key} in the head's config.json is {found!r}; it must be a mapping")
    return found


DIALECTS = (
    CheckpointFormat("vLLM speculators", lambda config: "speculators_model_type" in config, _with_transformer_config),
    CheckpointFormat(
        "SpecForge / SGLang",
        _architecture("LlamaForCausalLMEagle3", "LlamaForCausalLMEagle"),
        _with_eagle_config,
        norm_output=before_lm_head,
    ),
    CheckpointFormat("vLLM", _architecture("Eagle3LlamaForCausalLM", "EagleLlamaForCausalLM"), _with_eagle_config),
    CheckpointFormat("SafeAILab", lambda config: True, _with_eagle_config),
)

FOREIGN = (
    UnsupportedFormat(
        "a block diffusion head (DFlash or one of its kin), which drafts a block of tokens at once",
        settings=("dflash_config",),
        words=("dflash", "dspark", "domino"),
    ),
    UnsupportedFormat(
        "a P-EAGLE head, which drafts all levels in one pass",
        settings=("parallel_drafting", "ptd_token_id"),
        words=("peagle",),
        tensors=("mask_hidden",),
    ),
    UnsupportedFormat(
        "a HASS head with norms of its own over embeddings and features; those without load as eagle2",
        settings=("add_para_norm", "layernorms"),
        tensors=("embedding_layernorm.weight", "hidden_states_layernorm.weight", "enorm.weight", "hnorm.weight"),
    ),
    UnsupportedFormat("a head with a norm of its own before lm_head", tensors=("pre_lm_head_layernorm.weight",)),
    UnsupportedFormat(
        "a head with norms of queries and keys", tensors=("self_attn.q_norm.weight", "self_attn.k_norm.weight")
    ),
)


Kind = Literal["eagle", "eagle3"]
InputNorms = Literal["none", "joint", "each"]

SUPPORTED_ACTIVATIONS = (None, "silu", "swish")


@dataclass(frozen=True)
class HeadWiring:
    """How to read a head that loads either way, and works only the right way.

    aux_hidden_state_layers: layers of the target whose *inputs* are its features; the number of layers means the state before the final norm.
    norm_before_residual: whether the residual is taken behind hidden_norm, not before it.
    output: "state": logits from norm(state), the state is fed on; "normed": norm(state) gives logits and is fed on
    (EAGLE-3.1); "bare": the state gives logits, without a norm, and is fed on.
    """

    aux_hidden_state_layers: tuple[int, ...]
    norm_before_residual: bool = False
    output: Output = "state"


@dataclass(frozen=True)
class EagleHeadConfig:
    """Sizes of an EAGLE head. kind: "eagle" for those of EAGLE-1 and -2.

    input_norms: what is normed before fc: nothing, the states side by side ("joint"), or each of them by itself.
    *_bias: which projections have one. rotary: parameters as transformers takes them.
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
    def full_vocabulary(self) -> bool:
        """Whether draft ids are target ids, so that no map is needed."""
        return self.draft_vocab_size == self.vocab_size

    @property
    def aux_hidden_state_layers(self) -> tuple[int, ...]:
        return self.wiring.aux_hidden_state_layers


def head_config(folder: Path, target: Mapping[str, Any], kind: Kind = "eagle3") -> EagleHeadConfig:
    """The head in `folder`, checked against the target's config.json. Raises CheckpointError."""
    raw, source = read_config(folder), folder / "config.json"
    names = {canonical(name, kind) for name in tensor_names(folder)}
    if other := foreign(raw, names):
        raise CheckpointError(
            f"{folder} holds {other}; Eyas knows the heads of EAGLE-1, EAGLE-2 and EAGLE-3. Take one of these"
        )
    dialect = dialect_of(raw)
    head = dialect.flatten(raw)
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
        rms_norm_eps=real(head, "rms_norm_eps", source, 1e-6),
        rotary=_rotary(head, source),
        max_positions=get_int(head, "max_position_embeddings", source, 2048),
        wiring=recorded(raw, source) or _stated(head, dialect, kind, names, target, source),
        input_norms=_input_norms(head, names, source),
        fc_bias="fc.bias" in names or (kind == "eagle" and flag(head, "bias", source)),
        qkv_bias=_has(names, "q_proj.bias") or any(flag(head, key, source) for key in ("attention_bias", "qkv_bias")),
        out_bias=_has(names, "o_proj.bias"),
    )
    _check(config, head, target, folder)
    return config


def recorded(raw: Mapping[str, Any], source: Path) -> HeadWiring | None:
    """The reading that a check has written into a config.json, if there is one. Raises CheckpointError."""
    record = raw.get(WIRING_KEY)
    if record is None:
        return None
    match record:
        case {
            "aux_hidden_state_layers": [*taps],
            "norm_before_residual": bool(normed),
            "output": "state" | "normed" | "bare" as output,
        }:
            if all(type(tap) is int for tap in taps):
                return HeadWiring(tuple(taps), normed, output)
    raise CheckpointError(f"{source}: {WIRING_KEY} is {record!r}; remove it, or have it written anew")


def _stated(
    head: Mapping[str, Any], dialect: CheckpointFormat, kind: Kind, names: set[str], target: Mapping[str, Any], source: Path
) -> HeadWiring:
    """What the config says, and the usual where it says nothing."""
    if kind == "eagle":
        return HeadWiring((FINAL_NORM_OUTPUT,), output="bare")
    layers = get_int(target, "num_hidden_layers", "the target's config")
    taps = head.get("taps") or (2, layers // 2, layers - 3)
    if not isinstance(taps, list | tuple) or not all(type(tap) is int and 0 <= tap <= layers for tap in taps):
        given = "is" if head.get("taps") else "is left out, which means"
        raise CheckpointError(
            f"{source}: eagle_aux_hidden_state_layer_ids {given} {taps!r}; it must be a list of layer numbers from 0 to "
            f"{layers}, which is the state behind the target's last layer"
        )
    output = fed_on(False)
    if head.get("norm_output") is not None:
        meaning = fed_on if "fc_norm.0.weight" in names else dialect.norm_output
        output = meaning(flag(head, "norm_output", source))
    return HeadWiring(tuple(taps), flag(head, "norm_before_residual", source), output)


def _input_norms(head: Mapping[str, Any], names: set[str], source: Path) -> InputNorms:
    joint = "input_norm.weight" in names or flag(head, "norm_before_fc", source)
    each = "fc_norm.0.weight" in names or flag(head, "fc_norm", source)
    if joint and each:
        raise CheckpointError(f"{source} asks for norm_before_fc and for fc_norm; a head can have one of them only")
    return "joint" if joint else "each" if each else "none"


def _rotary(head: Mapping[str, Any], source: Path) -> dict[str, Any]:
    """The head's own base and scaling; those of the target do not apply."""
    found = head.get("rope_parameters") or head.get("rope_scaling") or {}
    if not isinstance(found, Mapping):
        raise CheckpointError(f"{source}: rope_scaling is {found!r}; it must be a mapping")
    parameters = {"rope_theta": real(head, "rope_theta", source, 10000.0), **found}
    parameters["rope_type"] = parameters.pop("type", None) or parameters.get("rope_type") or "default"
    return parameters


def _has(names: set[str], end: str) -> bool:
    return any(name.endswith(end) for name in names)


def _check(config: EagleHeadConfig, head: Mapping[str, Any], target: Mapping[str, Any], folder: Path) -> None:
    """Raises CheckpointError unless the head was made for such a target and is of a kind that is known."""
    for what, mine, its in (
        ("hidden size", config.target_hidden, int(target["hidden_size"])),
        ("vocabulary size", config.vocab_size, int(target["vocab_size"])),
    ):
        if mine != its:
            raise CheckpointError(f"{folder} was made for a target of {what} {mine}, but this target has {its}")
    if config.kind == "eagle" and config.hidden != config.target_hidden:
        raise CheckpointError(
            f"{folder} is {config.hidden} wide, its target {config.target_hidden}; an EAGLE-1 head is as wide as its target"
        )
    if head.get("hidden_act") not in SUPPORTED_ACTIVATIONS:
        raise CheckpointError(f"{folder} has the activation {head['hidden_act']!r}; only silu is known")


Shapes = dict[str, tuple[int, ...]]


def prefix(config: EagleHeadConfig, layer: int) -> str:
    """What the names of a layer's tensors begin with."""
    return "midlayer." if config.kind == "eagle3" and layer == 0 else f"layers.{layer}."


def layout(c: EagleHeadConfig) -> Shapes:
    """Names and shapes of all tensors that the head may have."""
    shapes = {**fuser_layout(c), "embed_tokens.weight": (c.vocab_size, c.hidden)}
    for layer in range(c.num_layers):
        shapes |= {prefix(c, layer) + name: shape for name, shape in _layer(c, layer).items()}
    if c.kind == "eagle":
        return shapes
    return shapes | {
        "norm.weight": (c.hidden,),
        "lm_head.weight": (c.draft_vocab_size, c.hidden),
        "d2t": (c.draft_vocab_size,),
        "t2d": (c.vocab_size,),
    }


def optional(c: EagleHeadConfig) -> set[str]:
    """Of these, the ones that may be absent: the target's embedding serves, the vocabulary is whole, no norm is used."""
    own_embedding = c.hidden != c.target_hidden
    return (
        {"t2d"}
        | (set() if own_embedding else {"embed_tokens.weight"})
        | ({"d2t"} if c.full_vocabulary else set())
        | ({"norm.weight"} if c.wiring.output == "bare" else set())
    )


def fuser_layout(c: EagleHeadConfig) -> Shapes:
    """fc and what is normed before it: of EAGLE-3 what runs beside the target."""
    states = len(c.aux_hidden_state_layers)
    width = states * c.target_hidden if c.kind == "eagle3" else 2 * c.hidden
    shapes: Shapes = {"fc.weight": (c.hidden, width)}
    if c.fc_bias:
        shapes["fc.bias"] = (c.hidden,)
    if c.input_norms == "joint":
        shapes["input_norm.weight"] = (width,)
    if c.input_norms == "each":
        shapes |= {f"fc_norm.{state}.weight": (c.target_hidden,) for state in range(states)}
    return shapes


def _layer(c: EagleHeadConfig, layer: int) -> Shapes:
    """The first layer of EAGLE-3 reads embedding and feature side by side, that of EAGLE-1 has no norm before attention."""
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
