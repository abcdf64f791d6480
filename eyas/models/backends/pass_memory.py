"""Computes the bytes of passes and captured graphs on a GPU, so that the KV cache can take a share of the rest."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from eyas.config import EngineConfig
from eyas.models.backends.attention_metadata import (
    FIXED_PART,
    Tiling,
    bucket_shape,
    max_words,
)
from eyas.models.backends.base import BackendKind, BackendPlan
from eyas.models.backends.cuda import tiling_on
from eyas.models.backends.cuda_graphs import MAX_GRAPH_ROWS, row_buckets
from eyas.models.inputs import MetadataShape, copied_keys
from eyas.models.layers.numerics import keeps_logits
from eyas.models.target import TargetModel

# Of matrix products (32 MiB on Hopper), for the streams of launched and captured passes.
WORKSPACES = 2 * 2**25
# Of one graph, for its some hundreds of launches and their arguments.
GRAPH_NODES = 2**20


@dataclass(frozen=True)
class PassSizes:
    """Widths of a target, or of one rank's part of it.

    Attributes:
        itemsize: bytes of a hidden number.
        num_aux: collected layers.
        keeps_logits: whether smaller graphs write logits straight to the output that all share.
        pairs: numbers inside and behind the experts of a row, side by side; 0 without experts.
    """

    vocab: int
    hidden: int
    mlp: int
    heads: int
    kv_heads: int
    head_width: int
    itemsize: int
    num_aux: int = 0
    keeps_logits: bool = False
    pairs: int = 0

    @classmethod
    def of(cls, target: TargetModel) -> PassSizes:
        """Return the widths of a loaded target."""
        config, shapes = target.config, target.kv_shapes
        width = max(shape.key_width for shape in shapes)
        kv_heads = -(-max(shape.num_heads * shape.key_width for shape in shapes) // width)
        hidden = int(config.hidden_size)
        dense = int(getattr(config, "intermediate_size", None) or 4 * hidden)
        experts = int(getattr(config, "moe_intermediate_size", None) or dense) if target.is_mixture_of_experts else 0
        top_k = int(getattr(config, "num_experts_per_tok", None) or getattr(config, "top_k_experts", None) or 1)
        mlp, pairs = max(dense, experts * top_k), top_k * (experts + hidden) if experts else 0
        heads, num_aux = target.heads_per_kv * target.num_kv_heads, len(target.aux_hidden_state_layers)
        own_logits = keeps_logits(target.model)
        itemsize = target.dtype.itemsize
        return cls(target.vocab_size, hidden, mlp, heads, kv_heads, width, itemsize, num_aux, own_logits, pairs)

    def logits(self, rows: int) -> int:
        """Return the bytes of logits [N, V], float32."""
        return rows * self.vocab * 4

    def copied_keys(self, num_keys: int) -> int:
        """Return the bytes of a layer's keys and values that are copied for a library."""
        return copied_keys(num_keys) * 2 * self.kv_heads * self.head_width * self.itemsize

    def layers(self, rows: int, results: int, copied: int = 0) -> int:
        """Return the most bytes inside the layers: of attention, of the MLP or of experts, and of hidden states around them.

        Beside the pairs of experts are their inputs and outputs, and queries, keys and values that attention has left.

        Args:
            results: partial results of attention for all rows together; 0 if keys are not cut.
            copied: bytes of keys and values for a library.
        """
        # Queries and outputs of all heads, keys and values of theirs; float32 results and their log-sums for each part.
        attention = rows * (2 * self.heads + 2 * self.kv_heads) * self.head_width * self.itemsize
        partials = results * self.heads * (self.head_width + 1) * 4
        # Gates, ups and what the activation makes of them.
        mlp = rows * 3 * self.mlp * self.itemsize
        left = (3 * self.heads + 2 * self.kv_heads) * self.head_width + 5 * self.hidden
        experts = rows * (self.pairs + left) * self.itemsize if self.pairs else 0
        return max(attention + partials + copied, mlp, experts) + self.states(rows)

    def states(self, rows: int) -> int:
        """Return bytes of hidden states: of the residual stream, and of collected layers, one by one and side by side."""
        return rows * (4 + 2 * self.num_aux) * self.hidden * self.itemsize


