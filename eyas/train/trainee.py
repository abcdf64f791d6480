"""The contract of what is trained: a head or a draft model, and its loss."""

from __future__ import annotations

from abc import ABC, abstractmethod
from pathlib import Path
from typing import Protocol, TypeAlias, runtime_checkable

import torch.nn.functional as F
from torch import Tensor, nn

from eyas.models.hidden_states import FINAL_NORM_OUTPUT
from eyas.train.config import LossConfig, LossType
from eyas.train.features import TargetStates
from eyas.train.start import Samples
from eyas.train.windows import Batch

Metrics: TypeAlias = dict[str, Tensor]


class Trainee(nn.Module, ABC):
    """A head or a draft model, and its loss.

    Args:
        teacher: rows of the target's output layer for the tokens that are compared, float32 [D, C].
    """

    def __init__(self, config: LossConfig, teacher: Tensor) -> None:
        super().__init__()
        self.config = config
        self.register_buffer("teacher", teacher.contiguous(), persistent=False)
        self.teacher: Tensor

    @property
    def aux_hidden_state_layers(self) -> tuple[int, ...]:
        """The layers of the target whose inputs it reads; by default the final state alone."""
        return (FINAL_NORM_OUTPUT,)

    @abstractmethod
    def forward(self, batch: Batch, states: TargetStates, seed: int, loss_type: LossType) -> Metrics:
        """Return the loss of a batch, under "loss", and figures for the log. seed: of what is random."""

    @abstractmethod
    def write(self, folder: Path) -> None:
        """Write a checkpoint that drafters load."""

    def teacher_logits(self, final: Tensor) -> Tensor:
        """Return the target's logits [..., D] for its final states [..., C]."""
        return F.linear(final, self.teacher.to(final.dtype))


@runtime_checkable
class Startable(Protocol):
    """A trainee with a least-squares start."""

    def start(self, samples: Samples) -> None:
        """Begin with the linear maps that are solved from samples."""
        ...
