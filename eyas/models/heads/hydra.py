"""Hydra heads (Ankner et al. 2024) in the authors' layout: grounded, of the kinds mlp and prefix-mlp.

Legend: R rows, M heads, n residual blocks of each, H target hidden, d head width, D draft vocabulary, V target vocabulary.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from eyas.config.engine import INT8
from eyas.config.file_values import get_setting
from eyas.device.placement import check_device
from eyas.errors import CheckpointError
from eyas.kernels.arguments import Projected
from eyas.models.checkpoint import EMBEDDING_NAMES, Checkpoint, CheckpointSource, check_tensors, open_checkpoint
from eyas.models.heads.layers import (
    FP8,
    DraftLayer,
    LayerSizes,
    Shapes,
    frozen,
    layer_shapes,
    linear,
    quantise_head,
    read_layer_sizes,
    rms_norm,
    rotary_table,
    take_draft_ids,
    under_prefix,
)
from eyas.models.loading import read_model_config

HYDRA_FILES = ("hydra_lm_head.safetensors", "hydra_lm_head.pt")
ARCHITECTURES = ("mlp", "prefix-mlp")
# As the authors spell it.
PREFIX = "prefix_embeding_layer."
# It came along in training and is not used.
PREFIX_OPTIONAL = frozenset({f"{PREFIX}embed_tokens.weight"})


class HydraHead(nn.Module):
    """Head i guesses, from the state behind token t and the embeddings of t + 1 to t + 1 + i, the token at t + 2 + i.

    Args:
        embedding: the target's, [V, H].
        prefix: makes the states of prefix-mlp from the target's. draft_ids maps draft ids to the target's.
    """

    def __init__(
        self, heads: Sequence[nn.Module], embedding: Tensor, draft_ids: Tensor, prefix: PrefixLayer | None = None
    ) -> None:
        super().__init__()
        self.heads = nn.ModuleList(heads)
        self.embedding = frozen(embedding)
        self.prefix = prefix
        self.num_heads = len(heads)
        self.hidden = embedding.shape[1]
        self.register_buffer("draft_ids", draft_ids)
        self.draft_ids: Tensor

    def logits(self, inputs: Tensor, head: int) -> Tensor:
        """Return draft logits float32 [..., D] of one head.

        Args:
            inputs: [..., (head + 2) * H]; the state, then the embeddings.
        """
        return self.heads[head](inputs).float()  # type: ignore[no-any-return]


class HydraMLP(nn.Module):
    """One head: a grounded block from (i + 2) * H to H, further residual blocks, and an output layer.

    Args:
        blocks: weight and bias of each; the first block's are those of its two layers, one below the other.
    """

    def __init__(self, blocks: Sequence[tuple[Tensor, Tensor]], output: Tensor, bias: Tensor | None) -> None:
        super().__init__()
        self.blocks: Any = nn.ModuleList(linear(*block) for block in blocks)
        self.output = linear(output, bias)

    def forward(self, x: Tensor) -> Tensor:
        first, *others = self.blocks
        residual, gate = first(x).chunk(2, -1)
        x = residual + F.silu(gate)
        for block in others:
            x = x + F.silu(block(x))
        return self.output(x)  # type: ignore[no-any-return]


class PrefixLayer(nn.Module):
    """A decoder layer over the target's final states, with its norm before and the model's norm behind it."""

    def __init__(self, sizes: LayerSizes, tensors: Mapping[str, Tensor], target: Checkpoint) -> None:
        super().__init__()
        self.sizes = sizes
        self.layer = DraftLayer(sizes, under_prefix(tensors, "layers.0."))
        self.norm = frozen(tensors["norm.weight"])
        config = read_model_config(target).get_text_config()
        rotary = rotary_table(config, config.max_position_embeddings)
        self.register_buffer("rotary", rotary.to(self.norm.dtype))
        self.rotary: Tensor

    def project(self, states: Tensor, positions: Tensor) -> Projected:
        """Norm, project and rotate; states [R, H], positions [R]."""
        assert self.layer.input_norm is not None
        normed = rms_norm(states, self.layer.input_norm, self.sizes.rms_norm_eps)
        return self.layer.project(normed, states, self.rotary[positions])

    def finish(self, attended: Tensor, residual: Tensor) -> Tensor:
        """Return the rest: attention output [R, heads, d] and residual [R, H] to the states that heads read, [R, H]."""
        return rms_norm(self.layer.finish(attended, residual), self.norm, self.sizes.rms_norm_eps)


def load_hydra(
    checkpoint: CheckpointSource,
    target: CheckpointSource,
    dtype: str = "float32",
    device: str = "cpu",
    quantization: str = "",
) -> HydraHead:
    """Load heads with the target's embedding. quantization: as `drafting.quantization`.

    Raises CheckpointError for another architecture, and for tensors that are missing, left over or do not fit the target;
    and ConfigError as `quantise_head`.
    """
    check_device(dtype, device)
    checkpoint, target = open_checkpoint(checkpoint), open_checkpoint(target)
    folder, sizes = checkpoint.folder, target.text_config
    hidden, vocab = (get_setting(int, sizes, key, "the target's config") for key in ("hidden_size", "vocab_size"))
    config, tensors = read_hydra_config(checkpoint), checkpoint.tensors(HYDRA_FILES)
    ids = take_draft_ids(tensors, hidden, vocab, folder)
    expected, optional = _shapes(config, hidden, vocab, len(ids)), {"input_embed_fn.weight"}
    biases = {name for name in expected if name.startswith("hydra_lm_head.") and name.endswith(".bias")}
    if biases.isdisjoint(tensors):  # all of them or none
        optional |= biases
    prefix_sizes = read_layer_sizes(sizes, target.config_file) if config.has_prefix else None
    if prefix_sizes:
        expected |= _prefix_shapes(prefix_sizes, vocab)
        optional |= PREFIX_OPTIONAL
    _repeat_blocks(tensors, config)
    check_tensors(tensors, expected, optional, folder)
    embedding = tensors.pop("input_embed_fn.weight", None)
    embedding = target.vocabulary(EMBEDDING_NAMES, (vocab, hidden)) if embedding is None else embedding
    cast = {name: tensor.to(getattr(torch, dtype)) for name, tensor in tensors.items()}
    prefix = PrefixLayer(prefix_sizes, under_prefix(cast, PREFIX), target) if prefix_sizes else None
    heads = [_head(cast, config, index) for index in range(config.num_heads)]
    head = HydraHead(heads, embedding.to(getattr(torch, dtype)), ids, prefix).to(torch.device(device))
    if quantization in (FP8, INT8):
        quantise_head(head, torch.device(device), quantization)
    return head


@dataclass(frozen=True)
class HydraConfig:
    """Config of a Hydra checkpoint. prefix-mlp numbers its modules 1, 3, 5, ..., mlp 0, 1, 2, ..."""

    num_heads: int
    num_layers: int
    has_prefix: bool

    def block(self, head: int, layer: int) -> str:
        """Name of a residual block."""
        return f"hydra_mlp.{head}.{1 + 2 * layer if self.has_prefix else layer}"

    def output(self, head: int) -> str:
        """Name of an output layer."""
        return f"hydra_lm_head.{head}" + ".1" * self.has_prefix


def read_hydra_config(checkpoint: Checkpoint) -> HydraConfig:
    """Raises CheckpointError for heads of a kind that Eyas does not support."""
    config, source = checkpoint.head_config, checkpoint.config_file
    architecture = config.get("hydra_head_arch", "mlp")
    if architecture not in ARCHITECTURES:
        raise CheckpointError(f"{source}: hydra_head_arch is {architecture!r}; Eyas runs {' and '.join(ARCHITECTURES)} only")
    needed: dict[str, Any] = {"grounded_heads": True, "hidden_state_offset": 0}
    for key, value in needed.items():
        if config.get(key, value) != value:
            raise CheckpointError(f"{source}: {key} is {config[key]!r}; Eyas runs Hydra heads with {value!r} only")
    heads, layers = (get_setting(int, config, key, source) for key in ("hydra_num_heads", "hydra_num_layers"))
    return HydraConfig(heads, layers, architecture == "prefix-mlp")


def _shapes(c: HydraConfig, hidden: int, vocab: int, draft_vocab: int) -> Shapes:
    """Return names and shapes of all tensors but the prefix layer's."""
    shapes: Shapes = {"input_embed_fn.weight": (vocab, hidden)}
    for head in range(c.num_heads):
        for layer in range(c.num_layers):
            width = (head + 2) * hidden if layer == 0 else hidden
            for part in ("linear", "res_connection") if layer == 0 else ("linear",):
                name = f"{c.block(head, layer)}.{part}"
                shapes |= {f"{name}.weight": (hidden, width), f"{name}.bias": (hidden,)}
        shapes |= {f"{c.output(head)}.weight": (draft_vocab, hidden), f"{c.output(head)}.bias": (draft_vocab,)}
    return shapes


