"""What an EAGLE head is: its folder and the target's config in, sizes and conventions out. Reads no tensor."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from eyas.errors import CheckpointError
from eyas.models.checkpoint import RECORD, read_config, tensor_names
from eyas.models.heads.config import flag, real, whole_number
from eyas.models.heads.eagle.dialects import Dialect, Output, canonical, dialect_of, fed_on, foreign
from eyas.models.heads.features import AFTER_NORM

Kind = Literal["eagle", "eagle3"]
InputNorms = Literal["none", "joint", "each"]

SUPPORTED_ACTIVATIONS = (None, "silu", "swish")


@dataclass(frozen=True)
class Reading:
    """How to read a head that loads either way, and works only the right way.

    taps: layers of the target whose *inputs* are its features; the number of layers means the state before the final norm.
    norm_before_residual: whether the residual is taken behind hidden_norm, not before it.
    output: "state": logits from norm(state), the state is fed on; "normed": norm(state) gives logits and is fed on
    (EAGLE-3.1); "bare": the state gives logits, without a norm, and is fed on.
    """

    taps: tuple[int, ...]
    norm_before_residual: bool = False
    output: Output = "state"


@dataclass(frozen=True)
class HeadConfig:
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
    reading: Reading
    input_norms: InputNorms = "none"
    fc_bias: bool = False
    qkv_bias: bool = False
    out_bias: bool = False

    @property
    def full_vocabulary(self) -> bool:
        """Whether draft ids are target ids, so that no map is needed."""
        return self.draft_vocab_size == self.vocab_size

    @property
    def taps(self) -> tuple[int, ...]:
        return self.reading.taps


def head_config(folder: Path, target: Mapping[str, Any], kind: Kind = "eagle3") -> HeadConfig:
    """The head in `folder`, checked against the target's config.json. Raises CheckpointError."""
    raw, source = read_config(folder), folder / "config.json"
    names = {canonical(name, kind) for name in tensor_names(folder)}
    if other := foreign(raw, names):
        raise CheckpointError(
            f"{folder} holds {other}; Eyas knows the heads of EAGLE-1, EAGLE-2 and EAGLE-3. Take one of these"
        )
    dialect = dialect_of(raw)
    head = dialect.flatten(raw)
    hidden, heads = whole_number(head, "hidden_size", source), whole_number(head, "num_attention_heads", source)
    vocab_size = whole_number(head, "vocab_size", source)
    config = HeadConfig(
        kind=kind,
        target_hidden=whole_number(head, "target_hidden_size", source, hidden),
        hidden=hidden,
        intermediate=whole_number(head, "intermediate_size", source),
        num_heads=heads,
        num_kv_heads=whole_number(head, "num_key_value_heads", source, heads),
        head_dim=whole_number(head, "head_dim", source, hidden // heads),
        num_layers=whole_number(head, "num_hidden_layers", source, 1),
        vocab_size=vocab_size,
        draft_vocab_size=whole_number(head, "draft_vocab_size", source, vocab_size),
        rms_norm_eps=real(head, "rms_norm_eps", source, 1e-6),
        rotary=_rotary(head, source),
        max_positions=whole_number(head, "max_position_embeddings", source, 2048),
        reading=recorded(raw, source) or _stated(head, dialect, kind, names, target, source),
        input_norms=_input_norms(head, names, source),
        fc_bias="fc.bias" in names or (kind == "eagle" and flag(head, "bias", source)),
        qkv_bias=_has(names, "q_proj.bias") or any(flag(head, key, source) for key in ("attention_bias", "qkv_bias")),
        out_bias=_has(names, "o_proj.bias"),
    )
    _check(config, head, target, folder)
    return config


def recorded(raw: Mapping[str, Any], source: Path) -> Reading | None:
    """The reading that a check has written into a config.json, if there is one. Raises CheckpointError."""
    record = raw.get(RECORD)
    if record is None:
        return None
    match record:
        case {"taps": [*taps], "norm_before_residual": bool(normed), "output": "state" | "normed" | "bare" as output}:
            if all(type(tap) is int for tap in taps):
                return Reading(tuple(taps), normed, output)
    raise CheckpointError(f"{source}: {RECORD} is {record!r}; remove it, or have it written anew")


def _stated(
    head: Mapping[str, Any], dialect: Dialect, kind: Kind, names: set[str], target: Mapping[str, Any], source: Path
) -> Reading:
    """What the config says, and the usual where it says nothing."""
    if kind == "eagle":
        return Reading((AFTER_NORM,), output="bare")
    layers = whole_number(target, "num_hidden_layers", "the target's config")
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
    return Reading(tuple(taps), flag(head, "norm_before_residual", source), output)


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


def _check(config: HeadConfig, head: Mapping[str, Any], target: Mapping[str, Any], folder: Path) -> None:
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
