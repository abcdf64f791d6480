"""The parts of a block head: layers with attention done elsewhere, convolutions, Markov and confidence head, selector.

Attribute names are those of published checkpoints. Legend: R rows, B rows of a block, H draft hidden, d head width, V target
vocabulary, D draft vocabulary, r rank.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import skip_init

from eyas.kernels.arguments import Projected
from eyas.kernels.by_device import layer_kernels
from eyas.kernels.plain import layers as plain
from eyas.models.heads.block_config import BlockHeadConfig
from eyas.models.heads.layers import rms_norm
from eyas.models.layers.norms import HeadLayout, RMSNorm


class BlockLayer(nn.Module):
    """A Qwen3 decoder layer; DFlash2 has convolutions within the block around attention and MLP."""

    def __init__(self, c: BlockHeadConfig) -> None:
        super().__init__()
        self._eps = c.rms_norm_eps
        self.input_layernorm, self.post_attention_layernorm = nn.RMSNorm(c.hidden), nn.RMSNorm(c.hidden)
        self.self_attn, self.mlp = BlockSelfAttention(c), BlockMLP(c)
        self.attention_conv = BlockConvolution(c) if c.conv_kernel else None
        self.mlp_conv = BlockConvolution(c) if c.conv_kernel else None

    def forward(self, states: Tensor, rotary: Tensor, attend: Callable[[Projected], Tensor]) -> Tensor:
        """Map states [R, H], rotary [R, 2, d] to the next states [R, H]."""
        rows, kernel = rms_norm(states, self.input_layernorm.weight, self._eps), None
        if self.attention_conv is not None:
            rows, kernel = self.attention_conv.before(rows)
        rows = self.self_attn.o_proj(attend(self.self_attn.project(rows, rotary)).flatten(1))
        if self.attention_conv is not None and kernel is not None:
            rows = self.attention_conv.after(rows, kernel)
        states = states + rows
        rows = rms_norm(states, self.post_attention_layernorm.weight, self._eps)
        if self.mlp_conv is not None:
            rows, kernel = self.mlp_conv.before(rows)
        rows = self.mlp(rows)
        if self.mlp_conv is not None and kernel is not None:
            rows = self.mlp_conv.after(rows, kernel)
        return states + rows


class BlockSelfAttention(nn.Module):
    """The projections of a layer's attention, with norms of queries and keys per head."""

    def __init__(self, c: BlockHeadConfig) -> None:
        super().__init__()
        self._eps, self._width = c.rms_norm_eps, c.head_dim
        q, kv, bias = c.num_heads * c.head_dim, c.num_kv_heads * c.head_dim, c.attention_bias
        self.q_proj, self.o_proj = empty_linear(c.hidden, q, bias), empty_linear(q, c.hidden, bias)
        self.k_proj, self.v_proj = empty_linear(c.hidden, kv, bias), empty_linear(c.hidden, kv, bias)
        self.q_norm, self.k_norm = nn.RMSNorm(c.head_dim), nn.RMSNorm(c.head_dim)
        self._num_heads, self._num_kv = c.num_heads, c.num_kv_heads
        self._whole: HeadLayout | None = None
        self._keys: HeadLayout | None = None

    def serve(self) -> None:
        """Lay out the norms for the kernel of a GPU: a row for each head of queries and keys, and of keys alone."""
        weights = self.q_norm.weight.expand(self._num_heads, -1), self.k_norm.weight.expand(self._num_kv, -1)
        whole, keys = (RMSNorm(torch.cat(rows), self._eps, adds_one=False) for rows in (weights, weights[1:]))
        self._whole = HeadLayout(self._num_heads, self._num_kv, self._width, whole)
        self._keys = HeadLayout(0, self._num_kv, self._width, keys)

    def project(self, rows: Tensor, rotary: Tensor) -> Projected:
        """Project rows [R, H] as attention sees them, rotary [R, 2, d]; the residual of the result is `rows`."""
        weights, parts = (self.q_norm.weight, self.k_norm.weight), (self.q_proj(rows), self.k_proj(rows), self.v_proj(rows))
        return _kernels_for(rows, self._whole).project_parts(parts, weights, self._eps, self._whole, rotary, rows)  # type: ignore[no-any-return]

    def project_context(self, features: Tensor, rotary: Tensor) -> Projected:
        """Return keys and values of features [R, H], rotary [R, 2, d]; the query is empty."""
        weights, parts = (self.k_norm.weight,), (self.k_proj(features), self.v_proj(features))
        return _kernels_for(features, self._keys).project_parts(parts, weights, self._eps, self._keys, rotary, features)  # type: ignore[no-any-return]


def _kernels_for(rows: Tensor, heads: HeadLayout | None) -> Any:
    """Return the kernels for projections; plain ones until the head is served."""
    return layer_kernels(rows) if heads else plain


class BlockMLP(nn.Module):
    """SwiGLU."""

    def __init__(self, c: BlockHeadConfig) -> None:
        super().__init__()
        self.gate_proj, self.up_proj = empty_linear(c.hidden, c.intermediate), empty_linear(c.hidden, c.intermediate)
        self.down_proj = empty_linear(c.intermediate, c.hidden)

    def forward(self, rows: Tensor) -> Tensor:
        gates, ups = self.gate_proj(rows), self.up_proj(rows)
        return self.down_proj(layer_kernels(rows).gate(gates, "silu", ups))  # type: ignore[no-any-return]


