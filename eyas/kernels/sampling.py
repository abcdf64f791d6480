"""Chooses what draws and ranks rows of logits: Triton's kernels, numba's, or operations of torch.

Legend: N rows, V vocabulary, P tokens of a part of it, S parts.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

from eyas.device.placement import runs_compiled, runs_triton
from eyas.kernels.arguments import Draw, Kept, Ranked, Scale

# Scores of a row up to which sorting is faster than selection.
MAX_SORTED = 256


class SamplingKernels(Protocol):
    """Kernels for rows of logits, float32. Modules of this package are such."""

    def draw_rows(self, logits: Tensor, draws: Sequence[Draw]) -> Tensor:
        """Return one token id per row of logits [N, V], int64 [N]; V where a row holds NaN. N is above 0.

        Temperature 0 takes the likeliest token, above it argmin noise / probs.
        """
        ...

    def race(self, logits: Tensor, draws: Sequence[Draw], first_id: int, vocab_size: int) -> Tensor:
        """Return what each row's draw finds in one part of the vocabulary, for `best_of_races`; filters are not applied.

        Returns int32 [3, N]: bits of the part's largest logit, bits of its lowest score, and the token with it; vocab_size
        where the part holds NaN. Scores are those of an exponential race relative to the part's largest logit, or -logit.

        Args:
            logits: [N, P] of the tokens from `first_id` on.
            vocab_size: of all parts.
        """
        ...

    def best_of_races(self, found: Tensor, draws: Sequence[Draw], vocab_size: int) -> Tensor:
        """Return what `draw_rows` draws over the whole vocabulary: int64 [N].

        found: int32 [S, 3, N], `race` of each part in the order of their ids. A score of parts has a relative error of at
        most (3 g + 12) * 2**-24, g being how far the token's logit is below the row's largest, divided by the temperature;
        one part's has no larger one. So the two can differ only where the two best scores are closer than twice that, which
        has a probability of at most twice that: 6e-6 at g = 12.
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
        from eyas.kernels.cpu import draws as compiled

        return compiled
    from eyas.kernels.plain import sampling as plain

    return plain


def rank(scores: Tensor, k: int) -> Ranked:
    """Return the k highest of each row of float32 scores [..., V], best first, exact ties ordered by lowest id."""
    if scores.shape[-1] <= MAX_SORTED:
        ordered = torch.sort(scores, dim=-1, descending=True, stable=True)
        return Ranked(ordered.values[..., :k], ordered.indices[..., :k])
    return sampling_kernels(scores).top_k(scores, k)
