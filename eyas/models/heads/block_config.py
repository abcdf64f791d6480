"""Config of a one-pass block head (DFlash, DFlash2, DSpark), read from a checkpoint of any project: sizes, wiring, tensors.

Three dialects: the authors' (DFlash: settings in `dflash_config`; DSpark: flat), SpecForge's (all in `dflash_config`) and
vLLM speculators' (`speculators_model_type`, sizes in `transformer_layer_config`). docs/models.md shows the formats.
Legend: B rows of a block, H draft hidden, C target hidden, V target vocabulary, D draft vocabulary, r rank.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, cast, get_args

from eyas.config.file_values import get_setting
from eyas.errors import CheckpointError
from eyas.models.checkpoint import Checkpoint
from eyas.models.heads.eagle_config import (
    SUPPORTED_ACTIVATIONS,
    HeadWiring,
    LayeredHeadConfig,
    Settings,
    read_sizes,
    recorded_wiring,
    respelled,
)
from eyas.models.heads.layers import Shapes, backbone_json, check_problems, check_target, layer_shapes

BlockKind = Literal["dflash", "dflash2", "dspark"]
MarkovKind = Literal["vanilla", "gated", "rnn"]
Dialect = Literal["author", "specforge", "speculators"]

# Marks of each kind: a part of an architecture, of speculators_model_type or of projector_type. The first match counts.
KIND_MARKS: tuple[tuple[str, BlockKind], ...] = (("dspark", "dspark"), ("dflash2", "dflash2"), ("dflash", "dflash"))
ARCHITECTURES = {"dflash": "DFlashDraftModel", "dflash2": "DFlash2DraftModel", "dspark": "DSparkDraftModel"}
# Block heads with other parts, by a word in their config.
UNSUPPORTED_KINDS = {"domino": "a Domino head", "dflare": "a DFlare head", "jetspec": "a JetSpec head"}
FULL, SLIDING = "full_attention", "sliding_attention"

# Tensor names of other formats, as patterns, and the authors' spelling.
TENSOR_SPELLINGS = (
    (r"^model\.", ""),
    (r"^logit_head\.(?=markov_head\.|confidence_head\.)", ""),
    (r"^draft_id_to_target_id$", "d2t"),
)


@dataclass(frozen=True)
class BlockHeadConfig(LayeredHeadConfig):
    """Sizes of a block head, its layers and its heads over the backbone.

    Attributes:
        num_target_layers: of the target that it was made for.
        mask_token_id: whose embedding the rows after the anchor have.
        block_size: B.
        windows: of each layer's attention in tokens, None for all.
        causal_windows: whether layers with a window also attend causally within the block.
        markov_rank, selector_rank: r; 0 for none.
        conv_kernel: taps of the convolutions around attention and MLP; 0 for none.
        multiplier, softcap: of the logits; 0 for no cap.
    """

    kind: BlockKind
    num_target_layers: int
    block_size: int
    mask_token_id: int
    windows: tuple[int | None, ...]
    causal_windows: bool = False
    attention_bias: bool = False
    markov_rank: int = 0
    markov_kind: MarkovKind = "vanilla"
    confidence: bool = False
    confidence_with_markov: bool = False
    conv_kernel: int = 0
    conv_group: int = 16
    selector_rank: int = 0
    selector_top_k: int = 16
    multiplier: float = 1.0
    softcap: float = 0.0

    @property
    def num_drafted(self) -> int:
        """Tokens that a block proposes."""
        return self.block_size if self.wiring.sample_from_anchor else self.block_size - 1

    @property
    def first_row(self) -> int:
        """The row of the block that predicts the token after the anchor."""
        return 0 if self.wiring.sample_from_anchor else 1


def find_kind(raw: Settings) -> BlockKind | None:
    """Return which block head a config.json describes; None if none."""
    inner = raw.get("dflash_config") or {}
    words = (
        *(raw.get("architectures") or ()), raw.get("speculators_model_type"), raw.get("projector_type"),
        inner.get("projector_type"), "dflash" if inner else "",
    )  # fmt: skip
    called = " ".join(str(word).lower() for word in words)
    kind = next((kind for mark, kind in KIND_MARKS if mark in called), None)
    return "dflash2" if kind == "dflash" and {**raw, **inner}.get("selector_rank") else kind


def read_block_config(checkpoint: Checkpoint, target: Settings, wiring: HeadWiring | None = None) -> BlockHeadConfig:
    """Return the config of a block head, checked against the target's. wiring: replaces what its config says.

    Raises CheckpointError.
    """
    raw, source = checkpoint.head_config, checkpoint.config_file
    kind = _check_kind(raw, checkpoint.folder)
    head = _flatten(raw)
    names = {canonical_name(name) for name in checkpoint.files}
    num_target_layers = get_setting(int, target, "num_hidden_layers", "the target's config")
    num_layers = get_setting(int, head, "num_hidden_layers", source)
    windows = _windows(head, num_layers, source)
    confidence = kind == "dspark" and get_setting(bool, head, "enable_confidence_head", source, False)
    rank = get_setting(int, head, "markov_rank", source, 0) if kind == "dspark" else 0
    config = BlockHeadConfig(
        **read_sizes(head, num_layers, source),
        kind=kind,
        num_target_layers=get_setting(int, head, "num_target_layers", source, num_target_layers),
        block_size=get_setting(int, head, "block_size", source),
        mask_token_id=get_setting(int, head, "mask_token_id", source),
        wiring=wiring or recorded_wiring(raw, source) or _stated_wiring(head, kind, raw, num_target_layers, source),
        windows=windows,
        causal_windows=any(windows) and not get_setting(bool, head, "sliding_window_non_causal", source, kind != "dflash"),
        attention_bias=any(name.endswith("q_proj.bias") for name in names)
        or get_setting(bool, head, "attention_bias", source, False),
        markov_rank=rank,
        markov_kind=_markov_kind(head, source) if rank else "vanilla",
        confidence=confidence,
        confidence_with_markov=confidence and get_setting(bool, head, "confidence_head_with_markov", source, False),
        **(_dflash2_settings(head, source) if kind == "dflash2" else {}),
        multiplier=get_setting(float, head, "output_multiplier", source, 1.0),
        softcap=get_setting(float, head, "final_logit_softcapping", source, 0.0),
    )
    _check(config, head, target, checkpoint.folder)
    return config


def read_block_size(checkpoint: Checkpoint) -> int:
    """Return the rows of a head's block: it proposes that many tokens, or one less. Raises CheckpointError."""
    return get_setting(int, _flatten(checkpoint.config), "block_size", checkpoint.config_file)