class BlockConvolution(nn.Module):
    """DFlash2: causal convolutions over a block's rows, before and after a sublayer.

    y_i = sum over taps t of (base[t] + delta_i[t, group]) * x_(i - t), zero before the block's first row. The deltas of both
    sides come from the sublayer's input.
    """

    def __init__(self, c: BlockHeadConfig) -> None:
        super().__init__()
        self._block, self._taps = c.block_size, c.conv_kernel
        self.base_kernel = nn.Parameter(torch.empty(2, c.conv_kernel, c.hidden))
        self.kernel_projection = empty_linear(c.hidden, 2 * c.conv_kernel * c.hidden // c.conv_group)

    def before(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        """Return the convolved rows [R, H], and the deltas of both sides [R, 2, taps, groups]."""
        deltas = self.kernel_projection(rows).view(len(rows), 2, self._taps, -1)
        return self._convolve(rows, deltas, 0), deltas

    def after(self, rows: Tensor, deltas: Tensor) -> Tensor:
        """Return the convolved rows [R, H] of a sublayer's output."""
        return self._convolve(rows, deltas, 1)

    def _convolve(self, rows: Tensor, deltas: Tensor, side: int) -> Tensor:
        """Convolve rows [R, H]. side: 0 before the sublayer, 1 behind it."""
        kernels, base = layer_kernels(rows), self.base_kernel[side]
        return kernels.convolve(rows, base, deltas, side, self._block)


class MarkovHead(nn.Module):
    """DSpark: a bias W2 z to the logits of a depth; z depends on the token before it, e = W1[token].

    vanilla: z = e. gated: z = sigmoid(G [h; e] + b) * e. rnn: gate g, candidate c and output o from [s; e; h];
    s becomes sigmoid(g) s + (1 - sigmoid(g)) tanh(c), and z = tanh(o).
    """

    def __init__(self, c: BlockHeadConfig) -> None:
        super().__init__()
        rank, self.kind = c.markov_rank, c.markov_kind
        self.state_size = rank if self.kind == "rnn" else 0
        self.markov_w1, self.markov_w2 = nn.Embedding(c.vocab_size, rank), empty_linear(rank, c.draft_vocab_size)
        if self.kind == "gated":
            self.gate_proj = empty_linear(c.hidden + rank, rank, bias=True)
        if self.kind == "rnn":
            self.joint_proj = empty_linear(2 * rank + c.hidden, 3 * rank, bias=True)

    def latent(self, states: Tensor, previous: Tensor, memory: Tensor) -> tuple[Tensor, Tensor]:
        """Return z [..., r] and the next memory, of normed states [..., H], token ids before [...] and memory [..., r]."""
        embedded = F.embedding(previous, self.markov_w1.weight)
        if self.kind == "vanilla":
            return embedded, memory
        states = states.expand(*previous.shape, -1)
        if self.kind == "gated":
            return torch.sigmoid(self.gate_proj(torch.cat([states, embedded], -1))) * embedded, memory
        gate, candidate, output = self.joint_proj(torch.cat([memory, embedded, states], -1)).chunk(3, -1)
        gate = torch.sigmoid(gate)
        return torch.tanh(output), gate * memory + (1 - gate) * torch.tanh(candidate)

    def bias(self, latent: Tensor) -> Tensor:
        """Return the bias [..., D] of z [..., r]."""
        return self.markov_w2(latent)  # type: ignore[no-any-return]


class ConfidenceHead(nn.Module):
    """DSpark: the chance that a proposed token is accepted, from the normed state and the embedding of the token before."""

    def __init__(self, c: BlockHeadConfig) -> None:
        super().__init__()
        self.proj = empty_linear(c.hidden + (c.markov_rank if c.confidence_with_markov else 0), 1, bias=True)


class CandidateSelector(nn.Module):
    """DFlash2: scores the likeliest tokens of a depth by how they follow the token before, U(b) + <P[a] * (Q h), S[b]>."""

    def __init__(self, c: BlockHeadConfig) -> None:
        super().__init__()
        self.top_k = c.selector_top_k
        self.predecessor_codebook = nn.Parameter(torch.empty(c.vocab_size, c.selector_rank))
        self.successor_codebook = nn.Parameter(torch.empty(c.vocab_size, c.selector_rank))
        self.hidden_projection = empty_linear(c.hidden, c.selector_rank)

    def forward(self, logits: Tensor, states: Tensor, previous: Tensor) -> Tensor:
        """Return logits [..., V] of the candidates, minus infinity elsewhere; logits [..., V], states [..., H], previous
        [...].
        """
        unary, ids = logits.topk(self.top_k, -1)
        # <P[a] * (Q h), S[b]> for the token before a and each of the candidates b, [..., top_k].
        context = F.embedding(previous, self.predecessor_codebook) * self.hidden_projection(states)
        scores = unary + (context[..., None, :] * F.embedding(ids, self.successor_codebook)).sum(-1).float()
        nothing = logits.new_full((*scores.shape[:-1], logits.shape[-1]), float("-inf"))
        return nothing.scatter(-1, ids.expand_as(scores), scores)


def empty_linear(inputs: int, outputs: int, bias: bool = False) -> nn.Linear:
    """Return a linear layer without values yet."""
    return skip_init(nn.Linear, inputs, outputs, bias=bias)  # type: ignore[no-any-return, no-untyped-call]
