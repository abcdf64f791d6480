"""The tensors that a head's config implies, in the layout of the first publication: names, shapes, which may be absent."""

from __future__ import annotations

from eyas.models.heads.eagle.config import HeadConfig

Shapes = dict[str, tuple[int, ...]]


def prefix(config: HeadConfig, layer: int) -> str:
    """What the names of a layer's tensors begin with."""
    return "midlayer." if config.kind == "eagle3" and layer == 0 else f"layers.{layer}."


def layout(c: HeadConfig) -> Shapes:
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


def optional(c: HeadConfig) -> set[str]:
    """Of these, the ones that may be absent: the target's embedding serves, the vocabulary is whole, no norm is used."""
    own_embedding = c.hidden != c.target_hidden
    return (
        {"t2d"}
        | (set() if own_embedding else {"embed_tokens.weight"})
        | ({"d2t"} if c.full_vocabulary else set())
        | ({"norm.weight"} if c.reading.output == "bare" else set())
    )


def fuser_layout(c: HeadConfig) -> Shapes:
    """fc and what is normed before it: of EAGLE-3 what runs beside the target."""
    states = len(c.taps)
    width = states * c.target_hidden if c.kind == "eagle3" else 2 * c.hidden
    shapes: Shapes = {"fc.weight": (c.hidden, width)}
    if c.fc_bias:
        shapes["fc.bias"] = (c.hidden,)
    if c.input_norms == "joint":
        shapes["input_norm.weight"] = (width,)
    if c.input_norms == "each":
        shapes |= {f"fc_norm.{state}.weight": (c.target_hidden,) for state in range(states)}
    return shapes


def _layer(c: HeadConfig, layer: int) -> Shapes:
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