def output_bytes(sizes: PassSizes, rows: int) -> int:
    """Return the bytes that all graphs together keep for their outputs: logits and hidden states of the largest, which all
    share.
    """
    return sizes.logits(rows) + rows * sizes.num_aux * sizes.hidden * sizes.itemsize


def graph_bytes(sizes: PassSizes, max_rows: int, max_segments: int, tiling: Tiling) -> int:
    """Return the bytes that captured graphs keep. They share one pool: the outputs, and what the neediest graph takes
    besides.

    All but the largest write logits to the shared output, or compute them in the pool and copy if the model scales them.
    """
    buckets = row_buckets(min(max_rows, MAX_GRAPH_ROWS))
    shapes = [bucket_shape(rows, max_segments, tiling) for rows in buckets]
    inner = max(sizes.layers(shape.rows, num_partials(shape)) for shape in shapes)
    copied = sizes.logits(buckets[-2]) if len(buckets) > 1 and not sizes.keeps_logits else 0
    words = 4 * max(map(max_words, shapes))
    return output_bytes(sizes, buckets[-1]) + inner + copied + words + len(buckets) * GRAPH_NODES


def num_partials(shape: MetadataShape) -> int:
    """Return the partial results of attention that a pass keeps until they are combined."""
    return shape.part_rows or (shape.rows * shape.num_results if shape.num_results > 1 else 0)


def launched_bytes(
    sizes: PassSizes, max_rows: int, max_drawn: int, max_prompt: int, tiling: Tiling, longest: int = 0
) -> int:
    """Return the bytes of the largest pass that no graph holds, and of what its draws copy.

    Args:
        max_drawn: rows at which tokens are drawn.
        max_prompt: rows of prompts; `prompt_logprobs` asks for their logits. Then the logits of drawn rows are copied, in
            memory that layers have left.
        longest: keys of the longest context, which a library may copy for a prompt.
    """
    if tiling.fixed_part:  # each row may lie at the end of a longest context
        partials = min(max_rows, max_drawn + max_prompt) * -(-tiling.longest // tiling.fixed_part)
    else:
        partials = num_partials(
            tiling.shape(max_rows, max_drawn, max(-(-max_rows // tiling.most_rows), 1), tiling.most_rows)
        )
    attends_by_library = 0 < tiling.library_rows <= max_prompt and not tiling.fixed_part
    keys = sizes.copied_keys(longest) if attends_by_library and longest else 0
    logits = sizes.logits(min(max_rows, max_drawn)) if max_prompt else 0
    behind_layers = max(sizes.layers(max_rows, partials, keys), sizes.states(max_rows) + logits)
    return behind_layers + sizes.logits(min(max_rows, max_drawn + max_prompt))


def reserved_bytes(target: TargetModel, plan: BackendPlan, engine: EngineConfig) -> int:
    """Return bytes to leave free beside the KV cache, for graphs and for the largest pass; 0 on the CPU."""
    if target.device.type != "cuda":
        return 0
    limits, sizes = plan.limits, PassSizes.of(target)
    tiling = tiling_on(target.device, target.dtype, target.heads_per_kv, target.num_kv_heads)
    longest = engine.max_model_len or target.max_model_len
    if plan.batch_invariant:
        tiling = replace(tiling, longest=longest, fixed_part=FIXED_PART)
    max_drawn = engine.max_verify_tokens + limits.segments
    copied = 0 if plan.kind is BackendKind.PLAIN else longest
    total = launched_bytes(sizes, limits.rows, max_drawn, engine.max_prefill_tokens, tiling, copied) + WORKSPACES
    if plan.kind is not BackendKind.PLAIN:
        total += limits.prefix * torch.int32.itemsize
    if plan.kind is BackendKind.GRAPHS:
        total += graph_bytes(sizes, limits.rows, limits.segments, tiling)
    return total
