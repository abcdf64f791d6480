"""The config of an EAGLE-3 head and the tensors it implies: two config.json in, sizes, names and shapes out."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from eyas.errors import CheckpointError
from eyas.models.checkpoint import read_config


@dataclass(frozen=True)
class HeadConfig:
    """Sizes of an EAGLE-3 head. taps: layers of the target whose inputs it is fed, by the reference's convention."""

    target_hidden: int
    hidden: int
    intermediate: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    draft_vocab_size: int
    rms_norm_eps: float
    rope_theta: float
    taps: tuple[int, ...]

    @property
    def full_vocabulary(self) -> bool:
        """Whether draft ids are target ids, so that no map is needed."""
        return self.draft_vocab_size == self.vocab_size


def head_config(folder: Path, target: Mapping[str, Any]) -> HeadConfig:
    """Sizes of the head in `folder`, checked against the target's config.json. Raises CheckpointError."""
    head, source = read_config(folder), folder / "config.json"
    hidden, heads = whole_number(head, "hidden_size", source), whole_number(head, "num_attention_heads", source)
    layers, vocab_size = (
        whole_number(target, "num_hidden_layers", "the target's config"),
        whole_number(head, "vocab_size", source),
    )
    config = HeadConfig(
        target_hidden=whole_number(head, "target_hidden_size", source, hidden),
        hidden=hidden,
        intermediate=whole_number(head, "intermediate_size", source),
        num_heads=heads,
        num_kv_heads=whole_number(head, "num_key_value_heads", source, heads),
        head_dim=whole_number(head, "head_dim", source, hidden // heads),
        vocab_size=vocab_size,
        draft_vocab_size=whole_number(head, "draft_vocab_size", source, vocab_size),
        rms_norm_eps=_real(head, "rms_norm_eps", 1e-6, source),
        rope_theta=_real(head, "rope_theta", 10000.0, source),
        taps=_taps(head, layers, source),
    )
    for what, mine, its in (
        ("hidden size", config.target_hidden, int(target["hidden_size"])),
        ("vocabulary size", config.vocab_size, int(target["vocab_size"])),
    ):
        if mine != its:
            raise CheckpointError(f"{folder} was made for a target of {what} {mine}, but this target has {its}")
    return config


def _taps(head: Mapping[str, Any], layers: int, source: Path) -> tuple[int, ...]:
    taps = head.get("eagle_aux_hidden_state_layer_ids") or (2, layers // 2, layers - 3)
    if not isinstance(taps, Sequence) or not all(isinstance(tap, int) for tap in taps):
        raise CheckpointError(f"{source}: eagle_aux_hidden_state_layer_ids is {taps!r}; it must be a list of layer numbers")
    return tuple(taps)


def whole_number(config: Mapping[str, Any], key: str, source: object, default: int | None = None) -> int:
    """A setting of a config.json. Raises CheckpointError when it is no whole number and there is no default."""
    value = config.get(key) or default
    if not isinstance(value, int):
        raise CheckpointError(f"{source}: {key} is {value!r}; it must be a whole number")
    return value


def _real(config: Mapping[str, Any], key: str, default: float, source: Path) -> float:
    value = config.get(key) or default
    if not isinstance(value, int | float):
        raise CheckpointError(f"{source}: {key} is {value!r}; it must be a number")
    return float(value)


def layout(c: HeadConfig) -> dict[str, tuple[int, ...]]:
    """Names and shapes of the public SafeAILab layout."""
    q, kv = c.num_heads * c.head_dim, c.num_kv_heads * c.head_dim
    return {
        "fc.weight": (c.hidden, len(c.taps) * c.target_hidden),
        "midlayer.hidden_norm.weight": (c.hidden,),
        "midlayer.input_layernorm.weight": (c.hidden,),
        "midlayer.post_attention_layernorm.weight": (c.hidden,),
        "midlayer.self_attn.q_proj.weight": (q, 2 * c.hidden),
        "midlayer.self_attn.k_proj.weight": (kv, 2 * c.hidden),
        "midlayer.self_attn.v_proj.weight": (kv, 2 * c.hidden),
        "midlayer.self_attn.o_proj.weight": (c.hidden, q),
        "midlayer.mlp.gate_proj.weight": (c.intermediate, c.hidden),
        "midlayer.mlp.up_proj.weight": (c.intermediate, c.hidden),
        "midlayer.mlp.down_proj.weight": (c.hidden, c.intermediate),
        "embed_tokens.weight": (c.vocab_size, c.hidden),
        "norm.weight": (c.hidden,),
        "lm_head.weight": (c.draft_vocab_size, c.hidden),
        "d2t": (c.draft_vocab_size,),
        "t2d": (c.vocab_size,),
    }
