"""Slots of sessions side by side: one ragged list each in, one padded table out. Knows no heads.

Legend: S sessions, L prefix length, the longest or more.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from eyas.cache.slots import Slots
from eyas.models.tensors import upload


@dataclass(frozen=True)
class Prefix:
    """index: slots of each session's prefix, padding behind them, int64 [S, L]. lengths: without padding, int64 [S]."""

    index: Tensor
    lengths: Tensor


def padded_slots(slots: Sequence[Slots], length: int, spare: int) -> Slots:
    """[S, length]; what is padded names slot `spare`."""
    return np.stack([np.pad(own, (0, length - len(own)), constant_values=spare) for own in slots])


def tight_prefix(slots: Sequence[Slots], spare: int, device: torch.device) -> Prefix:
    """On the device, padded to the longest."""
    lengths = np.array([len(own) for own in slots])
    index = padded_slots(slots, int(lengths.max()), spare)
    return Prefix(upload(index, device), upload(lengths, device))