def _prefix_shapes(sizes: LayerSizes, vocab: int) -> Shapes:
    layer = layer_shapes(sizes, sizes.hidden) | {
        "input_layernorm.weight": (sizes.hidden,),
    }
    shapes = {f"layers.0.{name}": shape for name, shape in layer.items()}
    shapes |= {"norm.weight": (sizes.hidden,), "embed_tokens.weight": (vocab, sizes.hidden)}
    return {PREFIX + name: shape for name, shape in shapes.items()}


def _repeat_blocks(tensors: dict[str, Tensor], c: HydraConfig) -> None:
    """Repeat blocks: all after a head's second are the same instance; a safetensors file may keep the second only."""
    for head in range(c.num_heads):
        for layer in range(2, c.num_layers):
            for part in ("linear.weight", "linear.bias"):
                second = tensors.get(f"{c.block(head, 1)}.{part}")
                if second is not None:
                    tensors.setdefault(f"{c.block(head, layer)}.{part}", second)


def _head(tensors: Mapping[str, Tensor], c: HydraConfig, head: int) -> HydraMLP:
    first = under_prefix(tensors, f"{c.block(head, 0)}.")
    weight, bias = (
        torch.cat([first[f"{part}.{kind}"] for part in ("res_connection", "linear")]) for kind in ("weight", "bias")
    )
    blocks = [(weight, bias)]
    for name in (c.block(head, layer) for layer in range(1, c.num_layers)):
        blocks.append((tensors[f"{name}.linear.weight"], tensors[f"{name}.linear.bias"]))
    return HydraMLP(blocks, tensors[f"{c.output(head)}.weight"], tensors.get(f"{c.output(head)}.bias"))
