"""Chooses kernels for tensors by their device: Triton's, numba's, or plain ones with the same signatures.

Legend: N rows, V vocabulary, P tokens of a part of it; S sessions, L levels, R rows of a session, D draft vocabulary, C
candidates of a level, W nodes expanded of these, K most tokens of a proposal.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Protocol

import torch
from torch import Tensor

from eyas.device.placement import runs_compiled, runs_triton
from eyas.kernels.arguments import (
    UNSCALED,
    Draws,
    Frontier,
    Kept,
    KVScales,
    LayerSlots,
    ProbsFunction,
    Projected,
    Ranked,
    RecurrentInputs,
    Scale,
)
from eyas.kernels.plain import layers as plain_layers

if TYPE_CHECKING:
    from eyas.cache.state_pools import LayerStates
    from eyas.models.layers.norms import HeadLayout, RMSNorm
    from eyas.models.recurrent_rows import RecurrentRows

# Scores of a row up to which sorting is faster than selection.
MAX_SORTED = 256


class SamplingKernels(Protocol):
    """Kernels for rows of logits, float32. Modules of this package are such."""

    def draw_rows(self, logits: Tensor, draws: Draws) -> Tensor:
        """Return one token id per row of logits [N, V], int64 [N]; V where a row holds NaN. N is above 0.

        Temperature 0 takes the likeliest token, above it argmin noise / probs. See `Draws.along` for rows that may be left
        out.
        """
        ...

    def race(self, logits: Tensor, draws: Draws, first_id: int, vocab_size: int) -> Tensor:
        """Return what each row's draw finds in one part of the vocabulary, for `sharded.best_of_races`; no filters apply.

        Returns int32 [3, N]: bits of the part's largest logit, bits of its lowest score, and the token with it; vocab_size
        where the part holds NaN. A score is -logit, or comes from an exponential race relative to the part's largest logit.

        Args:
            logits: [N, P] of the tokens from `first_id` on.
            vocab_size: of all parts.
        """
        ...

    def masses_from(self, logits: Tensor, scale: Scale, low: Tensor, shift: int, borders: range) -> Tensor:
        """Return the mass of the tokens whose bits are at least low + border * 2**shift: int64 [N, borders].

        Args:
            logits: [N, P].
            low: int64 [N], see `kernels.plain.sampling.ordered_bits`.
            borders: neighbouring numbers.
        """
        ...

    def kept_logits(self, logits: Tensor, scale: Scale, kept: Kept) -> Tensor:
        """Return logits [N, P], which may be overwritten, with minus infinity for those that are not kept. NaN and infinity
        stay.
        """
        ...

    def top_k(self, scores: Tensor, k: int) -> Ranked:
        """Return the k highest of each row of scores [..., V], best first, exact ties ordered by lowest id."""
        ...

    def warm_up(self, vocab_size: int, device: torch.device) -> None:
        """Compile what `draw_rows` runs, so that no request waits for that."""
        ...


def sampling_kernels(values: Tensor) -> SamplingKernels:
    """Return the kernels for rows on the device of `values`."""
    if runs_triton(values.device):
        from eyas.kernels.cuda import sampling as triton_kernels

        return triton_kernels
    # A kernel of the CPU reads at once: not what an emulated device computes later, nor what has gradients.
    if type(values) is Tensor and not values.requires_grad and runs_compiled(values.device):
        from eyas.kernels.cpu import sampling as compiled

        return compiled
    from eyas.kernels.plain import sampling as plain

    return plain


def sample(logits: Tensor, draws: Draws) -> Tensor:
    """Return one token id per row, int64 [N]; logits float32 [N, V]. V where logits are NaN. Does not wait for the device.

    Temperature 0 takes the likeliest token. Above it, argmin noise / probs: noise depends on (seed, position, token) alone.
    """
    if not len(logits):
        return torch.empty(0, dtype=torch.int64, device=logits.device)
    return sampling_kernels(logits).draw_rows(logits.contiguous(), draws)


def rank(scores: Tensor, k: int) -> Ranked:
    """Return the k highest of each row of float32 scores [..., V], best first, exact ties ordered by lowest id."""
    if scores.shape[-1] <= MAX_SORTED:
        ordered = torch.sort(scores, dim=-1, descending=True, stable=True)
        return Ranked(ordered.values[..., :k], ordered.indices[..., :k])
    return sampling_kernels(scores).top_k(scores, k)


class DraftingKernels(Protocol):
    """Kernels for a level of draft trees. Modules of this package are such.

    `words` are what the scores of each session depend on besides logits, int64 [8, S]: see `drafters.trees.scoring`. A
    `ProbsFunction` says which tokens filters keep where operations of torch find them; kernels read the filters of `words`.
    """

    def shared_noise(self, words: Tensor, draft_ids: Tensor, levels: int) -> Tensor:
        """Return what the target's draws add to the logits, float32 [S, L, D]; zero in sessions at temperature 0.

        draft_ids: the target's ids, int64 [D].
        """
        ...

    def best_children(
        self,
        logits: Tensor,
        words: Tensor,
        noise: Tensor | None,
        level: int,
        k: int,
        above: Tensor | None = None,
        probs: ProbsFunction | None = None,
    ) -> Ranked:
        """Return log-scores float32 and ids int64 [S, R, k] of the best children, best first, ties by lowest id.

        Args:
            logits: [S, R, D] in any float type.
            noise: the output of `shared_noise`; None adds nothing.
            above: scores [S, R] of the nodes, added to their children's.
            probs: applies the filters; None keeps all tokens.
        """
        ...

    def find_frontier(
        self, scores: Tensor, tokens: Tensor, top_k: int, num_children: int, before: int, has_parents: bool
    ) -> Frontier:
        """Return the `top_k` best candidates of a level.

        Args:
            scores, tokens: [S, C], `num_children` for each node of the frontier before.
            before: candidates of the levels above.
            has_parents: whether there is a frontier before, and not only the root.
        """
        ...

    def draw_children(
        self, logits: Tensor, words: Tensor, level: int, draft_ids: Tensor, drawn: Tensor, probs: ProbsFunction
    ) -> Tensor:
        """Write one level of chains to `drawn`, see `draw_chains`. Returns the drawn draft ids, int64 [S, 1].

        Args:
            logits: [S, 1, D] in any float type.
            words: see `chain_words`.
            drawn: float64 [S, L, 2 K + 1].
            probs: applies the filters.
        """
        ...


def drafting_kernels(values: Tensor) -> DraftingKernels:
    """Return the kernels for trees on the device of `values`."""
    if runs_triton(values.device):
        from eyas.kernels.cuda import drafting as triton_kernels

        return triton_kernels
    from eyas.kernels.plain import drafting as plain

    return plain


class LayerKernels(Protocol):
    """Kernels between the products of layers. `kernels.plain.layers` says what each of them does."""

    RUNS_EXPERTS: bool

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor: ...

    def add_rms_norm(self, hidden: Tensor, delta: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]: ...

    def project(
        self, qkv: Tensor, heads: HeadLayout, rotary: Tensor, residual: Tensor, slots: LayerSlots | None
    ) -> Projected: ...

    def project_parts(
        self, parts: Sequence[Tensor], weights: Sequence[Tensor], eps: float, heads: HeadLayout | None, rotary: Tensor,
        residual: Tensor,
    ) -> Projected: ...  # fmt: skip

    def gate(self, gate_up: Tensor, activation: str, ups: Tensor | None = None) -> Tensor: ...

    def convolve(self, rows: Tensor, base: Tensor, deltas: Tensor, side: int, block_rows: int) -> Tensor: ...

    def scaled_linear(self, x: Tensor, weight: Tensor, bias: Tensor | None, scales: Tensor) -> Tensor: ...

    def pair_inputs(
        self, states: Tensor, parents: Tensor, tokens: Tensor, draft_ids: Tensor, embedding: Tensor,
        norms: tuple[Tensor, Tensor], eps: float,
    ) -> tuple[Tensor, Tensor]: ...  # fmt: skip

    def norm_rows(self, x: Tensor, norm: RMSNorm) -> Tensor: ...

    def rotate_and_store(
        self, qkv: Tensor, heads: HeadLayout, rotary: tuple[Tensor, Tensor], keys: Tensor, values: Tensor, slots: Tensor,
        scales: KVScales = UNSCALED,
    ) -> Tensor: ...  # fmt: skip

    def add_norm(
        self, hidden: Tensor, delta: Tensor, norm: RMSNorm, delta_norm: RMSNorm | None, factor: Tensor | None = None
    ) -> tuple[Tensor, Tensor]: ...


def layer_kernels(x: Tensor) -> LayerKernels:
    """Return the kernels for rows of a draft head: plain ones on the CPU, without Triton, and in training, which needs
    gradients.
    """
    if not torch.is_inference_mode_enabled() or not runs_triton(x.device):
        return plain_layers
    from eyas.kernels.cuda import layers as compiled

    return compiled


def fused_kernels(rows: Tensor, has_attention: bool) -> LayerKernels:
    """Return the kernels for rows of a fused layer: Triton's on a GPU, where attention has its own, too; else plain ones."""
    if not has_attention or rows.device.type == "cpu":
        return plain_layers
    from eyas.kernels.cuda import layers as compiled

    return compiled


class RecurrentKernels(Protocol):
    """Kernels of recurrent layers. `kernels.plain.recurrent` says what each of them does."""

    def convolve(
        self, inputs: Tensor, weight: Tensor, bias: Tensor | None, pools: LayerStates, rows: RecurrentRows
    ) -> Tensor: ...

    def scan(self, inputs: RecurrentInputs, pools: LayerStates, rows: RecurrentRows) -> Tensor: ...


def recurrent_kernels(has_attention: bool, has_channel_gates: bool) -> RecurrentKernels:
    """Return the kernels for rows of a recurrent layer: Triton's where attention has its own, but plain ones for gates of
    channels.
    """
    if has_attention and not has_channel_gates:
        from eyas.kernels.cuda import recurrent as compiled

        return compiled
    from eyas.kernels.plain import recurrent as plain

    return plain