def canonical_name(name: str) -> str:
    """Return a tensor's name as the authors spell it."""
    return respelled(name, TENSOR_SPELLINGS)


def _flatten(raw: Settings) -> dict[str, Any]:
    """Return the settings of any dialect on one level, without those that are null. Inner ones of `dflash_config` come
    first.
    """
    layers = (raw.get("transformer_layer_config") or {}, raw, raw.get("dflash_config") or {})
    return {key: value for settings in layers for key, value in settings.items() if value is not None}


def _check_kind(raw: Settings, folder: Path) -> BlockKind:
    called = f"{raw.get('architectures')} {raw.get('speculators_model_type')} {raw.get('dflash_config')}".lower()
    for mark, name in UNSUPPORTED_KINDS.items():
        if mark in called:
            raise CheckpointError(
                f"{folder} holds {name}, a block head that Eyas does not know; it knows DFlash, DFlash2, DSpark"
            )
    kind = find_kind(raw)
    if kind is None:
        raise CheckpointError(
            f"{folder} does not hold a block head: its config names no DFlash, DFlash2 or DSpark, but architectures "
            f"{raw.get('architectures')!r}"
        )
    return kind


def _stated_wiring(head: Settings, kind: BlockKind, raw: Settings, num_layers: int, source: Path) -> HeadWiring:
    """Return what the config says. The ids of speculators count inputs of layers, all others outputs.

    Raises CheckpointError if it leaves the ids out: trainers have different defaults, so they are not guessed.
    """
    is_speculators = bool(raw.get("speculators_model_type"))
    key = "aux_hidden_state_layer_ids" if is_speculators else "target_layer_ids"
    ids, first = head.get(key), 0 if is_speculators else 1
    if not isinstance(ids, list) or not ids or not all(type(i) is int and 0 <= i + first <= num_layers for i in ids):
        raise CheckpointError(
            f"{source}: {key} is {ids!r}; it must be a list of layer numbers from {0 if is_speculators else -1} to "
            f"{num_layers - first}, the target has {num_layers} layers"
        )
    # DFlash as DeepSpec trains it is a DSpark architecture without a Markov head
    from_anchor = get_setting(bool, head, "sample_from_anchor", source, kind == "dspark")
    return HeadWiring(tuple(i + first for i in ids), sample_from_anchor=from_anchor)


