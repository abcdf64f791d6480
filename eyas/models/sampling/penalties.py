"""Penalties on tokens that have occurred: logits and counts in, logits out. Knows no request.

Legend: N rows, D tokens that have occurred. All float32 and elementwise, so that no row's result depends on its neighbours.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True)
class Penalties:
    """How strong they are; 1, 0 and 0 do nothing."""

    repetition: float
    frequency: float
    presence: float


def penalised(logits: Tensor, output: Tensor, prompted: Tensor, by: Penalties) -> Tensor:
    """Logits [N, D] after repetition (Keskar et al. 2019, section 4.1), then frequency and presence penalty.

    output: how often the token is in the row's output so far, float32 [N, D]; prompted: whether it is in the prompt, [D].
    Repetition looks at both, the other two at the output alone.
    """
    emitted = output > 0
    weakened = (logits / by.repetition).where(logits > 0, logits * by.repetition)
    return weakened.where(emitted | prompted, logits) - by.frequency * output - by.presence * emitted
