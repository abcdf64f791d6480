"""Chooses what grows a level of draft trees: Triton's kernels, or operations of torch.

Legend: S sessions, L levels, R rows of a session, D draft vocabulary, P candidates of a level, W nodes expanded of these, K
most tokens of a proposal.
"""

from __future__ import annotations

from typing import Protocol

from torch import Tensor

from eyas.device.placement import runs_triton
from eyas.kernels.arguments import Frontier, ProbsFunction, Ranked


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
            scores, tokens: [S, P], `num_children` for each node of the frontier before.
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