def _windows(head: Settings, num_layers: int, source: Path) -> tuple[int | None, ...]:
    kinds = head.get("layer_types") or [FULL] * num_layers
    if not isinstance(kinds, list) or len(kinds) != num_layers or not set(kinds) <= {FULL, SLIDING}:
        raise CheckpointError(
            f"{source}: layer_types is {kinds!r}; it must name {FULL} or {SLIDING} for {num_layers} layers"
        )
    if SLIDING not in kinds:
        return (None,) * num_layers
    window = get_setting(int, head, "sliding_window", source)
    return tuple(window if kind == SLIDING else None for kind in kinds)


def _dflash2_settings(head: Settings, source: Path) -> dict[str, Any]:
    keys = {"conv_kernel": "conv_kernel_size", "selector_rank": "selector_rank", "selector_top_k": "selector_top_k"}
    found = {name: get_setting(int, head, key, source) for name, key in keys.items()}
    return found | {"conv_group": get_setting(int, head, "conv_group_size", source, 16)}


def _markov_kind(head: Settings, source: Path) -> MarkovKind:
    kind = head.get("markov_head_type", "vanilla")
    if kind not in get_args(MarkovKind):
        raise CheckpointError(f"{source}: markov_head_type is {kind!r}; it must be one of {', '.join(get_args(MarkovKind))}")
    return cast(MarkovKind, kind)


def _check(c: BlockHeadConfig, head: Settings, target: Settings, folder: Path) -> None:
    """Raises CheckpointError unless the head was made for this target and holds together."""
    check_target(folder, target, c.target_hidden, c.vocab_size)
    num_layers = get_setting(int, target, "num_hidden_layers", "the target's config.json")
    problems = {
        f"num_target_layers is {c.num_target_layers}, but this target has {num_layers} layers": (
            c.num_target_layers != num_layers
        ),
        f"hidden_act is {head.get('hidden_act')!r}; Eyas supports silu only": (
            head.get("hidden_act") not in SUPPORTED_ACTIVATIONS
        ),
        f"mask_token_id {c.mask_token_id} is not below the vocabulary size {c.vocab_size}": c.mask_token_id >= c.vocab_size,
        f"block_size {c.block_size} leaves no token to propose": c.num_drafted < 1,
        "confidence_head_with_markov is true, but markov_rank is 0": c.confidence_with_markov and not c.markov_rank,
        f"conv_group_size {c.conv_group} does not divide hidden_size {c.hidden}": bool(c.conv_kernel)
        and c.hidden % c.conv_group != 0,
        f"selector_top_k {c.selector_top_k} exceeds the vocabulary size {c.vocab_size}": c.selector_top_k > c.vocab_size,
        f"selector_rank {c.selector_rank} with draft_vocab_size {c.draft_vocab_size}: a selector needs all {c.vocab_size}": (
            bool(c.selector_rank) and c.draft_vocab_size != c.vocab_size
        ),
    }
    check_problems(str(folder), problems)


def block_tensor_shapes(c: BlockHeadConfig) -> Shapes:
    """Return names and shapes of all tensors that the head may have, as the authors spell them."""
    shapes: Shapes = {
        **block_fuser_shapes(c),
        "norm.weight": (c.hidden,),
        "embed_tokens.weight": (c.vocab_size, c.hidden),
        "lm_head.weight": (c.draft_vocab_size, c.hidden),
        "d2t": (c.draft_vocab_size,),
        "t2d": (c.vocab_size,),
    }
    for layer in range(c.num_layers):
        shapes |= {f"layers.{layer}.{name}": shape for name, shape in _layer_shapes(c).items()}
    rank, hidden = c.markov_rank, c.hidden
    if rank:
        shapes |= {"markov_head.markov_w1.weight": (c.vocab_size, rank)}
        shapes |= {"markov_head.markov_w2.weight": (c.draft_vocab_size, rank)}
    if rank and c.markov_kind == "gated":
        shapes |= {"markov_head.gate_proj.weight": (rank, hidden + rank), "markov_head.gate_proj.bias": (rank,)}
    if rank and c.markov_kind == "rnn":
        shapes |= {
            "markov_head.joint_proj.weight": (3 * rank, 2 * rank + hidden),
            "markov_head.joint_proj.bias": (3 * rank,),
        }
    if c.confidence:
        width = hidden + (rank if c.confidence_with_markov else 0)
        shapes |= {"confidence_head.proj.weight": (1, width), "confidence_head.proj.bias": (1,)}
    if c.selector_rank:
        books = (f"candidate_selector.{side}_codebook" for side in ("predecessor", "successor"))
        shapes |= dict.fromkeys(books, (c.vocab_size, c.selector_rank))
        shapes |= {"candidate_selector.hidden_projection.weight": (c.selector_rank, hidden)}
    return shapes


