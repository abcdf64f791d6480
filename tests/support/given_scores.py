"""Scores of children that a test gives, ranked as a draft model's are."""

from typing import NamedTuple

from torch import Tensor

from eyas.kernels.arguments import Ranked
from eyas.kernels.by_device import rank


class GivenScores(NamedTuple):
    """Scores [S, R, D]."""

    scores: Tensor

    def best(self, k: int, above: Tensor | None = None) -> Ranked:
        found = rank(self.scores, k)
        return found if above is None else Ranked(found.scores + above[:, :, None], found.ids)


def given_scores(scores: Tensor, level: int) -> GivenScores:
    """Score by what an expansion returns, as it is."""
    return GivenScores(scores)
