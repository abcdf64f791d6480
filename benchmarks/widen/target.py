"""Embeds a small target and its draft heads into large shapes that compute the same function.

Every product then has the size of the large model, and acceptance is that of the small one. Widths h are padded to W:

    hidden states      zeros behind the first h; a norm over W has weight * sqrt(h / W) and eps * h / W
    heads              each key-value head goes to its own place, with its query heads in the same group
    head width d to D  RoPE pair j goes to pair j D / d, which has the same frequency; queries times sqrt(D / d)
    norms of heads     weight * sqrt(d / D) for keys; projections are scaled so that eps has the same weight as before
    layers             spread evenly; those between add zeros, so a tapped state is the same
    vocabulary         new tokens have logits of minus some hundreds; no draw takes them

New tokens need a bias, and Llama's lm_head has none. So one more hidden state is a constant c, and eps makes room for it:
(sum + c^2) / W + eps' = (sum / h + eps) h / W for eps' = (h eps - c^2) / W. The final norm makes it large, and lm_head reads
it for new tokens only. Legend: V vocabulary, D draft vocabulary or head width, m aux layers.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from math import sqrt
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor

from benchmarks.widen.sparse import Patch, SparseTensor
from eyas.config.file_values import get_setting
from eyas.errors import CheckpointError, ConfigError
from eyas.models.checkpoint import Checkpoint
from eyas.models.heads.layers import LayerSizes, read_layer_sizes

# The constant hidden state, a power of two, so that every dtype holds it exactly.
CONSTANT = 2.0**-8
# Its weight in final norms, and in lm_head for new tokens.
FINAL_WEIGHT, NEW_TOKEN_WEIGHT = 64.0, -49152.0
FAMILIES = ("llama", "mistral", "qwen2", "qwen3")
# Kinds of RoPE whose frequencies depend on the pair's frequency alone, not on its number.
SCALABLE_ROPES = ("default", "linear", "llama3")
IGNORED = ("rotary_emb.inv_freq",)
OUTPUT_PROJECTIONS = re.compile(r"\.(o_proj|down_proj)\.(weight|bias)$")

Sizes = TypeVar("Sizes", bound=LayerSizes)


@dataclass(frozen=True)
class Shape:
    """A large model's sizes.

    vocab_size 0 keeps the vocabularies.

    Attributes:
        draft_vocab_size: of its reduced draft heads.
        small: the shape of its small draft model.
    """

    hidden: int
    intermediate: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int = 0
    draft_vocab_size: int = 0
    small: str = ""


SHAPES: Mapping[str, Shape] = {
    "70b": Shape(8192, 28672, 80, 64, 8, 128, 128256, 32000, "8b"),
    "8b": Shape(4096, 14336, 32, 32, 8, 128, 128256, 32000, "1b"),
    "1b": Shape(2048, 8192, 16, 32, 8, 64, 128256, 32000, "60m"),
    "400m": Shape(1024, 3584, 24, 16, 8, 64, 32000, 16000, "60m"),
    "60m": Shape(512, 1408, 8, 8, 4, 64, 32000, 16000, "60m"),
}


@dataclass(frozen=True)
class Axis:
    """Placement of the entries of a dimension: entry take[i] to put[i], both int64 [n], in a dimension of `size`."""

    take: Tensor
    put: Tensor
    size: int

    @classmethod
    def first(cls, count: int, size: int = 0) -> Axis:
        """Place entries at the first places, by default of a dimension that stays as it is."""
        return cls(torch.arange(count), torch.arange(count), size or count)

    @classmethod
    def joined(cls, axes: Sequence[Axis]) -> Axis:
        """Dimensions side by side."""
        takes, puts, taken, placed = [], [], 0, 0
        for axis in axes:
            takes.append(axis.take + taken)
            puts.append(axis.put + placed)
            taken, placed = taken + int(axis.take.max()) + 1, placed + axis.size
        return cls(torch.cat(takes), torch.cat(puts), placed)

    @property
    def new(self) -> Tensor:
        """Places that no entry goes to."""
        free = torch.ones(self.size, dtype=torch.bool)
        free[self.put] = False
        return free.nonzero().flatten()


# Axes of rows and columns by the end of a module's name; no columns: a vector.
MATRICES: Mapping[str, tuple[str, str]] = {
    "self_attn.q_proj": ("query", "input"),
    "self_attn.k_proj": ("kv", "input"),
    "self_attn.v_proj": ("kv", "input"),
    "self_attn.o_proj": ("hidden", "query"),
    "self_attn.q_norm": ("head", ""),
    "self_attn.k_norm": ("head", ""),
    "mlp.gate_proj": ("inner", "hidden"),
    "mlp.up_proj": ("inner", "hidden"),
    "mlp.down_proj": ("hidden", "inner"),
    "input_layernorm": ("hidden", ""),
    "post_attention_layernorm": ("hidden", ""),
    "hidden_norm": ("hidden", ""),
    "norm": ("hidden", ""),
    "fc_norm": ("state", ""),
    "input_norm": ("states", ""),
    "fc": ("hidden", "states"),
    "mask_hidden": ("", "states"),
    "embed_tokens": ("vocab", "hidden"),
    "lm_head": ("draft", "hidden"),
    "markov_head.markov_w1": ("vocab", "rank"),
    "markov_head.markov_w2": ("draft", "rank"),
    "markov_head.gate_proj": ("rank", "gate"),
    "markov_head.joint_proj": ("joint", "memory"),
    "confidence_head.proj": ("", "confidence"),
    "predecessor_codebook": ("vocab", "rank"),
    "successor_codebook": ("vocab", "rank"),
    "hidden_projection": ("rank", "hidden"),
    "base_kernel": ("", "hidden"),
    "kernel_projection": ("groups", "hidden"),
}
HIDDEN_NORMS = ("input_layernorm", "post_attention_layernorm", "hidden_norm", "norm", "fc_norm", "input_norm")


class Widening:
    """Placement of the tensors of one model in a large one.

    Args:
        pads: whether the vocabulary grows.
        has_head_norms: whether queries and keys are normed per head.
        axes: of the model's dimensions, by the names in MATRICES; those of its layers are added.
    """

    def __init__(
        self, small: LayerSizes, wide: LayerSizes, pads: bool, has_head_norms: bool, axes: Mapping[str, Axis],
        dtype: torch.dtype,
    ) -> None:  # fmt: skip
        self._small, self._wide, self._pads, self._dtype = small, wide, pads, dtype
        query, kv = _head_axes(small, wide)
        hidden = Axis.first(small.hidden, wide.hidden)
        own = {"hidden": hidden, "input": hidden, "query": query, "kv": kv}
        own |= {"inner": Axis.first(small.intermediate, wide.intermediate), "head": _width_axis(small, wide)}
        self.axes: Mapping[str, Axis] = {**own, **axes}
        wider = wide.head_dim / small.head_dim
        scale = sqrt(wide.rms_norm_eps / small.rms_norm_eps * wider) if has_head_norms else 1.0
        self._factors = dict.fromkeys(HIDDEN_NORMS, sqrt(small.hidden / wide.hidden))
        self._factors |= {"self_attn.q_proj": scale if has_head_norms else sqrt(wider), "self_attn.k_proj": scale}
        self._factors |= {"self_attn.k_norm": sqrt(1 / wider)}

    def place(self, name: str, tensor: Tensor, new_name: str = "") -> SparseTensor:
        """Return a tensor in its place. Raises CheckpointError for one that is not known."""
        module = re.sub(r"\.\d+$", "", re.sub(r"\.(weight|bias)$", "", name))
        known = next((key for key in MATRICES if f".{module}".endswith(f".{key}")), None)
        if known is None:
            raise CheckpointError(f"cannot widen the tensor {name}: it is none of {', '.join(MATRICES)}")
        rows, columns = MATRICES[known]
        if name.endswith(".bias") or not columns:
            rows, columns = "", rows
        row_axis = self.axes[rows] if rows else Axis.first(tensor.numel() // tensor.shape[-1])
        column_axis = self.axes[columns] if columns else Axis.first(tensor.shape[-1])
        return self.put(new_name or name, tensor, row_axis, column_axis, self._factors.get(known, 1.0), known)

    def put(self, name: str, tensor: Tensor, rows: Axis, columns: Axis, factor: float = 1.0, kind: str = "") -> SparseTensor:
        """Return a tensor along two axes. kind: as in MATRICES; it decides the places of the constant."""
        matrix = tensor.reshape(-1, tensor.shape[-1])
        values = torch.zeros(len(rows.put), int(columns.put.max()) + 1, dtype=torch.float64)
        values[:, columns.put] = matrix.double()[rows.take][:, columns.take] * factor
        leading = tensor.shape[:-1] if tensor.dim() != 2 else (rows.size,)
        is_weight = self._pads and not name.endswith(".bias")
        patches = self._constants(kind, rows) if is_weight else ()
        return SparseTensor(name, (*leading, columns.size), rows.put, values.to(self._dtype), patches)

    def _constants(self, kind: str, rows: Axis) -> tuple[Patch, ...]:
        """Return what makes, passes on and reads the constant hidden state, which is the first new one."""
        at, first = self._small.hidden, torch.zeros(1, dtype=torch.int64)
        match kind:
            case "embed_tokens":
                return (Patch(rows.put, at, CONSTANT),)
            case "mask_hidden":
                return (Patch(first, at, CONSTANT),)
            case "fc":  # of the first state; in EAGLE-1 of the embedding
                return (Patch(first + at, at, 1.0),)
            case "norm":
                return (Patch(first, at, FINAL_WEIGHT),)
            case "lm_head":
                return (Patch(rows.new, at, NEW_TOKEN_WEIGHT),)
        return ()


def _head_axes(small: LayerSizes, wide: LayerSizes) -> tuple[Axis, Axis]:
    """Axes of query and key-value heads. A group that is too large for the wide one gets several key-value heads."""
    group, wide_group = small.num_heads // small.num_kv_heads, wide.num_heads // wide.num_kv_heads
    copies = -(-group // wide_group)
    query = torch.arange(small.num_heads)
    own, index = query // group, query % group
    placed = (own * copies + index // wide_group) * wide_group + index % wide_group
    kv = torch.arange(small.num_kv_heads * copies)
    width = _width_axis(small, wide)

    def axis(take: Tensor, put: Tensor, count: int) -> Axis:
        takes, puts = take[:, None] * small.head_dim + width.take, put[:, None] * wide.head_dim + width.put
        return Axis(takes.flatten(), puts.flatten(), count * wide.head_dim)

    return axis(query, placed, wide.num_heads), axis(kv // copies, kv, wide.num_kv_heads)


def _width_axis(small: LayerSizes, wide: LayerSizes) -> Axis:
    """Dimensions of a head: those of RoPE pair j, j and j + d / 2, go to pair j D / d."""
    half, ratio = small.head_dim // 2, wide.head_dim // small.head_dim
    pair = torch.arange(half) * ratio
    return Axis(torch.arange(2 * half), torch.cat([pair, pair + wide.head_dim // 2]), wide.head_dim)


def widen_sizes(small: Sizes, shape: Shape, pads: bool, source: object, **others: Any) -> Sizes:
    """Return the sizes of layers in a shape, and `others` of the same dataclass.

    Raises ConfigError for a shape that is too small.
    """
    eps = (small.hidden * small.rms_norm_eps - (CONSTANT**2 if pads else 0.0)) / shape.hidden
    wide = replace(
        small, hidden=shape.hidden, intermediate=shape.intermediate, num_heads=shape.num_heads,
        num_kv_heads=shape.num_kv_heads, head_dim=shape.head_dim, rms_norm_eps=eps, **others,
    )  # fmt: skip
    query, kv = (axis.take.numel() // small.head_dim for axis in _head_axes(small, wide))
    problems = {
        f"hidden size {small.hidden} does not fit into {shape.hidden}": small.hidden + pads > shape.hidden,
        f"intermediate size {small.intermediate} does not fit into {shape.intermediate}": (
            small.intermediate > shape.intermediate
        ),
        f"{query} query heads over {kv} key-value heads do not fit into {shape.num_heads} over {shape.num_kv_heads}": (
            query > shape.num_heads or kv > shape.num_kv_heads
        ),
        f"head width {small.head_dim} does not divide {shape.head_dim}": shape.head_dim % small.head_dim > 0,
        f"rms_norm_eps {small.rms_norm_eps:g} leaves no room for the constant of new tokens; keep the vocabulary": eps <= 0,
    }
    for problem in (problem for problem, holds in problems.items() if holds):
        raise ConfigError(f"cannot widen {source}: {problem}; choose another shape")
    return wide


@dataclass(frozen=True)
class WideModel:
    """A widened checkpoint.

    Attributes:
        config: its config.json.
        files: those to copy beside it.
    """

    name: str
    config: Mapping[str, Any]
    tensors: Sequence[SparseTensor]
    files: Sequence[Path] = ()

    @property
    def nbytes(self) -> int:
        return sum(tensor.nbytes for tensor in self.tensors)

    @property
    def disk_bytes(self) -> int:
        return sum(tensor.disk_bytes for tensor in self.tensors)


def wide_layer(layer: int, num_layers: int, shape: Shape) -> int:
    """Return where a layer goes; also where the state before it is found, and for `num_layers` the
    state behind all layers.
    """
    return layer * shape.num_layers // num_layers


def widen_target(path_or_id: str, shape: Shape, dtype: torch.dtype, name: str = "target") -> WideModel:
    """Return a causal LM in a shape.

    Raises CheckpointError for another family, ConfigError for a shape that is too small.
    """
    checkpoint = Checkpoint(path_or_id)
    folder, config, source = checkpoint.folder, checkpoint.config, checkpoint.config_file
    if config.get("model_type") not in FAMILIES:
        raise CheckpointError(
            f"cannot widen {folder}: model_type is {config.get('model_type')!r}; it must be one of {', '.join(FAMILIES)}"
        )
    sizes, num_layers = read_layer_sizes(config, source), get_setting(int, config, "num_hidden_layers", source)
    vocab = get_setting(int, config, "vocab_size", source)
    new_vocab = shape.vocab_size or vocab
    if vocab > new_vocab or num_layers > shape.num_layers:
        raise ConfigError(
            f"cannot widen {folder}: {num_layers} layers and {vocab} tokens do not fit into {shape.num_layers} layers and "
            f"{new_vocab} tokens; choose another shape"
        )
    wide = widen_sizes(sizes, shape, new_vocab > vocab, folder)
    _check_rotary(config.get("rope_parameters") or config.get("rope_scaling") or {}, sizes, wide, folder)
    axis = Axis.first(vocab, new_vocab)
    has_norms = config["model_type"] == "qwen3"
    widening = Widening(sizes, wide, new_vocab > vocab, has_norms, {"vocab": axis, "draft": axis}, dtype)
    tensors = {each: tensor for each, tensor in checkpoint.tensors().items() if not each.endswith(IGNORED)}
    if "model.embed_tokens.weight" not in tensors:
        raise CheckpointError(f"cannot widen {folder}: it has no embeddings; a draft head goes to --draft-model")
    tensors.setdefault("lm_head.weight", tensors["model.embed_tokens.weight"])
    placed = [widening.place(each, tensor, _renumbered(each, num_layers, shape)) for each, tensor in tensors.items()]
    changes: dict[str, Any] = {
        "hidden_size": wide.hidden, "intermediate_size": wide.intermediate, "num_hidden_layers": shape.num_layers,
        "num_attention_heads": wide.num_heads, "num_key_value_heads": wide.num_kv_heads, "head_dim": wide.head_dim,
        "rms_norm_eps": wide.rms_norm_eps, "vocab_size": new_vocab, "tie_word_embeddings": False,
    }  # fmt: skip
    if types := config.get("layer_types"):
        source_layer = {wide_layer(layer, num_layers, shape): layer for layer in range(num_layers)}
        changes["layer_types"] = [types[source_layer.get(layer, 0)] for layer in range(shape.num_layers)]
    files = [file for file in sorted(folder.iterdir()) if file.suffix in (".json", ".jinja", ".model", ".txt")]
    files = [file for file in files if file.name != "config.json" and not file.name.endswith(".index.json")]
    return WideModel(name, {**config, **changes}, [*placed, *_idle_layers(placed, num_layers, shape)], files)


def _renumbered(name: str, num_layers: int, shape: Shape) -> str:
    return re.sub(r"(?<=\blayers\.)\d+", lambda found: f"{wide_layer(int(found[0]), num_layers, shape)}", name)


def _idle_layers(placed: Sequence[SparseTensor], num_layers: int, shape: Shape) -> list[SparseTensor]:
    """Layers like the first one, but with output projections of zeros: they add nothing to the hidden states."""
    used = {wide_layer(layer, num_layers, shape) for layer in range(num_layers)}
    first = [each for each in placed if ".layers.0." in each.name]
    idle = [
        replace(each, rows=each.rows[:0], values=each.values[:0]) if OUTPUT_PROJECTIONS.search(each.name) else each
        for each in first
    ]
    return [
        replace(each, name=each.name.replace(".layers.0.", f".layers.{layer}."))
        for layer in range(shape.num_layers)
        if layer not in used
        for each in idle
    ]


def _check_rotary(rope: Mapping[str, Any], small: LayerSizes, wide: LayerSizes, source: object) -> None:
    kind = rope.get("rope_type") or rope.get("type") or "default"
    if kind not in SCALABLE_ROPES and small.head_dim != wide.head_dim:
        raise CheckpointError(
            f"cannot widen {source}: its RoPE is {kind!r}, which another head width changes; Eyas widens "
            f"{', '.join(SCALABLE_ROPES)}"
        )