def block_fuser_shapes(c: BlockHeadConfig) -> Shapes:
    """Return fc and the norm behind it, which run beside the target."""
    width = len(c.aux_hidden_state_layers) * c.target_hidden
    return {"fc.weight": (c.hidden, width), "hidden_norm.weight": (c.hidden,)}


def _layer_shapes(c: BlockHeadConfig) -> Shapes:
    shapes = layer_shapes(c, c.hidden) | {"input_layernorm.weight": (c.hidden,)}
    shapes |= {f"self_attn.{side}_norm.weight": (c.head_dim,) for side in "qk"}
    if c.attention_bias:
        shapes |= {f"self_attn.{p}_proj.bias": shapes[f"self_attn.{p}_proj.weight"][:1] for p in "qkvo"}
    if c.conv_kernel:
        groups = 2 * c.conv_kernel * c.hidden // c.conv_group
        for part in ("attention_conv", "mlp_conv"):
            shapes |= {f"{part}.base_kernel": (2, c.conv_kernel, c.hidden)}
            shapes |= {f"{part}.kernel_projection.weight": (groups, c.hidden)}
    return shapes


def block_config_json(c: BlockHeadConfig, dialect: Dialect = "author") -> dict[str, Any]:
    """Return the head's config.json in a dialect. Each of them can be read back to the same config."""
    outputs = [layer - 1 for layer in c.aux_hidden_state_layers]
    sizes, parts = _sizes_json(c), _parts_json(c)
    place = {"block_size": c.block_size, "mask_token_id": c.mask_token_id, "sample_from_anchor": c.wiring.sample_from_anchor}
    windows = {"sliding_window_non_causal": not c.causal_windows} if any(c.windows) else {}
    if dialect == "speculators":
        return {
            "architectures": [ARCHITECTURES[c.kind]],
            "speculators_model_type": c.kind,
            "speculators_config": {
                "algorithm": c.kind,
                "default_proposal_method": "greedy",
                "proposal_methods": [{"proposal_type": "greedy", "speculative_tokens": c.num_drafted}],
            },
            "transformer_layer_config": sizes,
            "aux_hidden_state_layer_ids": list(c.aux_hidden_state_layers),
            "draft_vocab_size": c.draft_vocab_size,
            "target_hidden_size": c.target_hidden,
            **place, **parts, **windows,
        }  # fmt: skip
    whole = {} if c.draft_vocab_size == c.vocab_size else {"draft_vocab_size": c.draft_vocab_size}
    width = {} if c.hidden == c.target_hidden else {"target_hidden_size": c.target_hidden}
    own = {"num_target_layers": c.num_target_layers, **whole, **width, **windows}
    if c.kind == "dspark" and dialect == "author":
        return {"architectures": ["Qwen3DSparkModel"], **sizes, **own, **place, "target_layer_ids": outputs, **parts}
    inner = {"target_layer_ids": outputs, **place, **parts}
    inner |= {"projector_type": c.kind} if c.kind == "dspark" else {}
    return {
        "architectures": [ARCHITECTURES[c.kind]],
        **sizes,
        **own,
        "block_size": inner.pop("block_size"),
        "dflash_config": inner,
    }


def _sizes_json(c: BlockHeadConfig) -> dict[str, Any]:
    """Return what a Qwen3 config says."""
    window = next((window for window in c.windows if window), None)
    return {
        "model_type": "qwen3",
        **backbone_json(c),
        "attention_bias": c.attention_bias,
        "layer_types": [SLIDING if own else FULL for own in c.windows],
        "sliding_window": window,
    }


def _parts_json(c: BlockHeadConfig) -> dict[str, Any]:
    """Return what distinguishes the kinds."""
    parts: dict[str, Any] = {}
    if c.multiplier != 1:
        parts["output_multiplier"] = c.multiplier
    if c.softcap:
        parts["final_logit_softcapping"] = c.softcap
    if c.kind == "dspark":
        parts |= {
            "markov_rank": c.markov_rank,
            "markov_head_type": c.markov_kind,
            "enable_confidence_head": c.confidence,
            "confidence_head_with_markov": c.confidence_with_markov,
        }
    if c.kind == "dflash2":
        parts |= {
            "conv_kernel_size": c.conv_kernel,
            "conv_group_size": c.conv_group,
            "selector_rank": c.selector_rank,
            "selector_top_k": c.selector_top_k,
        }
    return parts
