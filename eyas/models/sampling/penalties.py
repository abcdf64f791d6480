"""Penalties on tokens that have occurred: logits and counts in, logits out. Knows no request.

Legend: N rows, V vocabulary. All float32 and elementwise, so that a row's result does not depend on its neighbours.
"""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor


class Penalties(NamedTuple):
    """One strength per row, float32 [N]; 1, 0 and 0 do nothing."""

    repetition: Tensor
    presence: Tensor
    frequency: Tensor


def penalised(logits: Tensor, output: Tensor, prompted: Tensor, penalties: Penalties) -> Tensor:
    """Logits [N, V] after repetition (Keskar et al. 2019, section 4.1), then frequency and presence penalty.

    output: how often a token is in the row's output so far, float32 [N, V]; prompted: whether it is in the prompt, [N, V].
    Repetition looks at both, the other two at the output alone.
    """
    occurred = output > 0
    repetition = penalties.repetition[:, None]
    weakened = (logits / repetition).where(logits > 0, logits * repetition)
    logits = weakened.where(occurred | prompted, logits)
    return logits - penalties.frequency[:, None] * output - penalties.presence[:, None] * occurred
