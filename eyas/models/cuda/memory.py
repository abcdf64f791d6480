"""Memory of forward passes and captured graphs, by arithmetic: the KV cache takes a share of what they leave.

Legend: R rows of a pass, N of them with logits, V vocabulary, C hidden width, I width inside a layer's MLP, H query heads,
D head width.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from eyas.models.cuda.backend import BackendKind, BackendPlan, tiling_on
from eyas.models.cuda.graphs import MAX_GRAPH_ROWS, row_buckets
from eyas.models.cuda.metadata import Tiling, bucket_shape, max_words
from eyas.models.target import TargetModel

# Of matrix products (32 MiB on Hopper), for the streams of launched and captured passes.
WORKSPACES = 2 * 2**25
# Of one graph, for its some hundreds of launches and their arguments.
GRAPH_NODES = 2**20


@dataclass(frozen=True)
class PassSizes:
    """Widths of a target, or of one rank's part of it. itemsize: bytes of a hidden number. num_aux: collected layers."""

    vocab: int
    hidden: int
    mlp: int
    heads: int
    kv_heads: int
    head_width: int
    itemsize: int
    num_aux: int = 0

    @classmethod
    def of(cls, target: TargetModel) -> PassSizes:
        """The widths of a loaded target."""
        config, (kv_heads, width) = target.config, target.kv_shapes[0]
        hidden = int(config.hidden_size)
        dense = int(getattr(config, "intermediate_size", None) or 4 * hidden)
        experts = int(getattr(config, "moe_intermediate_size", None) or dense) if target.is_mixture_of_experts else 0
        mlp = max(dense, experts * int(getattr(config, "num_experts_per_tok", None) or 1))
        heads, num_aux = target.heads_per_kv * kv_heads, len(target.aux_hidden_state_layers)
        return cls(target.vocab_size, hidden, mlp, heads, kv_heads, width, target.dtype.itemsize, num_aux)

    def logits(self, rows: int) -> int:
        """Bytes of logits [N, V], float32."""
        return rows * self.vocab * 4

    def layers(self, rows: int, results: int) -> int:
        """Most bytes inside the layers: of attention or of the MLP, and of hidden states around them.

        results: partial results of each row's attention, 1 if keys are not cut.
        """
        partials = results * self.heads * (self.head_width + 1) * 4 if results > 1 else 0
        attention = (2 * self.heads + 2 * self.kv_heads) * self.head_width * self.itemsize + partials
        mlp = 3 * self.mlp * self.itemsize
        return rows * max(attention, mlp) + self.states(rows)

    def states(self, rows: int) -> int:
        """Bytes of hidden states: of the residual stream, and of collected layers, one by one and side by side."""
        return rows * (4 + 2 * self.num_aux) * self.hidden * self.itemsize

    def peak(self, rows: int, num_logits: int, results: int) -> int:
        """Most bytes in use at once; an allocator that reuses no block of layers for logits takes more."""
        return max(self.layers(rows, results), self.states(rows) + self.logits(num_logits))


def output_bytes(sizes: PassSizes, rows: int) -> int:
    """Bytes that all graphs together keep for their outputs: logits and hidden states of the largest, which all share."""
    return sizes.logits(rows) + rows * sizes.num_aux * sizes.hidden * sizes.itemsize


def graph_bytes(sizes: PassSizes, max_rows: int, max_segments: int, tiling: Tiling) -> int:
    """Bytes that captured graphs keep. They share one pool: the outputs, and what the neediest graph takes besides.

    All but the largest compute logits in the pool before they copy them to the shared output.
    """
    buckets = row_buckets(min(max_rows, MAX_GRAPH_ROWS))
    shapes = [bucket_shape(rows, max_segments, tiling) for rows in buckets]
    inner = max(sizes.layers(shape.rows, shape.num_results) for shape in shapes)
    copied = sizes.logits(buckets[-2]) if len(buckets) > 1 else 0
    words = 4 * max(map(max_words, shapes))
    return output_bytes(sizes, buckets[-1]) + inner + copied + words + len(buckets) * GRAPH_NODES


def launched_bytes(sizes: PassSizes, max_rows: int, max_logits: int, tiling: Tiling) -> int:
    """Bytes of the largest pass that no graph holds."""
    shape = tiling.shape(max_rows, max_logits, max(-(-max_rows // tiling.most_rows), 1), tiling.most_rows)
    return sizes.layers(max_rows, shape.num_results) + sizes.logits(max_logits)


def reserved_bytes(target: TargetModel, plan: BackendPlan, max_verify_tokens: int) -> int:
    """Bytes to leave free beside the KV cache, for graphs and for the largest pass; 0 on the CPU."""
    if target.device.type != "cuda":
        return 0
    limits, sizes = plan.limits, PassSizes.of(target)
    tiling = tiling_on(target.device, target.dtype, target.heads_per_kv, target.kv_shapes[0][0])
    max_logits = min(limits.rows, max_verify_tokens + limits.segments)
    total = launched_bytes(sizes, limits.rows, max_logits, tiling) + WORKSPACES
    if plan.kind is not BackendKind.PLAIN:
        total += limits.prefix * torch.int32.itemsize
    if plan.kind is BackendKind.GRAPHS:
        total += graph_bytes(sizes, limits.rows, limits.segments, tiling)
    return total
